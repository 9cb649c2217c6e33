"""Rows of files with what their columns mean: each file is recognised by itself.

`data/files.py` opens addresses by `Opener`. This module does not know which split a row goes to
(`data/splitting.py`), and only hands on the rewards of a layout (`data/tables.py: RowBuilder`). Its
tests are `tests/unit/data/test_columns.py`, `test_sources.py` and `test_refused_shapes.py`.
"""

import itertools
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from tuneloop.core.errors import UserError
from tuneloop.core.wording import format_count
from tuneloop.data import BadRow, BadValue, Example, Examples, ExampleStream, ReadExample
from tuneloop.data.columns import Columns
from tuneloop.data.layouts import (
    Companion,
    Layout,
    Values,
    find_layout,
    list_layouts,
    recognise_layout,
)
from tuneloop.data.readers import ReadRow, Row, Rows, hub
from tuneloop.data.readers.opening import open_files, read_file
from tuneloop.formats.sequences import LazySequence, chain_sequences

PROBED = 20
"""Rows at the beginning of a file that decide which layout it has. `data/readers/hub.py: FIRST` has
to be as large: of a stream no more rows are looked at."""
MESSAGE_COLUMNS = ({"role", "content"}, {"from", "value"})
"""The columns of a file whose rows are single messages, in OpenAI's form and in ShareGPT's; for the
error that such a file is no layout."""
Addresses = str | list[str]
"""A path, a glob, a folder or a name on the hub, or several."""


@dataclass(frozen=True)
class Table:
    """Rows with what their columns mean.

    Attributes:
        origin: the file, or the first of several and their number.
        rows: by number; empty where they are streamed.
        layout: of all rows; None where the columns that are set suffice.
        columns: as the user set them, which come before what the layout says.
        stream: all rows in their final order, where they are streamed.
        unread: columns of the first rows that neither the layout nor `columns` names.
    """

    origin: str
    rows: Sequence[ReadRow]
    layout: Layout | None
    columns: Columns
    unread: tuple[str, ...]
    stream: Iterator[ReadRow] | None = None

    def describe(self) -> str:
        """Describe in one line what was recognised."""
        count = (
            "rows as they come" if self.stream is not None else format_count(len(self.rows), "row")
        )
        paths = self.columns.list_paths()
        sources = [f"{role} from {path}" for role, path in paths.items()]
        listed = ", ".join(sources)
        if self.layout is None:
            return f"columns as set: {listed}; {count} in {self.origin}"
        override = f"; as set: {listed}" if listed else ""
        title = self.layout.title
        summary = self.layout.summary
        return f"recognised: {title}; {summary}{override}, {count} in {self.origin}"

    def make_example(self, row: ReadRow) -> ReadExample:
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
        # A layout without rewards leaves the choice to the default.
        rewards = self.layout.rewards if self.layout is not None else None
        return replace(example, row=row.name, rewards=rewards or None, nulls=row.nulls)

    def index_examples(self) -> Sequence[ReadExample]:
        """Return the example of each row, made when it is read."""

        def read(index: int) -> ReadExample:
            return self.make_example(self.rows[index])

        return LazySequence(len(self.rows), read)


@dataclass(frozen=True)
class Tables:
    """The rows of all files of an address: a table for each layout that they have, in the order in
    which the layouts come first among the files. It decides, with the seed, the order of rows."""

    tables: tuple[Table, ...]

    def __len__(self) -> int:
        return sum(len(table.rows) for table in self.tables)

    @property
    def unread(self) -> tuple[str, ...]:
        """Columns that nothing is read from."""
        return tuple(dict.fromkeys(name for table in self.tables for name in table.unread))

    @property
    def is_streamed(self) -> bool:
        """Whether the rows come one after another, and nobody knows how many there are."""
        return any(table.stream is not None for table in self.tables)

    def describe(self) -> list[str]:
        """Describe what was recognised, in one line for each table."""
        return [table.describe() for table in self.tables]

    def read_examples(self, seed: int | None) -> ExampleStream:
        """Yield an example, or what is wrong, for each row, in an order that `seed` decides.

        If one table has the layout ``unpaired-preference``, named here, its completions that are
        good or bad (KTO) become pairs, and the examples of all tables go through `_pair_up`.
        """
        examples = self._read_rows(seed)
        names = [table.layout.name for table in self.tables if table.layout is not None]
        return _pair_up(examples) if "unpaired-preference" in names else examples

    def _read_rows(self, seed: int | None) -> ExampleStream:
        for table in self.tables:
            if table.stream is not None:
                yield from map(table.make_example, table.stream)
        examples = chain_sequences([table.index_examples() for table in self.tables])
        # Eight bytes a row: a list of numbers would have five times as many.
        order = array("q", range(len(examples)))
        if seed is not None:
            random.Random(seed).shuffle(order)
        for index in order:
            yield examples[index]


@dataclass(frozen=True)
class Opener:
    """How tables are opened: what applies to all of them.

    Attributes:
        name: the configuration of a data set on the hub.
        revision: branch, tag or commit on the hub.
        layout: the name of the layout of all files; None: each is recognised.
        answers: a file with more columns of the same rows; None: the one that the layout's
            `companion` names. Read only for a layout with a `companion`.
    """

    name: str | None
    revision: str | None
    layout: str | None
    columns: Columns
    answers: str | None = None

    def open(self, path: Addresses, split: str) -> Tables:
        """Open the rows at an address, and find out what the columns of each file mean. Raises
        UserError: a layout is not recognised, or a column is in no row."""
        files = open_files(path, split, self.name, self.revision)
        heads = {file: read_head(rows) for file, rows in files.items()}
        layouts = {file: self._choose_layout(head, file) for file, head in heads.items() if head}
        if not layouts:
            file, rows = next(iter(files.items()))
            _refuse_first_row(file, rows)
        columns = self._complete_columns(heads)
        columns.check(_read_values(files.values()), describe_files(list(files)))
        # A file whose first rows are all damaged is taken as what the first one is.
        usual = next(iter(layouts.values()))
        members_by_layout: dict[Layout | None, list[str]] = {}
        for file in files:
            layout = layouts.get(file, usual)
            members_by_layout.setdefault(layout, []).append(file)
        tables: list[Table] = []
        for layout, members in members_by_layout.items():
            head: list[Values] = []
            for file in members:
                head += heads[file]
            rows = chain_sequences([files[file] for file in members])
            if layout is not None and layout.companion is not None:
                rows = self._join_companion(rows, members, layout.companion)
            table = Table(
                origin=describe_files(members),
                rows=rows,
                layout=layout,
                columns=columns,
                unread=list_unread(head, layout, columns),
            )
            tables.append(table)
        return Tables(tuple(tables))

    def open_stream(self, path: str, split: str, seed: int | None) -> Tables:
        """Open rows of the hub that are read as they come. Raises UserError as `open`, also if a
        column that the user names is in none of the first rows."""
        first, stream = hub.stream_split(path, self.name, self.revision, split, seed)
        head = read_head(first)
        if not head:
            _refuse_first_row(path, first)
        layout = self._choose_layout(head, path)
        columns = self._complete_columns({path: head})
        columns.check(head, path)
        table = Table(
            origin=path,
            rows=(),
            layout=layout,
            columns=columns,
            unread=list_unread(head, layout, columns),
            stream=stream,
        )
        return Tables((table,))

    def _choose_layout(self, head: Sequence[Values], file: str) -> Layout | None:
        """Choose the layout of a file: the one that the user names, or else the one that its first
        rows have. None where the columns that are set suffice. Raises UserError: none fits."""
        if self.layout is not None:
            layout = find_layout(self.layout)
            # One row is enough: the user knows better than its neighbours.
            if not any(layout.matches(values) for values in head):
                listed = ", ".join(layout.columns)
                remedy = f"does not fit {file}, which has {list_columns(head)}; it needs {listed}"
                raise UserError("data.layout", self.layout, remedy)
            return layout
        if self.columns.is_whole:
            return None
        recognised = recognise_layout(head)
        if recognised is None:
            raise UserError("data", file, _explain_unknown(head))
        return recognised

    def _complete_columns(self, heads: Mapping[str, Sequence[Values]]) -> Columns:
        """Return the columns with that of the answers where only `answer_regex` is set: the column
        that is called ``answer``. Raises UserError: there is none."""
        columns = self.columns
        if columns.answer_regex is None or columns.answer is not None:
            return columns
        for file, head in heads.items():
            if head and not any("answer" in values for values in head):
                remedy = (
                    f"cuts the answer out of a column, and {file} has none that is called "
                    f"'answer': name it (data.columns.answer); there are {list_columns(head)}"
                )
                raise UserError("data.columns.answer_regex", columns.answer_regex, remedy)
        return columns.model_copy(update={"answer": "answer"})

    def _join_companion(self, rows: Rows, files: list[str], companion: Companion) -> Rows:
        """Join rows with those of a file beside them that have the same key. A row that has no
        partner there is a `BadRow`."""
        key = companion.key
        path = self.answers
        if path is None:
            path = find_companion(files, companion.pattern)
        if path is None:
            return rows
        # All in memory: a leaderboard has a few thousand answers.
        values_by_key = {
            row.values[key]: row.values
            for row in read_file(path)
            if isinstance(row, Row) and key in row.values
        }

        def read(index: int) -> ReadRow:
            row: ReadRow = rows[index]
            if isinstance(row, BadRow):
                return row
            answers = values_by_key.get(row.values.get(key))
            if answers is None:
                return BadRow(row.name, f"has no answer in {path}")
            # Of a column that both have, the row's own counts.
            return replace(row, values={**answers, **row.values})

        return LazySequence(len(rows), read)


def find_companion(files: Sequence[str], pattern: str) -> str | None:
    """Find the file with more columns that lies beside `files`; None unless `files` is a single
    one.

    `data/files.py: digest_source` asks it for every layout's pattern, so that the file is digested.

    Args:
        pattern: `Companion.pattern` of a layout.
    """
    if len(files) != 1:
        return None
    file = Path(files[0])
    companion = file.parent / pattern.format(name=file.name)
    return str(companion) if companion.is_file() else None


def _pair_up(examples: Examples) -> ExampleStream:
    """Yield examples; a good and a bad completion (KTO) of one prompt become one example, a pair.

    A completion is kept in memory until its partner comes. What has none follows at the end.
    """
    waiting: dict[str, list[Example]] = {}
    for example in examples:
        if isinstance(example, BadRow):
            yield example
            continue
        partners = waiting.setdefault(repr((example.prompt, example.tools)), [])
        if partners and (partners[0].rejected is None) != (example.rejected is None):
            # The good one has a demonstration, and the bad one what is rejected.
            good = partners.pop(0)
            bad = example
            if bad.rejected is None:
                good, bad = bad, good
            yield replace(good, rejected=bad.rejected, row=f"{good.row} with {bad.row}")
        else:
            partners.append(example)
    for partners in waiting.values():
        yield from partners


def read_head(rows: Iterable[ReadRow]) -> list[Values]:
    """Read the values of the first rows, without those that are damaged."""
    return list(_read_values([itertools.islice(rows, PROBED)]))


def describe_files(files: Sequence[str]) -> str:
    """Describe one or several files: the only one, or how many there are, and the first."""
    first = files[0]
    return first if len(files) == 1 else f"{format_count(len(files), 'file')} ({first}, …)"


def _list_names(head: Iterable[Values]) -> list[str]:
    """List the names of all columns, in the order in which they come first."""
    return list(dict.fromkeys(name for values in head for name in values))


def list_columns(head: Iterable[Values]) -> str:
    """List the names of all columns, for a message."""
    return ", ".join(_list_names(head))


def list_unread(head: Sequence[Values], layout: Layout | None, columns: Columns) -> tuple[str, ...]:
    """List the columns that neither `Layout.columns` nor the user's own columns name.

    What a layout reads besides, such as the column ``input`` of ``alpaca``, is listed all the same.
    """
    # Many layouts read tools, though their rows can do without.
    paths = ["tools", *columns.list_paths().values()]
    if layout is not None:
        paths += layout.columns
    roots = {path.partition(".")[0] for path in paths}
    # A column whose own name has a dot is a path that is no root.
    read_names = roots.union(paths)
    return tuple(name for name in _list_names(head) if name not in read_names)


def _read_values(parts: Iterable[Iterable[ReadRow]]) -> Iterator[Values]:
    """Yield the values of all rows that are not damaged."""
    for rows in parts:
        yield from (row.values for row in rows if isinstance(row, Row))


def _refuse_first_row(file: str, rows: Iterable[ReadRow]) -> NoReturn:
    """Raise UserError: none of the first rows can be used. It says what is wrong with the first."""
    first_rows = list(itertools.islice(rows, PROBED))
    if not first_rows:
        raise UserError("data", file, "has no rows")
    first = first_rows[0]
    assert isinstance(first, BadRow)
    number = len(first_rows)
    others = f"; none of the first {format_count(number, 'row')} can be used" if number > 1 else ""
    raise UserError("data", first.row, f"{first.reason}; correct it{others}")


def _explain_unknown(head: Sequence[Values]) -> str:
    """Explain which columns there are, and what would be understood."""
    if any(values.keys() >= names for values in head for names in MESSAGE_COLUMNS):
        return (
            f"has single messages as rows ({list_columns(head)}), and a row must be a whole chat: "
            'write each as {"messages": [{"role": …, "content": …}, …]}'
        )
    names = ", ".join(sorted(layout.name for layout in list_layouts()))
    return (
        f"has the columns {list_columns(head)}, which are no layout that is known ({names}); "
        "set data.columns (prompt, and answer, completion, or chosen and rejected; or messages), "
        "or write a source of a dozen lines (docs/extending.md)"
    )
