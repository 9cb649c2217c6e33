"""A live page over the runs of a store, for people: read only, without a database.

What it shows is read from what runs have committed (`tuneloop.runs`); nothing here computes, starts or changes a run.
"""
