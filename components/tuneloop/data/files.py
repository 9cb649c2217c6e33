"""Your own rows: a file, several, a glob, a folder, or a data set of the Hugging Face hub.

JSON, JSON Lines, CSV, Parquet and Arrow, compressed or not, here or at a URL of the store. Rows are
unpacked as they are asked for: a file may be larger than the machine's memory. What their columns
mean follows from the layout, which is recognised (`tuneloop.data.layouts`), or from ``columns``."""

import itertools
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from tuneloop.core.errors import UserError
from tuneloop.core.seeds import derive_seed
from tuneloop.data import BadRow, BadValue, Example, Splits
from tuneloop.data.columns import Columns
from tuneloop.data.layouts import Layout, find_layout, list_layouts, recognise_layout
from tuneloop.data.readers import Row, Rows, hub
from tuneloop.data.readers.opening import (
    digest_files,
    is_on_hub,
    list_all_files,
    open_rows,
    read_file,
)
from tuneloop.formats.token_files import Places

PROBED = 20
"""Rows at the beginning that decide which layout a table has."""
Place = str | list[str]


class Part(BaseModel, frozen=True, extra="forbid"):
    """One source of a mixture. `weight`: its share of the rows, beside those of the others."""

    source: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    split: str = "train"
    layout: str | None = None
    columns: Columns = Columns()


@dataclass(frozen=True)
class Table:
    """Rows with what their columns mean.

    Attributes:
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
        if self.layout is None:
            listed = ", ".join(
                f"{role} from {path}" for role, path in self.columns.list_paths().items()
            )
            return f"columns as set: {listed}; {count} in {self.place}"
        overridden = ", ".join(
            f"{role} from {path}" for role, path in self.columns.list_paths().items()
        )
        override = f"; as set: {overridden}" if overridden else ""
        return f"recognised: {self.layout.title}; {self.layout.summary}{override}, {count} in {self.place}"

    def read_examples(self, seed: int | None) -> Iterator[Example | BadRow]:
        """Yield an example, or what is wrong, for each row, in an order that `seed` decides."""
        if self.stream is not None:
            for row in self.stream:
                yield self.make_example(row)
            return
        order = array("q", range(len(self.rows)))
        if seed is not None:
            random.Random(seed).shuffle(order)
        for place in order:
            yield self.make_example(self.rows[place])

    def make_example(self, row: Row | BadRow) -> Example | BadRow:
        """Make an example of a row."""
        if isinstance(row, BadRow):
            return row
        try:
            example = Example("", None)
            if self.layout is not None:
                example = self.layout.read(row.values)
            example = self.columns.apply(example, row.values)
        except BadValue as error:
            return BadRow(row.name, str(error))
        rewards = None
        if self.layout is not None and self.layout.rewards:
            rewards = self.layout.rewards
        return replace(example, row=row.name, rewards=rewards, nulls=row.nulls)


def load_splits(
    n: int,
    seed: int,
    *,
    path: Place = "",
    split: str = "train",
    name: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
    eval: Place | None = None,
    eval_split: str | None = None,
    sft: Place | None = None,
    sft_split: str | None = None,
    preference: Place | None = None,
    preference_split: str | None = None,
    answers: str | None = None,
    layout: str | None = None,
    columns: Columns = Columns(),  # noqa: B008
    mixture: list[Part] = [],  # noqa: B006
    shuffle: bool = True,
) -> Splits:
    """Load rows. Without files or splits of their own, all parts of the data are cut from `path`.
    Raises UserError: something cannot be read, is empty, or has columns that are not known;
    Retryable: the hub does not answer.

    Args:
        split: of a data set on the hub, or of a folder whose files are named after theirs.
        name: the configuration of a data set on the hub, as ``datasets.load_dataset`` calls it.
        revision: branch, tag or commit on the hub.
        streaming: do not keep the data set of the hub here; files here never are kept again.
        eval, sft, preference: other places, of held-out prompts, of demonstrations, of pairs.
        eval_split, sft_split, preference_split: other splits of the same place.
        answers: a file with more columns of the same rows, found by their ``id`` (BFCL).
    """
    if mixture:
        return _load_mixture(seed, mixture, shuffle)
    if not path:
        raise UserError("source_args.path", None, "is required: a file, a glob, a folder or hf://…")
    opener = Opener(name, revision, layout, columns, answers)
    order = derive_seed(seed, "train") if shuffle else None
    # Files here are read in place, row by row, in any case.
    places = [path] if isinstance(path, str) else path
    streaming = streaming and any(is_on_hub(place) for place in places)
    if streaming:
        if not isinstance(path, str):
            remedy = "is for one data set of the hub, not for a list of places; leave it out"
            raise UserError("source_args.streaming", True, remedy)
        table = opener.open_stream(path, split, order)
    else:
        table = opener.open(path, split)
    stream = _pair_up(table, order)
    lines = [table.describe()]
    parts: dict[str, Iterable[Example | BadRow]] = {}
    own = {
        "eval": (eval, eval_split),
        "sft": (sft, sft_split),
        "preference": (preference, preference_split),
    }
    for part, source in _choose_own(path, own).items():
        other = opener.open(source.place, source.split)
        lines.append(f"{part}: {other.describe()}")
        part_order = derive_seed(seed, part) if shuffle else None
        parts[part] = _pair_up(other, part_order)
    return Splits(
        train=stream,
        eval=parts.get("eval", stream),
        sft=parts.get("sft", stream),
        preference=parts.get("preference"),
        rows=None if streaming else len(table.rows),
        own=frozenset(parts),
        unread=table.unread,
        lines=tuple(lines),
        facts={"recognised": lines},
    )


def digest_source(arguments: Mapping[str, Any]) -> str | None:
    """Digest the bytes of all files; None where one cannot be read."""
    patterns = {layout.companion[0] for layout in list_layouts() if layout.companion is not None}
    pairs: list[tuple[str, str]] = []
    try:
        for source in list_sources(arguments):
            addresses = source.list_addresses()
            pairs += [(address, source.split) for address in addresses]
            files = list_all_files(addresses, source.split)
            # Which layout the rows have is not known yet: a file that may be their companion counts.
            companions = [find_companion(files, pattern) for pattern in sorted(patterns)]
            pairs += [(companion, source.split) for companion in companions if companion]
        return digest_files(pairs)
    except UserError:
        return None


@dataclass(frozen=True)
class TableSource:
    """Where a table is read from.

    Attributes:
        setting: of the stage `data_prep`, that names the place or its split.
        split: of a data set on the hub, or of a folder.
    """

    setting: str
    place: Place
    split: str

    def list_addresses(self) -> list[str]:
        """List the paths and addresses that the place consists of."""
        return [self.place] if isinstance(self.place, str) else list(self.place)


def list_sources(arguments: Mapping[str, Any]) -> list[TableSource]:
    """List all that `load_splits` opens with these arguments, each with its split. Files that are
    companions by their name alone are not among them."""
    mixture = arguments.get("mixture") or []
    if mixture:
        parts = [part if isinstance(part, Part) else Part(**part) for part in mixture]
        return [
            TableSource(f"mixture.{number}.source", part.source, part.split)
            for number, part in enumerate(parts)
        ]
    path = arguments.get("path") or []
    split = arguments.get("split") or "train"
    own = {
        part: (arguments.get(part), arguments.get(f"{part}_split"))
        for part in ("eval", "sft", "preference")
    }
    sources = [TableSource("source_args.path", path, split), *_choose_own(path, own).values()]
    if answers := arguments.get("answers"):
        sources.append(TableSource("source_args.answers", answers, split))
    return sources


def _choose_own(
    path: Place, own: Mapping[str, tuple[Place | None, str | None]]
) -> dict[str, TableSource]:
    """Choose where the parts that have a place or a split of their own are read from."""
    sources: dict[str, TableSource] = {}
    for part, (place, split) in own.items():
        if place:
            sources[part] = TableSource(f"source_args.{part}", place, split or "train")
        elif split:
            sources[part] = TableSource(f"source_args.{part}_split", path, split)
    return sources


def find_companion(files: Sequence[str], pattern: str) -> str | None:
    """Find the file beside the only one of `files` that a layout's `companion` names."""
    if len(files) != 1:
        return None
    file = Path(files[0])
    beside = file.parent / pattern.format(name=file.name)
    return str(beside) if beside.is_file() else None


@dataclass(frozen=True)
class Opener:
    """How tables are opened: what applies to all of them."""

    name: str | None
    revision: str | None
    layout: str | None
    columns: Columns
    answers: str | None = None

    def open(self, path: Place, split: str) -> Table:
        """Open the rows at a place, and find out what their columns mean."""
        rows, files = open_rows(path, split, self.name, self.revision)
        place = files[0] if len(files) == 1 else f"{len(files)} files ({files[0]}, …)"
        head = [row for row in itertools.islice(rows, PROBED) if isinstance(row, Row)]
        layout = self._choose_layout(head, place, next(iter(rows), None))
        if layout is not None and layout.companion is not None:
            rows = self._join_companion(rows, files, layout.companion)
        return Table(place, rows, layout, self.columns, unread=self._list_unread(head, layout))

    def open_stream(self, path: str, split: str, seed: int | None) -> Table:
        """Open rows of the hub that are read as they come."""
        first, stream = hub.stream_split(path, self.name, self.revision, split, seed)
        head = [row for row in first if isinstance(row, Row)]
        layout = self._choose_layout(head, path, None)
        rows: Rows = Places(0, lambda place: head[place])
        unread = self._list_unread(head, layout)
        return Table(path, rows, layout, self.columns, stream, unread)

    def _list_unread(self, head: Sequence[Row], layout: Layout | None) -> tuple[str, ...]:
        """List the columns that neither a layout nor the user's own columns name."""
        paths = ["tools", *self.columns.list_paths().values()]
        paths += [] if layout is None else layout.columns
        roots = {path.partition(".")[0] for path in paths}
        names = dict.fromkeys(name for row in head for name in row.values)
        return tuple(name for name in names if name not in roots and name not in paths)

    def _choose_layout(
        self, head: Sequence[Row], place: str, first: Row | BadRow | None
    ) -> Layout | None:
        values = [row.values for row in head]
        if not values:
            reason = first.reason if isinstance(first, BadRow) else "no rows"
            row = first.row if isinstance(first, BadRow) else place
            raise UserError("data", row, f"{reason}; nor can its neighbours be used")
        if self.layout is not None:
            chosen = find_layout(self.layout)
            self.columns.check(values, place)
            if not any(chosen.matches(row) for row in values):
                listed = ", ".join(chosen.columns)
                remedy = (
                    f"does not fit {place}, which has {_list_columns(values)}; it needs {listed}"
                )
                raise UserError("data.layout", self.layout, remedy)
            return chosen
        self.columns.check(values, place)
        if self.columns.is_whole:
            return None
        layout = recognise_layout(values)
        if layout is None:
            raise UserError("data", place, _explain_unknown(values))
        return layout

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


def _load_mixture(seed: int, mixture: Sequence[Part], shuffle: bool) -> Splits:
    """Load several sources that are mixed by their weights, until one of them is used up."""
    tables: list[Table] = []
    for part in mixture:
        opener = Opener(None, None, part.layout, part.columns)
        tables.append(opener.open(part.source, part.split))
    weights = [part.weight for part in mixture]
    rows = min(len(table.rows) / weight for table, weight in zip(tables, weights)) * sum(weights)
    streams = [
        _pair_up(table, derive_seed(seed, "mixture", number) if shuffle else None)
        for number, table in enumerate(tables)
    ]
    lines = [
        f"{weight / sum(weights):.1%}: {table.describe()}" for table, weight in zip(tables, weights)
    ]
    lines.append(f"mixed until one is used up, about {int(rows):,} rows")
    return replace(
        Splits.of(_mix(streams, weights, derive_seed(seed, "mixture"))),
        rows=int(rows),
        unread=tuple(dict.fromkeys(name for table in tables for name in table.unread)),
        lines=tuple(lines),
        facts={"recognised": lines, "mixture": [part.model_dump(mode="json") for part in mixture]},
    )


def _mix(
    streams: Sequence[Iterator[Example | BadRow]], weights: Sequence[float], seed: int
) -> Iterator[Example | BadRow]:
    """Draw rows from streams by their weights, until one has no more: their shares hold to the end."""
    rng = random.Random(seed)
    numbers = range(len(streams))
    while True:
        (number,) = rng.choices(numbers, weights)
        item = next(streams[number], None)
        if item is None:
            return
        yield item


def _pair_up(table: Table, seed: int | None) -> Iterator[Example | BadRow]:
    """Yield the examples of a table. Completions that are good or bad (KTO) become pairs where a
    prompt has both; each is kept until the other comes."""
    if table.layout is None or table.layout.name != "unpaired-preference":
        yield from table.read_examples(seed)
        return
    waiting: dict[str, list[Example]] = {}
    for example in table.read_examples(seed):
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


def _list_columns(values: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(name for row in values for name in row))


def _explain_unknown(values: Sequence[Mapping[str, Any]]) -> str:
    """Explain which columns there are, and what would be understood."""
    known = ", ".join(sorted(layout.name for layout in list_layouts()))
    return (
        f"has the columns {_list_columns(values)}, which are no layout that is known ({known}); "
        "set data.columns (prompt, and answer, completion, or chosen and rejected; or messages), or "
        "write a source of a dozen lines (docs/extending.md)"
    )
