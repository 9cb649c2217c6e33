"""Programs that a policy writes, and their tests: `completions` takes a program from a completion,
`tests` reads the tests of a row, `checks` runs tests that are code in a process of their own. The
reward `rewards/code.py` alone uses them."""
