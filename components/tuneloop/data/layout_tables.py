"""Rows of files with what their columns mean: each file is recognised by itself."""

import bisect
import itertools
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from tuneloop.core.errors import UserError
from tuneloop.data import BadRow, BadValue, Example
from tuneloop.data.columns import Columns
from tuneloop.data.layouts import Layout, Values, find_layout, list_layouts, recognise_layout
from tuneloop.data.readers import Row, Rows, hub
from tuneloop.data.readers.opening import join_rows, open_files, read_file
from tuneloop.formats.token_files import Places

PROBED = 20
"""Rows at the beginning that decide which layout a file has."""
Place = str | list[str]
"""A path, a glob, a folder or a name on the hub, or several."""


@dataclass(frozen=True)
class Table:
    """Rows with what their columns mean.

    Attributes:
        place: the file, or the first of several and their number.
        rows: by number; empty where they are streamed.
        stream: all rows in their final order, where they are streamed.
        unread: columns of the first rows that nothing is read from.
    """

    place: str
    rows: Rows
    layout: Layout | None
    columns: Columns
    stream: Iterator[Row | BadRow] | None = None
    unread: tuple[str, ...] = ()

    def describe(self) -> str:
        """Describe in one line what was recognised."""
        count = "rows as they come" if self.stream is not None else f"{len(self.rows):,} rows"
        paths = self.columns.list_paths()
        listed = ", ".join(f"{role} from {path}" for role, path in paths.items())
        if self.layout is None:
            return f"columns as set: {listed}; {count} in {self.place}"
        override = f"; as set: {listed}" if listed else ""
        recognised = f"recognised: {self.layout.title}; {self.layout.summary}{override}"
        return f"{recognised}, {count} in {self.place}"

    def make_example(self, row: Row | BadRow) -> Example | BadRow:
        """Make an example of a row."""
        if isinstance(row, BadRow):
            return row
        try:
            example = Example("", None)
            if self.layout is not None:
                example = self.layout.read_example(row.values)
            example = self.columns.apply(example, row.values)
        except BadValue as error:
            return BadRow(row.name, str(error))
        rewards = None
        if self.layout is not None and self.layout.rewards:
            rewards = self.layout.rewards
        return replace(example, row=row.name, rewards=rewards, nulls=row.nulls)


@dataclass(frozen=True)
class Tables:
    """The rows of all files of a place: a table for each layout that they have."""

    tables: tuple[Table, ...]

    def __len__(self) -> int:
        return sum(len(table.rows) for table in self.tables)

    @property
    def unread(self) -> tuple[str, ...]:
        """Columns that nothing is read from."""
        return tuple(dict.fromkeys(name for table in self.tables for name in table.unread))

    def describe(self) -> list[str]:
        """Describe what was recognised, in one line for each table."""
        return [table.describe() for table in self.tables]

    def read_examples(self, seed: int | None) -> Iterator[Example | BadRow]:
        """Yield an example, or what is wrong, for each row, in an order that `seed` decides.
        Completions that are good or bad (KTO) become pairs."""
        examples = self._read_rows(seed)
        names = [table.layout.name for table in self.tables if table.layout is not None]
        return _pair_up(examples) if "unpaired-preference" in names else examples

    def _read_rows(self, seed: int | None) -> Iterator[Example | BadRow]:
        for table in self.tables:
            if table.stream is not None:
                yield from map(table.make_example, table.stream)
        ends = list(itertools.accumulate(len(table.rows) for table in self.tables))
        order = array("q", range(len(self)))
        if seed is not None:
            random.Random(seed).shuffle(order)
        for place in order:
            number = bisect.bisect_right(ends, place)
            table = self.tables[number]
            start = ends[number] - len(table.rows)
            yield table.make_example(table.rows[place - start])


@dataclass(frozen=True)
class Opener:
    """How tables are opened: what applies to all of them."""

    name: str | None
    revision: str | None
    layout: str | None
    columns: Columns
    answers: str | None = None

    def open(self, path: Place, split: str) -> Tables:
        """Open the rows at a place, and find out what the columns of each file mean."""
        files = open_files(path, split, self.name, self.revision)
        heads = {file: read_head(rows) for file, rows in files.items()}
        layouts = {file: self._choose_layout(head, file) for file, head in heads.items() if head}
        if not layouts:
            _refuse_first_row(*next(iter(files.items())))
        columns = self._complete_columns(heads)
        columns.check(_read_values(files.values()), describe_files(list(files)))
        # A file whose first rows are all damaged is taken as what the first one is.
        usual = next(iter(layouts.values()))
        files_by_layout: dict[Layout | None, dict[str, Rows]] = {}
        for file, rows in files.items():
            files_by_layout.setdefault(layouts.get(file, usual), {})[file] = rows
        tables: list[Table] = []
        for layout, members in files_by_layout.items():
            head = [values for file in members for values in heads[file]]
            rows = join_rows(list(members.values()))
            if layout is not None and layout.companion is not None:
                rows = self._join_companion(rows, list(members), layout.companion)
            place = describe_files(list(members))
            unread = list_unread(head, layout, columns)
            tables.append(Table(place, rows, layout, columns, unread=unread))
        return Tables(tuple(tables))

    def open_stream(self, path: str, split: str, seed: int | None) -> Tables:
        """Open rows of the hub that are read as they come."""
        first, stream = hub.stream_split(path, self.name, self.revision, split, seed)
        head = read_head(first)
        if not head:
            _refuse_first_row(path, first)
        layout = self._choose_layout(head, path)
        columns = self._complete_columns({path: head})
        columns.check(head, path)
        rows: Rows = Places(0, lambda place: first[place])
        unread = list_unread(head, layout, columns)
        return Tables((Table(path, rows, layout, columns, stream, unread),))

    def _choose_layout(self, head: Sequence[Values], file: str) -> Layout | None:
        """Choose the layout of a file by its first rows; None where the columns that are set
        suffice. Raises UserError: none fits."""
        if self.layout is not None:
            chosen = find_layout(self.layout)
            if not any(chosen.matches(values) for values in head):
                listed = ", ".join(chosen.columns)
                remedy = f"does not fit {file}, which has {list_columns(head)}; it needs {listed}"
                raise UserError("data.layout", self.layout, remedy)
            return chosen
        if self.columns.is_whole:
            return None
        layout = recognise_layout(head)
        if layout is None:
            raise UserError("data", file, _explain_unknown(head))
        return layout

    def _complete_columns(self, heads: Mapping[str, Sequence[Values]]) -> Columns:
        """Return the columns with that of the answers where only `answer_regex` is set: the column
        that is called ``answer``. Raises UserError: there is none."""
        columns = self.columns
        if columns.answer_regex is None or columns.answer is not None:
            return columns
        for file, head in heads.items():
            if head and not any("answer" in values for values in head):
                remedy = (
                    f"cuts the answer out of a column, and {file} has none that is called 'answer': "
                    f"name it (data.columns.answer); there are {list_columns(head)}"
                )
                raise UserError("data.columns.answer_regex", columns.answer_regex, remedy)
        return columns.model_copy(update={"answer": "answer"})

    def _join_companion(self, rows: Rows, files: list[str], companion: tuple[str, str]) -> Rows:
        """Join rows with those of a file beside them that have the same key."""
        pattern, key = companion
        path = find_companion(files, pattern) if self.answers is None else self.answers
        if path is None:
            return rows
        others = read_file(path)
        by_key = {
            row.values[key]: dict(row.values)
            for row in others
            if isinstance(row, Row) and key in row.values
        }

        def read(place: int) -> Row | BadRow:
            row: Row | BadRow = rows[place]
            if isinstance(row, BadRow):
                return row
            more = by_key.get(row.values.get(key))
            if more is None:
                return BadRow(row.name, f"has no answer in {path}")
            return replace(row, values={**more, **row.values})

        return Places(len(rows), read)


def find_companion(files: Sequence[str], pattern: str) -> str | None:
    """Find the file beside the only one of `files` that a layout's `companion` names."""
    if len(files) != 1:
        return None
    file = Path(files[0])
    beside = file.parent / pattern.format(name=file.name)
    return str(beside) if beside.is_file() else None


def _pair_up(examples: Iterable[Example | BadRow]) -> Iterator[Example | BadRow]:
    """Yield examples, of completions that are good or bad (KTO) pairs where a prompt has both; each
    is kept until the other comes."""
    waiting: dict[str, list[Example]] = {}
    for example in examples:
        if isinstance(example, BadRow):
            yield example
            continue
        key = repr((example.prompt, example.tools))
        partners = waiting.setdefault(key, [])
        if partners and (partners[0].rejected is None) != (example.rejected is None):
            partner = partners.pop(0)
            good, bad = (partner, example) if example.rejected is not None else (example, partner)
            yield replace(good, rejected=bad.rejected, row=f"{good.row} with {bad.row}")
        else:
            partners.append(example)
    for partners in waiting.values():
        yield from partners


def read_head(rows: Iterable[Row | BadRow]) -> list[Values]:
    """Read the values of the first rows, without those that are damaged."""
    head = itertools.islice(rows, PROBED)
    return [row.values for row in head if isinstance(row, Row)]


def describe_files(files: Sequence[str]) -> str:
    """Describe one or several files: the only one, or how many there are, and the first."""
    return files[0] if len(files) == 1 else f"{len(files)} files ({files[0]}, …)"


def list_columns(head: Sequence[Values]) -> str:
    return ", ".join(dict.fromkeys(name for values in head for name in values))


def list_unread(head: Sequence[Values], layout: Layout | None, columns: Columns) -> tuple[str, ...]:
    """List the columns that neither a layout nor the user's own columns name."""
    paths = ["tools", *columns.list_paths().values()]
    paths += [] if layout is None else layout.columns
    roots = {path.partition(".")[0] for path in paths}
    names = dict.fromkeys(name for values in head for name in values)
    return tuple(name for name in names if name not in roots and name not in paths)


def _read_values(parts: Iterable[Rows]) -> Iterator[Values]:
    """Yield the values of all rows that are not damaged."""
    for rows in parts:
        yield from (row.values for row in rows if isinstance(row, Row))


def _refuse_first_row(file: str, rows: Iterable[Row | BadRow]) -> NoReturn:
    """Raise UserError: none of the first rows can be used. It says what is wrong with the first."""
    first = next(iter(rows), None)
    reason = first.reason if isinstance(first, BadRow) else "no rows"
    row = first.row if isinstance(first, BadRow) else file
    raise UserError("data", row, f"{reason}; nor can its neighbours be used")


def _explain_unknown(head: Sequence[Values]) -> str:
    """Explain which columns there are, and what would be understood."""
    known = ", ".join(sorted(layout.name for layout in list_layouts()))
    return (
        f"has the columns {list_columns(head)}, which are no layout that is known ({known}); "
        "set data.columns (prompt, and answer, completion, or chosen and rejected; or messages), "
        "or write a source of a dozen lines (docs/extending.md)"
    )
