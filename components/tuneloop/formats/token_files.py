"""Tokenized documents in files that are mapped into memory: a data set may be larger than what the machine has."""

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
    {"id": pa.string(), "input_ids": pa.list_(pa.int32()), "loss_mask": pa.list_(pa.bool_())}
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
    """Documents by index, in an Arrow `file` by `write_corpus`, about 4.5 bytes a token. It is mapped into memory, so
    it may be deleted while in use. `names`: of the documents; `extremes`: the longest document, and the one with the
    highest token id, each with its name; `tokens`: the number in all documents."""

    def __init__(self, file: str) -> None:
        reader = pa.ipc.open_file(pa.memory_map(file))
        batches = [reader.get_batch(k) for k in range(reader.num_record_batches)]
        self.names = pa.chunked_array([batch["id"] for batch in batches], pa.string())
        rows = batches[0].num_rows if batches else 1  # of each batch but the last
        starts = [batch["input_ids"].offsets.to_numpy() for batch in batches]
        ids = [batch["input_ids"].values.to_numpy() for batch in batches]
        masks = [batch["loss_mask"].values for batch in batches]

        def read(place: int) -> Document:
            k, row = divmod(place, rows)
            start, end = starts[k][row : row + 2].tolist()
            mask = masks[k].slice(start, end - start).to_numpy(zero_copy_only=False)
            return Document(array("i", ids[k][start:end].tobytes()), array("b", mask.tobytes()))

        super().__init__(len(self.names), read)
        self.tokens = sum(map(len, ids))
        most: dict[str, tuple[int, int]] = {}
        for k, (begins, values_) in enumerate(zip(starts, ids)):
            for what, values in (
                ("length", np.diff(begins)),
                ("id", np.maximum.reduceat(values_, begins[:-1])),
            ):
                row = int(values.argmax())
                if what not in most or values[row] > most[what][0]:
                    most[what] = values[row], k * rows + row
        self.extremes = [(str(self.names[place]), self.at(place)) for _, place in most.values()]

    @classmethod
    def from_documents(cls, documents: "Iterable[tuple[str, Document]]") -> "Corpus":
        """Write documents, each with its name, to a temporary file (``TMPDIR``) and open it."""
        with tempfile.NamedTemporaryFile() as file:
            write_corpus(file.name, documents)
            return cls(file.name)


def write_corpus(file: str, documents: "Iterable[tuple[str, Document]]") -> None:
    """Write documents, each with its name, for `Corpus`; equal ones give equal bytes. At most `ROWS` are in memory."""
    rest = iter(documents)
    with pa.ipc.new_file(file, SCHEMA) as out:
        while part := list(itertools.islice(rest, ROWS)):
            columns = {
                "id": [name for name, _ in part],
                "input_ids": [np.asarray(document.ids, np.int32) for _, document in part],
                "loss_mask": [np.asarray(document.targets, np.bool_) for _, document in part],
            }
            out.write_batch(pa.RecordBatch.from_pydict(columns, SCHEMA))
            del part, columns  # free them before the next batch is built


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, and which of them are targets; the first never is, for nothing precedes it. `labels` are the ids to
    predict at each position, where they differ from `ids`."""

    ids: Sequence[int]
    targets: Sequence[int]
    labels: Sequence[int] | None = None

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
