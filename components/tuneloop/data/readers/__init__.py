"""Readers of files: every one gives rows by number, each with the name that the user's file gives it.

Rows of JSON, JSON Lines and CSV are read by Python's own `json` and `csv`, those of Parquet and
Arrow by pyarrow, and the hub and what ``save_to_disk`` wrote by `datasets`. The library `datasets`
is not used for text files: its JSON reader infers one schema for all rows, so that fields that a
row has not come back as null, mixed types fail, and of two equal keys the last wins; its CSV reader
makes 7 of "007" and null of "NA". Neither knows the line that a row stands on.

A reader for another format is a function from an open file and its path to `Rows`, with an entry in
`data/readers/opening.py: READERS`. `tests/unit/data/test_sources.py` gives every format the same
rows.
"""

from dataclasses import dataclass

from tuneloop.core.json_types import JsonMapping
from tuneloop.data import BadRow
from tuneloop.formats.sequences import LazySequence


@dataclass(frozen=True)
class Row:
    """The values of a row by column, and the name of the row: ``FILE:LINE`` or ``FILE row N``.

    Attributes:
        values: what JSON can hold; `arrow_files.py: make_row` makes text of dates and decimals, and
            leaves bytes out.
        nulls: how many fields of nested columns were null and are left out: nested Parquet has a
            field for all rows if one row has it.
    """

    values: JsonMapping
    name: str
    nulls: int = 0


ReadRow = Row | BadRow
"""What a reader makes of a row of a file."""
Rows = LazySequence[ReadRow]
