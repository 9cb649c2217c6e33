"""Answers in text: `extraction` finds the final one of a completion, `notation` brings its writing
to one form, `forms` reads what kind of answer it is, and `values` compares what is computed.

Whatever is read is decided by the text alone, never by the gold answer: a completion that names
two answers has none.
"""
