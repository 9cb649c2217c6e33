"""Answers in text: `extraction` finds the final one of a completion, `notation` brings its writing
to one form, `forms` reads what kind of answer it is, and `values` compares what is computed.

Whatever is read is decided by the text alone, never by the gold answer: a completion that names
two answers has none. `comparison` compares two forms, with `literals` and `units` as its rules for
numbers and units, and `brackets` splits text for `forms`. The reward `numeric` uses all of them;
`choice` uses `extraction` and `notation`.
"""
