"""Rows of prompts and demonstrations: the columns that only newer data has, and how a row is named
to people.

`data_prep` writes these rows (`data/tables.py: SCHEMAS`); artifacts of earlier releases lack the
optional columns. Readers name the columns that they need, and get no others:
`inference/generate.py: COLUMNS`, `training/corpora.py`, `formats/prompt_lengths.py: REQUIRED`.
"""

import re
from collections.abc import Iterable

from tuneloop.core.json_types import JsonMapping

OPTIONAL_COLUMNS = ("tools", "row")
"""Columns that are read where the data has them: schemas of tools (a JSON list), and the row of the
user's file. A column that is added to data goes here, so that older data can still be read."""


def list_columns(required: Iterable[str], present: Iterable[str]) -> list[str]:
    """List the columns to read of a file that has the columns `present`."""
    optional = set(present).intersection(OPTIONAL_COLUMNS)
    return list(required) + sorted(optional, key=OPTIONAL_COLUMNS.index)


def name_row(row: JsonMapping) -> str:
    """Name a row as the user's file does, if that is known, and else by its id."""
    return str(row.get("row") or row["id"])


def split_numbers(name: str) -> tuple[tuple[int, str], ...]:
    """Split a name at its numbers, so that names sort as people count: row 9 before row 10."""
    parts: list[tuple[int, str]] = []
    for piece in re.split(r"([0-9]+)", name):
        # Both are pairs, since a number and a text cannot be compared.
        if piece.isdigit():
            parts.append((int(piece), ""))
        else:
            parts.append((0, piece))
    return tuple(parts)
