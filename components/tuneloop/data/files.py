"""Your own rows: a file, several, a glob, a folder, or a data set of the Hugging Face hub.

JSON, JSON Lines, CSV, Parquet and Arrow, compressed or not, here or at a URL of the store. Rows are
unpacked as they are asked for: a file may be larger than the machine's memory. What their columns
mean follows from the layout, which is recognised (`tuneloop.data.layouts`), or from ``columns``.

An argument of `load_splits` that names a further file or split belongs into `list_sources`, too.
Else `digest_source` does not notice that the file has changed, and neither `check_data_files` nor
`check_pod_paths` of `planning/limits.py` looks for it.
`tests/unit/stages/test_data_prep.py` has a case for each.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from pydantic import Field

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.seeds import derive_seed
from tuneloop.core.wording import format_count
from tuneloop.data import Examples, ExampleStream, Splits
from tuneloop.data.columns import Columns, Settings
from tuneloop.data.layout_tables import Addresses, Opener, Tables, find_companion
from tuneloop.data.layouts import list_layouts
from tuneloop.data.readers.opening import digest_files, is_on_hub, list_all_files

SPLITS_OF_TABLES = ("eval", "sft", "preference")
"""Splits that may have a table of their own. For each, `load_splits` has two arguments of these
names (``eval``, ``eval_split``) and an entry in its `choices`."""
ONLY_OF_PATH = {
    "path": "is another source",
    "name": "is of one data set",
    "revision": "is of one data set",
    "streaming": "is of one data set",
    "answers": "is of one file",
    "eval_split": "is of one source; name a file by eval, or leave it out",
    "sft_split": "is of one source; name a file by sft, or leave it out",
    "preference_split": "is of one source; name a file by preference, or leave it out",
}
"""Argument of `load_splits` that needs a `path` → why a mixture has none of it."""


class Part(Settings):
    """One source of a mixture.

    A field that is added is read by `_open_mixture`, which hands each to its `Opener`.

    Attributes:
        weight: its share of the rows, beside those of the others.
        split, layout, columns: of this source; None: those of all (`load_splits`).
    """

    source: str
    weight: Annotated[float, Field(gt=0)] = 1.0
    split: str | None = None
    layout: str | None = None
    columns: Columns | None = None


class MainRows(NamedTuple):
    """The rows of `path` or of the mixture.

    Attributes:
        rows: how many there are; None where nobody knows.
        unread: columns that nothing is read from.
        lines: what was recognised.
    """

    stream: ExampleStream
    rows: int | None
    unread: Sequence[str]
    lines: list[str]


def load_splits(
    n: int,
    seed: int,
    *,
    path: Addresses = "",
    split: str = "train",
    name: str | None = None,
    revision: str | None = None,
    streaming: bool = False,
    eval: Addresses | None = None,
    eval_split: str | None = None,
    sft: Addresses | None = None,
    sft_split: str | None = None,
    preference: Addresses | None = None,
    preference_split: str | None = None,
    answers: str | None = None,
    layout: str | None = None,
    columns: Columns = Columns(),  # noqa: B008
    mixture: list[Part] = [],  # noqa: B006
    shuffle: bool = True,
) -> Splits:
    """Load rows. Without files or splits of their own, held-out prompts and demonstrations are cut
    from `path`, too: they are then read from the one iterator of `train`, each further rows than the
    one before (`Splits.of`). Raises UserError: something cannot be read, is empty, or has columns
    that are not known; Retryable: the hub does not answer.

    Args:
        n: how many rows the caller takes at most. Not used here: rows are read as they are taken.
        seed: of the order of rows.
        split: of a data set on the hub, or of a folder whose files are named after theirs.
        name: the configuration of a data set on the hub, as ``datasets.load_dataset`` calls it.
        revision: branch, tag or commit on the hub.
        streaming: do not keep the data set of the hub here; files here never are kept again.
        eval, sft, preference: other places, of held-out prompts, of demonstrations, of pairs.
        eval_split, sft_split, preference_split: other splits of the same place.
        answers: a file with more columns of the same rows, found by their ``id`` (BFCL).
        layout, columns: of all files; a source of the mixture may have its own.
        mixture: takes the place of `path`, and of the arguments in `ONLY_OF_PATH`.
    """
    if not path and not mixture:
        remedy = "is required: a file, a glob, a folder or hf://…"
        raise UserError("source_args.path", None, remedy)
    opener = Opener(
        name=name,
        revision=revision,
        layout=layout,
        columns=columns,
        answers=answers,
    )
    facts: JsonObject = {}
    if mixture:
        main = _open_mixture(opener, mixture, split, seed, shuffle)
        facts["mixture"] = [part.model_dump(mode="json", exclude_none=True) for part in mixture]
    else:
        order = derive_seed(seed, "train") if shuffle else None
        main = _open_path(opener, path, split, streaming, order)
    lines = main.lines
    choices = {
        "eval": (eval, eval_split),
        "sft": (sft, sft_split),
        "preference": (preference, preference_split),
    }
    examples: dict[str, Examples] = {}
    for part, source in _choose_separate(path, choices).items():
        other = opener.open(source.addresses, source.split)
        lines += [f"{part}: {line}" for line in other.describe()]
        # Each table has an order of its own, which does not change when another is added.
        part_order = derive_seed(seed, part) if shuffle else None
        examples[part] = other.read_examples(part_order)
    return Splits(
        train=main.stream,
        eval=examples.get("eval", main.stream),
        sft=examples.get("sft", main.stream),
        preference=examples.get("preference"),
        rows=main.rows,
        separate=frozenset(examples),
        unread=tuple(main.unread),
        lines=tuple(lines),
        facts=facts | {"recognised": lines},
    )


def check_beside_mixture(arguments: JsonMapping) -> None:
    """Check that no argument is set that a mixture has no use for. Raises UserError: one is."""
    for name, reason in ONLY_OF_PATH.items():
        value = arguments.get(name)
        if value:
            remedy = f"cannot stand beside data.mixture: it {reason}"
            raise UserError(name, value, remedy)


def _open_path(
    opener: Opener, path: Addresses, split: str, streaming: bool, order: int | None
) -> MainRows:
    """Open the rows of `path`; `order` seeds their order."""
    addresses = _list_addresses(path)
    # Files here are read in place, row by row, in any case.
    if streaming and any(is_on_hub(address) for address in addresses):
        tables = _open_stream(opener, path, split, order)
    else:
        tables = opener.open(path, split)
    return MainRows(
        stream=tables.read_examples(order),
        rows=None if tables.is_streamed else len(tables),
        unread=tables.unread,
        lines=tables.describe(),
    )


def _open_stream(opener: Opener, path: Addresses, split: str, order: int | None) -> Tables:
    """Open a data set of the hub without keeping it here; `order` seeds the order of its rows.
    Raises UserError: several are given."""
    if not isinstance(path, str):
        remedy = "is for one data set of the hub, not for a list of them; leave it out"
        raise UserError("source_args.streaming", True, remedy)
    return opener.open_stream(path, split, order)


def digest_source(arguments: JsonMapping) -> str | None:
    """Digest the bytes of all files; None where one cannot be read.

    `data/sources.py` finds this function by its name, in any module of the family ``data``: without
    it a stage would not notice that the rows of a file have changed.
    """
    companions = [layout.companion for layout in list_layouts() if layout.companion is not None]
    patterns = sorted({companion.pattern for companion in companions})
    pairs: list[tuple[str, str]] = []
    try:
        for source in list_sources(arguments):
            addresses = _list_addresses(source.addresses)
            pairs += [(address, source.split) for address in addresses]
            files = list_all_files(addresses, source.split)
            # Which layout the rows have is not known yet: what may be their companion counts.
            beside = [find_companion(files, pattern) for pattern in patterns]
            pairs += [(file, source.split) for file in beside if file]
        return digest_files(pairs)
    except UserError:
        # The stage that reads them says what is wrong.
        return None


@dataclass(frozen=True)
class TableSource:
    """Where a table is read from.

    Attributes:
        setting: the parameter of the stage `data_prep` that names the address or its split, for
            messages; `planning/limits.py: list_data_sources` compares it with ``source_args.path``.
        split: of a data set on the hub, or of a folder.
    """

    setting: str
    addresses: list[str]
    split: str


def _list_addresses(addresses: Addresses) -> list[str]:
    return [addresses] if isinstance(addresses, str) else addresses


def list_sources(arguments: JsonMapping) -> list[TableSource]:
    """List all that `load_splits` opens with these arguments, each with its split. Files that are
    companions by their name alone are not among them."""
    mixture = arguments.get("mixture") or []
    path = arguments.get("path") or []
    split = arguments.get("split") or "train"
    sources: list[TableSource] = []
    for number, settings in enumerate(mixture):
        part = settings if isinstance(settings, Part) else Part(**settings)
        setting = f"mixture.{number}.source"
        sources.append(TableSource(setting, [part.source], part.split or split))
    if not mixture:
        sources.append(TableSource("source_args.path", _list_addresses(path), split))
    choices = {
        part: (arguments.get(part), arguments.get(f"{part}_split")) for part in SPLITS_OF_TABLES
    }
    sources += _choose_separate(path, choices).values()
    answers = arguments.get("answers")
    if answers:
        sources.append(TableSource("source_args.answers", [answers], split))
    return sources


def _choose_separate(
    path: Addresses, choices: Mapping[str, tuple[Addresses | None, str | None]]
) -> dict[str, TableSource]:
    """Choose where the splits are read from that have addresses or a split of their own; `choices`
    has both for each, where the user set them."""
    sources: dict[str, TableSource] = {}
    for part, (addresses, split) in choices.items():
        if addresses:
            # The split is that of a folder or data set at the other address, which mostly has only one:
            # train, as `datasets` calls a split without a name.
            addresses = _list_addresses(addresses)
            sources[part] = TableSource(f"source_args.{part}", addresses, split or "train")
        elif split:
            sources[part] = TableSource(f"source_args.{part}_split", _list_addresses(path), split)
    return sources


def _open_mixture(
    opener: Opener, mixture: Sequence[Part], split: str, seed: int, shuffle: bool
) -> MainRows:
    """Open several sources, whose rows are mixed by their weights until one of them is used up.

    Args:
        opener: of a source without a layout or columns of its own.
        split: of a source without one of its own.
        seed: of the order of rows.
    """
    sources: list[Tables] = []
    for part in mixture:
        part_opener = replace(
            opener,
            layout=part.layout or opener.layout,
            columns=part.columns or opener.columns,
        )
        part_split = part.split or split
        sources.append(part_opener.open(part.source, part_split))
    weights = [part.weight for part in mixture]
    total_weight = sum(weights)
    # The source that ends first, for its weight, decides how many rows there are of all.
    limit = min(len(tables) / weight for tables, weight in zip(sources, weights))
    rows = int(limit * total_weight)
    streams: list[ExampleStream] = []
    lines: list[str] = []
    for number, (tables, weight) in enumerate(zip(sources, weights)):
        order = derive_seed(seed, "mixture", number) if shuffle else None
        streams.append(tables.read_examples(order))
        share = weight / total_weight
        lines += [f"{share:.1%}: {line}" for line in tables.describe()]
    lines.append(f"mixed until one is used up, about {format_count(rows, 'row')}")
    mixed = _mix(streams, weights, derive_seed(seed, "mixture"))
    unread = dict.fromkeys(name for tables in sources for name in tables.unread)
    return MainRows(
        stream=mixed,
        rows=rows,
        unread=[*unread],
        lines=lines,
    )


def _mix(streams: Sequence[ExampleStream], weights: Sequence[float], seed: int) -> ExampleStream:
    """Draw rows from streams by their weights, until one has no more: the shares hold to the
    end."""
    generator = random.Random(seed)
    while True:
        (stream,) = generator.choices(streams, weights)
        example = next(stream, None)
        if example is None:
            return
        yield example
