"""Sequences whose items are made when they are read, so that data may be larger than memory.

A slice is a list, which is made at once. An item is made anew each time it is read, so `make` must
give equal items for an index. Subclasses are `formats/token_files.py: Corpus` and those of
`training/pairs.py`; readers of data sets return them (`data/readers`).
"""

import bisect
import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


class LazySequence(Sequence[T]):
    """A sequence of `length` items; `make` makes the item of an index, from 0, when it is read. A slice
    is a list, whose items are made at once.
    """

    def __init__(self, length: int, make: Callable[[int], T]) -> None:
        self._length = length
        self._make = make

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        # A range resolves negative indices and slices, and raises IndexError, as a list does.
        indices = range(self._length)[index]
        if isinstance(indices, int):
            return self._make(indices)
        return [self._make(number) for number in indices]


def chain_sequences(parts: Sequence[Sequence[T]]) -> LazySequence[T]:
    """Return the items of several sequences as one sequence, those of the first part first.

    Finding an item's part takes time with the logarithm of their number."""
    # Eight bytes a part: a table may have a million of them.
    ends = array("q", itertools.accumulate(map(len, parts)))

    def read(index: int) -> T:
        number = bisect.bisect_right(ends, index)
        part = parts[number]
        return part[index - ends[number] + len(part)]

    return LazySequence(ends[-1] if ends else 0, read)
