"""Tokenized documents in files that are mapped into memory: a data set may be larger than what the
machine has."""

import copy
import itertools
import tempfile
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

ROWS = 32
"""Documents in a record batch."""
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "row": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
    }
)

T = TypeVar("T")


class Places(Sequence[T]):
    """A sequence of `length` items; `at` makes the item of an index when it is read."""

    def __init__(self, length: int, at: Callable[[int], T]) -> None:
        self._length, self.at = length, at

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: Any) -> Any:
        places = range(self._length)[place]
        return self.at(places) if isinstance(places, int) else [self.at(i) for i in places]


class Corpus(Places["Document"]):
    """Documents by index, in an Arrow `file` by `write_corpus`, about 4.5 bytes a token. It is
    mapped into memory, so it may be deleted while in use.

    Attributes:
        names: the id of each document.
        rows: the row of the user's file that each was made of; null where that is not known.
        lengths: the number of ids of each, int64.
        highest_ids: the highest id of each, int32.
    """

    def __init__(self, file: str) -> None:
        reader = pa.ipc.open_file(pa.memory_map(file))
        batches = [reader.get_batch(k) for k in range(reader.num_record_batches)]
        size = batches[0].num_rows if batches else 1  # of each batch but the last
        starts = [batch["input_ids"].offsets.to_numpy() for batch in batches]
        ids = [batch["input_ids"].values.to_numpy() for batch in batches]
        masks = [batch["loss_mask"].values for batch in batches]

        def read(place: int) -> Document:
            k, row = divmod(place, size)
            start, end = starts[k][row : row + 2].tolist()
            mask = masks[k].slice(start, end - start).to_numpy(zero_copy_only=False)
            return Document(array("i", ids[k][start:end].tobytes()), array("b", mask.tobytes()))

        self.names = pa.chunked_array([batch["id"] for batch in batches], pa.string())
        super().__init__(len(self.names), read)
        # Tokens that an earlier version made have no names of rows.
        known = bool(batches) and "row" in batches[0].schema.names
        columns = (
            [batch["row"] for batch in batches]
            if known
            else [pa.nulls(len(self.names), pa.string())]
        )
        self.rows = pa.chunked_array(columns, pa.string())
        lengths = [np.diff(offsets).astype(np.int64) for offsets in starts]
        highest = [np.maximum.reduceat(part, offsets[:-1]) for part, offsets in zip(ids, starts)]
        self.lengths = np.concatenate([np.zeros(0, np.int64), *lengths])
        self.highest_ids = np.concatenate([np.zeros(0, np.int32), *highest])

    @property
    def tokens(self) -> int:
        """The number of ids in all documents."""
        return int(self.lengths.sum())

    def name(self, place: int) -> str:
        """Name a document by the row of the user's file, or else by its id."""
        return self.rows[place].as_py() or self.names[place].as_py()

    def select(self, places: Sequence[int], limit: int) -> "Corpus":
        """Return the documents at `places`, in this order, each cut off after `limit` ids."""
        chosen = copy.copy(self)
        indices = np.asarray(places, np.int64)

        def read(place: int) -> Document:
            document = self.at(int(indices[place]))
            return Document(document.ids[:limit], document.targets[:limit])

        Places.__init__(chosen, len(indices), read)
        chosen.names = self.names.take(indices)
        chosen.rows = self.rows.take(indices)
        chosen.lengths = np.minimum(self.lengths[indices], limit)
        chosen.highest_ids = self.highest_ids[indices]
        return chosen

    @classmethod
    def from_documents(cls, documents: "Iterable[tuple[str, Document]]") -> "Corpus":
        """Write documents, each with its name, to a temporary file (``TMPDIR``) and open it."""
        with tempfile.NamedTemporaryFile() as file:
            write_corpus(file.name, documents)
            return cls(file.name)


def write_corpus(file: str, documents: "Iterable[tuple[str, Document]]") -> None:
    """Write documents, each with its name, for `Corpus`; equal ones give equal bytes. At most
    `ROWS` are in memory."""
    rest = iter(documents)
    with pa.ipc.new_file(file, SCHEMA) as out:
        while part := list(itertools.islice(rest, ROWS)):
            columns = {
                "id": [name for name, _ in part],
                "row": [document.row for _, document in part],
                "input_ids": [np.asarray(document.ids, np.int32) for _, document in part],
                "loss_mask": [np.asarray(document.targets, np.bool_) for _, document in part],
            }
            out.write_batch(pa.RecordBatch.from_pydict(columns, SCHEMA))
            del part, columns  # free them before the next batch is built


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, and which of them are targets; the first never is, for nothing precedes it.
    `labels` are the ids to predict at each position, where they differ from `ids`. `row`: the row
    of the user's file that it comes from."""

    ids: Sequence[int]
    targets: Sequence[int]
    labels: Sequence[int] | None = None
    row: str | None = None

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.targets) > 0 and not self.targets[0]

    @property
    def target_count(self) -> int:
        return sum(self.targets)


def build_document(prompt: Sequence[int], completion: Sequence[int]) -> Document:
    """Build a document whose completion is the target."""
    return Document(
        array("i", [*prompt, *completion]), array("b", [0] * len(prompt) + [1] * len(completion))
    )
