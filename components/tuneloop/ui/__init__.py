"""A live page of the runs in a store: read-only, without a database, built from the artifacts
that runs committed.
"""
