"""Tokenized documents in temporary files, mapped into memory: a data set may be larger than what the machine has."""

import tempfile
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, overload

import numpy as np

T = TypeVar("T")


class Places(Sequence[T]):
    """A sequence whose items are made as they are asked for, by `at`."""

    @abstractmethod
    def at(self, place: int) -> T:
        """Return the item at a place from 0 to ``len(self) - 1``."""

    @overload
    def __getitem__(self, place: int) -> T: ...
    @overload
    def __getitem__(self, place: slice) -> list[T]: ...
    def __getitem__(self, place: int | slice) -> T | list[T]:
        places = range(len(self))[place]
        return self.at(places) if isinstance(places, int) else [self.at(i) for i in places]


class Corpus(Places["Document"]):
    """Documents by place. Five bytes a token on disk (``TMPDIR``), eight a document in memory.

    Args:
        documents: name and document, read once.

    Attributes:
        extremes: name → document of the longest, and of the one with the highest token id.
        tokens: of all documents.
    """

    def __init__(self, documents: "Iterable[tuple[str, Document]]") -> None:
        self._ends = array("q", [0])
        with tempfile.TemporaryFile() as ids, tempfile.TemporaryFile() as targets:
            most: dict[str, tuple[int, str, Document]] = {}
            for name, document in documents:
                ids.write(np.asarray(document.ids, np.int32).tobytes())
                targets.write(np.asarray(document.targets, np.bool_).tobytes())
                self._ends.append(self._ends[-1] + len(document.ids))
                for what, value in (("length", len(document.ids)), ("id", max(document.ids))):
                    if what not in most or value > most[what][0]:
                        most[what] = value, name, document
            ids.flush()
            targets.flush()
            self.extremes = {name: document for _, name, document in most.values()}
            self.tokens = self._ends[-1]
            empty = not self.tokens  # which cannot be mapped
            self._ids = np.zeros(0, np.int32) if empty else np.memmap(ids, np.int32, "r")
            self._targets = np.zeros(0, np.bool_) if empty else np.memmap(targets, np.bool_, "r")

    def __len__(self) -> int:
        return len(self._ends) - 1

    def at(self, place: int) -> "Document":
        part = slice(self._ends[place], self._ends[place + 1])
        return Document(array("i", self._ids[part].tobytes()), array("b", self._targets[part].tobytes()))


@dataclass(frozen=True, slots=True)
class Document:
    """Token ids, and which of them are targets; the first never is, for nothing precedes it.

    `labels` are what is to be predicted in place of each of `ids`, where that is something else.
    """

    ids: Sequence[int]
    targets: Sequence[int]
    labels: Sequence[int] | None = None

    def __post_init__(self) -> None:
        assert len(self.ids) == len(self.targets) > 0 and not self.targets[0]

    @property
    def target_count(self) -> int:
        return sum(self.targets)
