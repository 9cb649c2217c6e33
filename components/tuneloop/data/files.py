"""Your own rows: a file, several, a glob, a folder, or a data set of the Hugging Face hub.

JSON, JSON Lines, CSV, Parquet and Arrow, compressed or not, here or at a URL of the store. Rows are
unpacked as they are asked for: a file may be larger than the machine's memory. What their columns
mean follows from the layout, which is recognised (`tuneloop.data.layouts`), or from ``columns``."""

import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from tuneloop.core.errors import UserError
from tuneloop.core.seeds import derive_seed
from tuneloop.data import BadRow, Example, Splits
from tuneloop.data.columns import Columns, Settings
from tuneloop.data.layout_tables import Opener, Place, Tables, find_companion
from tuneloop.data.layouts import list_layouts
from tuneloop.data.readers.opening import digest_files, is_on_hub, list_all_files


class Part(Settings):
    """One source of a mixture. `weight`: its share of the rows, beside those of the others."""

    source: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    split: str = "train"
    layout: str | None = None
    columns: Columns = Columns()


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
        remedy = "is required: a file, a glob, a folder or hf://…"
        raise UserError("source_args.path", None, remedy)
    opener = Opener(name, revision, layout, columns, answers)
    order = derive_seed(seed, "train") if shuffle else None
    # Files here are read in place, row by row, in any case.
    places = [path] if isinstance(path, str) else path
    streaming = streaming and any(is_on_hub(place) for place in places)
    if streaming:
        if not isinstance(path, str):
            remedy = "is for one data set of the hub, not for a list of places; leave it out"
            raise UserError("source_args.streaming", True, remedy)
        tables = opener.open_stream(path, split, order)
    else:
        tables = opener.open(path, split)
    stream = tables.read_examples(order)
    lines = tables.describe()
    parts: dict[str, Iterable[Example | BadRow]] = {}
    own = {
        "eval": (eval, eval_split),
        "sft": (sft, sft_split),
        "preference": (preference, preference_split),
    }
    for part, source in _choose_own(path, own).items():
        other = opener.open(source.place, source.split)
        lines += [f"{part}: {line}" for line in other.describe()]
        part_order = derive_seed(seed, part) if shuffle else None
        parts[part] = other.read_examples(part_order)
    return Splits(
        train=stream,
        eval=parts.get("eval", stream),
        sft=parts.get("sft", stream),
        preference=parts.get("preference"),
        rows=None if streaming else len(tables),
        own=frozenset(parts),
        unread=tables.unread,
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
            # Which layout the rows have is not known yet: what may be their companion counts.
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


def _load_mixture(seed: int, mixture: Sequence[Part], shuffle: bool) -> Splits:
    """Load several sources that are mixed by their weights, until one of them is used up."""
    sources: list[Tables] = []
    for part in mixture:
        opener = Opener(None, None, part.layout, part.columns)
        sources.append(opener.open(part.source, part.split))
    weights = [part.weight for part in mixture]
    rows = min(len(tables) / weight for tables, weight in zip(sources, weights)) * sum(weights)
    streams = [
        tables.read_examples(derive_seed(seed, "mixture", number) if shuffle else None)
        for number, tables in enumerate(sources)
    ]
    lines = [
        f"{weight / sum(weights):.1%}: {line}"
        for tables, weight in zip(sources, weights)
        for line in tables.describe()
    ]
    lines.append(f"mixed until one is used up, about {int(rows):,} rows")
    return replace(
        Splits.of(_mix(streams, weights, derive_seed(seed, "mixture"))),
        rows=int(rows),
        unread=tuple(dict.fromkeys(name for tables in sources for name in tables.unread)),
        lines=tuple(lines),
        facts={"recognised": lines, "mixture": [part.model_dump(mode="json") for part in mixture]},
    )


def _mix(
    streams: Sequence[Iterator[Example | BadRow]], weights: Sequence[float], seed: int
) -> Iterator[Example | BadRow]:
    """Draw rows from streams by their weights, until one has no more: the shares hold to the end."""
    rng = random.Random(seed)
    numbers = range(len(streams))
    while True:
        (number,) = rng.choices(numbers, weights)
        item = next(streams[number], None)
        if item is None:
            return
        yield item
