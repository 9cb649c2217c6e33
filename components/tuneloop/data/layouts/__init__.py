"""The layouts that public data sets have: recognised by their columns, one entry each.

A family of layouts is one file here with a tuple ``LAYOUTS``: adding a layout is one entry, and a
row of docs/data.md with a sample of five rows. Of the layouts that fit the first rows of a file, the
one with the most columns is taken, and of equals the one that looks at the values, too. So a new
layout may take the files of another: `tests/unit/data/test_layouts.py` reads each sample of
docs/data.md, and `make golden` writes the table of layouts in docs/templates.md anew.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import UnionType

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.data import Example
from tuneloop.data.columns import MISSING, Columns, get_path, has_path

Values = JsonMapping
"""The values of a row by column."""


@dataclass(frozen=True)
class Companion:
    """A file beside the data that has more columns of the same rows.

    Attributes:
        pattern: its path from the data's folder, where ``{name}`` is the data's own file name.
        key: the column that both have, by which rows belong together.
    """

    pattern: str
    key: str


@dataclass(frozen=True, eq=False)
class Layout:
    """A layout: what its columns are called, and how a row becomes an example.

    Attributes:
        name: as ``data.layout`` takes it; `data/layout_tables.py: Tables.read_examples` knows
            ``unpaired-preference`` by it.
        title: what it is called in the line that says what was recognised.
        columns: the columns that every row has; paths into columns are possible. A column that only
            some rows have is not listed, though `read` or `roles` may read it.
        roles: which column holds what, where that says all of a row; ignored where there is a
            `read`.
        read: makes an example of a row's values, where `roles` do not suffice. Raises BadValue: the
            row cannot be used.
        summary: where prompt, answer and completions come from; words for the log and for messages,
            which nothing compares with `read`.
        rewards: reward → weight that judges completions of these rows by default; empty:
            `data/tables.py: DEFAULT_REWARDS`.
        types: path of a column → the types that its values have in Python, where others of the same
            name hold something else.
        fits: whether a row's values are of this layout; None: its columns and types suffice.
        companion: a file with more columns; None: all are in the file itself.
    """

    name: str
    title: str
    columns: tuple[str, ...]
    summary: str
    roles: Columns = field(default_factory=Columns)
    read: Callable[[Values], Example] | None = None
    rewards: Mapping[str, float] = field(default_factory=dict)
    types: Mapping[str, type | UnionType] = field(default_factory=dict)
    fits: Callable[[Values], bool] | None = None
    companion: Companion | None = None

    def read_example(self, values: Values) -> Example:
        """Make an example of a row's values. Raises BadValue: the row cannot be used."""
        if self.read is None:
            return self.roles.apply(Example("", None), values)
        return self.read(values)

    def has_columns(self, values: Values) -> bool:
        """Return whether a row has the columns of this layout, whatever they hold."""
        return all(has_path(values, column) for column in self.columns)

    def matches(self, values: Values) -> bool:
        """Return whether a row has the columns of this layout, filled as it fills them."""
        try:
            if any(get_path(values, column) in (MISSING, None) for column in self.columns):
                return False
            for path, kind in self.types.items():
                if not isinstance(get_path(values, path), kind):
                    return False
            return self.fits is None or self.fits(values)
        except ValueError:
            # JSON text on the way to a column, or in it, is damaged.
            return False


@cache
def list_layouts() -> list[Layout]:
    """List all layouts in the order in which they are tried: those with the most columns first, and
    of these the ones that also look at values. Of equals the order is that of the modules' names,
    then that of `LAYOUTS`. A layout comes before those whose columns are a part of its own."""
    layouts: list[Layout] = []
    for module in pkgutil.iter_modules(__path__):
        layouts += importlib.import_module(f"{__name__}.{module.name}").LAYOUTS
    return sorted(layouts, key=_rank)


def _rank(layout: Layout) -> tuple[int, bool]:
    """Return what layouts are sorted by, the smallest first."""
    looks_closer = layout.fits is not None or bool(layout.types)
    return -len(layout.columns), not looks_closer


def find_layout(name: str) -> Layout:
    """Find the layout of a name. Raises UserError: there is none."""
    for layout in list_layouts():
        if layout.name == name:
            return layout
    names = ", ".join(sorted(layout.name for layout in list_layouts()))
    raise UserError("data.layout", name, f"unknown; known: {names}")


def recognise_layout(rows: Sequence[Values]) -> Layout | None:
    """Recognise the layout that more than half of these rows have; None: there is none.

    A layout whose `columns` are there is taken even if their values do not fit, but only if no
    layout fits by its values, too.
    """
    # Not of all rows: a few that are damaged are dropped later, each with its reason.
    # Where the names fit, and what the columns hold does not, reading a row says what is wrong with
    # it: "unknown columns" would blame names that are right.
    for fits in (Layout.matches, Layout.has_columns):
        for layout in list_layouts():
            if 2 * sum(fits(layout, values) for values in rows) > len(rows):
                return layout
    return None
