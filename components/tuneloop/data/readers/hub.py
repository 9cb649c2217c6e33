"""Data sets of the Hugging Face hub, and folders that ``save_to_disk`` wrote, by `datasets`.

Imported without `datasets`, which is loaded by the first call.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.core.hub import explain_failures, split_hub_address
from tuneloop.core.json_types import JsonObject
from tuneloop.data.readers import ReadRow, Rows
from tuneloop.data.readers.arrow_files import make_row
from tuneloop.formats.sequences import LazySequence

MARKERS = ("dataset_info.json", "dataset_dict.json")
"""Files that ``save_to_disk`` writes beside the rows."""
NUMBER = "__tuneloop_row__"
"""The column that carries the number of a row, from 1, through a shuffled stream."""
FIRST = 20
"""Rows at the beginning of a stream by which its layout is recognised; not fewer than
`data/layout_tables.py: PROBED`."""
BUFFER = 10_000
"""Rows among which a stream is shuffled; they are in memory at once."""


def is_saved(path: str) -> bool:
    """Return whether ``save_to_disk`` wrote the folder at `path`."""
    return any((Path(path) / marker).is_file() for marker in MARKERS)


def load_split(path: str, name: str | None, revision: str | None, split: str) -> Rows:
    """Load one split of a data set by its name on the hub, or of a folder of ``save_to_disk``.
    Raises UserError: no such data set or split; Retryable: the hub does not answer."""
    loaded = _load(path, name, revision, split, streaming=False)
    title = f"{path}[{split}]"

    def read(index: int) -> ReadRow:
        return make_row(loaded[index], f"{title} row {index + 1}")

    return LazySequence(len(loaded), read)


def stream_split(
    path: str, name: str | None, revision: str | None, split: str, seed: int | None
) -> tuple[list[ReadRow], Iterator[ReadRow]]:
    """Read one split from the hub without keeping it.

    Args:
        seed: of the order, in which a row moves by about `BUFFER` rows; None: the order of the data
            set.

    Returns:
        The first rows in the order of the data set, and all rows in the order of `seed`.
    """
    loaded = _load(path, name, revision, split, streaming=True)
    title = f"{path}[{split}]"
    # Numbered before they are shuffled: a row is named by where it stands in the data set.
    numbered = loaded.map(_number, with_indices=True)
    first = [_name(values, title) for values in itertools.islice(numbered, FIRST)]
    if seed is not None:
        numbered = numbered.shuffle(seed=seed, buffer_size=BUFFER)
    return first, (_name(values, title) for values in numbered)


def _number(values: JsonObject, index: int) -> JsonObject:
    return values | {NUMBER: index + 1}


def _name(values: JsonObject, title: str) -> ReadRow:
    values = dict(values)
    number = values.pop(NUMBER)
    return make_row(values, f"{title} row {number}")


def _load(path: str, name: str | None, revision: str | None, split: str, *, streaming: bool) -> Any:
    """Load a split by `datasets`: its ``Dataset``, or its ``IterableDataset`` where it streams."""
    try:
        import datasets
    except ImportError as error:
        remedy = f"needs {error.name}; pip install 'tuneloop[data]'"
        raise UserError("data.source", path, remedy) from error
    address, revision = split_hub_address("data.source", path, revision)
    with explain_failures("data.source", path, "; check name and split"):
        if not is_saved(address):
            return datasets.load_dataset(
                address, name, revision=revision, split=split, streaming=streaming
            )
        saved = datasets.load_from_disk(address)
    # Several splits that were saved together are a mapping of them.
    if isinstance(saved, datasets.Dataset):
        return saved
    if split not in saved:
        remedy = f"no such split in {path}; it has: {', '.join(saved)}"
        raise UserError("source_args.split", split, remedy)
    return saved[split]
