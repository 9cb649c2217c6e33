"""Tokenized documents in files that are mapped into memory: a data set may be larger than what the
machine has.

`tokenize_data` writes such files and training reads them (`training/corpora.py`). What is not
tokenized yet goes into a temporary one, so that both kinds of data are read alike.
Tests: `tests/unit/formats/test_corpus.py`.
"""

import copy
import itertools
import tempfile
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tuneloop.formats.sequences import LazySequence

ROWS = 32
"""Documents in a record batch."""
# A column that is added may be absent, as `row` of earlier versions, and takes a line in four
# places: `write_corpus`, `Corpus.__init__`, `Corpus.select`, which copies each column by hand, and
# `Document`.
SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "row": pa.string(),
        "input_ids": pa.list_(pa.int32()),
        "loss_mask": pa.list_(pa.bool_()),
    }
)


class Corpus(LazySequence["Document"]):
    """Documents by index, in an Arrow `file` by `write_corpus`, about 4.5 bytes a token. It is
    mapped into memory, so it may be deleted while in use.

    Attributes:
        names: the id of each document.
        rows: the row of the user's file that each was made of; null where that is not known.
        lengths: the number of ids of each, int64.
        highest_ids: the highest id of each, int32.
    """

    def __init__(self, file: str) -> None:
        # Views of the mapping: nothing of the tokens is copied before it is read.
        table = pa.ipc.open_file(pa.memory_map(file)).read_all()
        ids = table["input_ids"]
        masks = table["loss_mask"]

        def read(index: int) -> Document:
            document_ids = ids[index].values.to_numpy()
            targets = masks[index].values.to_numpy(zero_copy_only=False)
            return Document(array("i", document_ids.tobytes()), array("b", targets.tobytes()))

        super().__init__(len(table), read)
        self.names = table["id"]
        # Tokens that an earlier version made have no names of rows.
        if "row" in table.column_names:
            self.rows = table["row"]
        else:
            self.rows = pa.chunked_array([pa.nulls(len(table), pa.string())])
        self.lengths = pc.list_value_length(ids).to_numpy().astype(np.int64)
        # The empty array gives the dtype where there are no documents.
        highest_ids = [np.zeros(0, np.int32)]
        for chunk in ids.chunks:
            starts = chunk.offsets.to_numpy()[:-1]
            highest_ids.append(np.maximum.reduceat(chunk.values.to_numpy(), starts))
        self.highest_ids = np.concatenate(highest_ids)

    @property
    def tokens(self) -> int:
        """The number of ids in all documents."""
        return int(self.lengths.sum())

    def name(self, index: int) -> str:
        """Name a document by the row of the user's file, or else by its id."""
        return self.rows[index].as_py() or self.names[index].as_py()

    def select(self, indices: Sequence[int], limit: int) -> "Corpus":
        """Return the documents at `indices`, in this order, each cut off after `limit` ids."""
        selected = copy.copy(self)
        # Eight bytes a document: a list of numbers would have five times as many.
        selected_indices = np.asarray(indices, np.int64)

        def read(index: int) -> Document:
            document = self[int(selected_indices[index])]
            return Document(document.ids[:limit], document.targets[:limit])

        LazySequence.__init__(selected, len(selected_indices), read)
        selected.names = self.names.take(selected_indices)
        selected.rows = self.rows.take(selected_indices)
        selected.lengths = np.minimum(self.lengths[selected_indices], limit)
        # Of the whole document: what is cut off may have the highest id.
        selected.highest_ids = self.highest_ids[selected_indices]
        return selected

    @classmethod
    def from_documents(cls, documents: "Iterable[tuple[str, Document]]") -> "Corpus":
        """Write documents, each with its name, to a temporary file (``TMPDIR``) and open it."""
        with tempfile.NamedTemporaryFile() as file:
            write_corpus(file.name, documents)
            return cls(file.name)


def write_corpus(file: str, documents: "Iterable[tuple[str, Document]]") -> None:
    """Write documents, each with its name, for `Corpus`; equal ones give equal bytes. At most
    `ROWS` are in memory."""
    documents = iter(documents)
    with pa.ipc.new_file(file, SCHEMA) as out:
        while part := list(itertools.islice(documents, ROWS)):
            columns = {
                "id": [name for name, _ in part],
                "row": [document.row for _, document in part],
                "input_ids": [np.asarray(document.ids, np.int32) for _, document in part],
                "loss_mask": [np.asarray(document.targets, np.bool_) for _, document in part],
            }
            out.write_batch(pa.RecordBatch.from_pydict(columns, SCHEMA))
            # Free them before the next batch is built.
            del part, columns


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, and which of them are targets; the first never is, for nothing precedes it.

    Attributes:
        labels: the ids to predict at each position, where they differ from `ids`: only a client of
            the gateway gives them (`extensions/gateway/resident.py`), and no file has them.
        row: the row of the user's file that it comes from; None: not known.
    """

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
    ids = array("i", itertools.chain(prompt, completion))
    targets = array("b", [0] * len(prompt) + [1] * len(completion))
    return Document(ids, targets)
