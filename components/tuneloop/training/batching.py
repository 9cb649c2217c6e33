"""Documents, and the tensors that hold them: padded rectangles or packed rows.

A document is a token sequence with a mask that says which tokens the model is to predict. The
layout of a batch is free, since a loss divides by the target count of the whole batch, never by
that of a micro-batch.

`Policy.plan` and `Policy.collate` call it. The cut into micro-batches changes results by the
rounding of sums alone. So costs and limits here may be tuned, but a run that goes on with others
has other bits from there on, and an update that is replayed is refused
(`stages/policy_update.py: repeat_update`). Tests: `tests/unit/training/test_batch.py`.
"""

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tuneloop.formats.token_files import Document

FORWARD_COST = 256
"""Fixed cost of a forward and backward pass, in tokens (tiny model on a CPU: 15 ms at 17,000 tokens
a second).
"""
GPU_FORWARD_COST = 2048
"""The same on a GPU.

Padded rows of a model of 0.6 billion parameters ran at 11,000 tokens a second with 256, and at
20,000 with 2048 (H200).
"""


@dataclass(frozen=True, slots=True)
class Batch:
    """The input of a forward pass.

    It needs no attention mask: padding stands to the right of every document.

    Attributes:
        input_ids, position_ids: int64 ``[rows, length]``. Positions restart at 0 with each document
            of a row, so that transformers keeps documents apart; None if every row is one document.
        index: int64 ``[targets]``, the places of ``input_ids.flatten()`` whose output predicts a
            target.
        labels: int64 ``[targets]``, the targets, document by document in the order they were given.
        counts: int64 ``[documents]``, how many targets each has.
        boundaries: int32 ``[sequences + 1]``, where sequences begin in ``input_ids.flatten()``, for
            kernels that keep the documents of a row apart; a row's padding counts as one sequence
            more.
        longest: tokens of the longest sequence.
    """

    input_ids: Tensor
    position_ids: Tensor | None
    index: Tensor
    labels: Tensor
    counts: Tensor
    boundaries: Tensor
    longest: int

    def to(self, device: torch.device) -> "Batch":
        """Return the batch on a device. From pinned memory it is copied asynchronously."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        return Batch(
            input_ids=move(self.input_ids),
            position_ids=None if self.position_ids is None else move(self.position_ids),
            index=move(self.index),
            labels=move(self.labels),
            counts=move(self.counts),
            boundaries=move(self.boundaries),
            longest=self.longest,
        )


def plan_micro_batches(
    lengths: Sequence[int],
    limit: int,
    world: int,
    packed: bool,
    forward_cost: int = FORWARD_COST,
) -> list[list[list[int]]]:
    """Deal documents to ranks, at most `limit` in a micro-batch: rank → micro-batches → indices
    into `lengths`.

    Every rank gets equally many micro-batches, as the collectives of a sharded model require; some
    may be empty. Ranks run micro-batches of similar size at the same time, so that a rank waits no
    longer in all than the largest one takes. `packed` micro-batches have similar mixes of lengths;
    others have documents of similar length.
    """
    # No rank should have all documents in one micro-batch while others idle.
    limit = min(limit, max(1, math.ceil(len(lengths) / world)))
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    if packed:
        count = math.ceil(len(order) / limit)
        micro = [order[start::count] for start in range(count)]
    else:
        micro = cut_into_rectangles(order, lengths, limit, forward_cost)
    if world > 1:
        micro.sort(key=lambda batch: count_batch_tokens(batch, lengths, packed))
    micro = [[] for _ in range(-len(micro) % world)] + micro
    return [micro[rank::world] for rank in range(world)]


def count_batch_tokens(batch: Sequence[int], lengths: Sequence[int], packed: bool) -> int:
    """Count the tokens of a micro-batch, including padding."""
    batch_lengths = [lengths[index] for index in batch]
    if packed:
        return sum(batch_lengths)
    return len(batch_lengths) * max(batch_lengths, default=0)


def cut_into_rectangles(
    order: Sequence[int],
    lengths: Sequence[int],
    limit: int,
    forward_cost: int = FORWARD_COST,
) -> list[list[int]]:
    """Cut documents sorted by length into rectangles at minimal cost: the sum of their areas,
    including padding, and a `forward_cost` for each.

    Dynamic programming: the best cut of k documents extends a best cut of fewer documents.
    """
    # By the number of documents: the minimal cost of their cut, and where its last rectangle
    # starts.
    best_costs = np.zeros(len(order) + 1, np.int64)
    last_starts = np.zeros(len(order) + 1, np.int64)
    for end in range(1, len(order) + 1):
        height = lengths[order[end - 1]]
        starts = np.arange(max(0, end - limit), end)
        costs = best_costs[starts] + forward_cost + (end - starts) * height
        last_starts[end] = starts[0] + costs.argmin()
        best_costs[end] = costs.min()
    rectangles: list[list[int]] = []
    end = len(order)
    while end:
        start = int(last_starts[end])
        rectangles.append(list(order[start:end]))
        end = start
    return rectangles[::-1]


def pack_documents(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack documents into rows of at most `capacity` tokens.

    The method is best-fit decreasing (arXiv 2404.10830).
    """
    rows: list[list[int]] = []
    # (free tokens, row), sorted: the best fit is found by bisection.
    spaces: list[tuple[int, int]] = []
    for document in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        length = lengths[document]
        position = bisect.bisect_left(spaces, (length, 0))
        if position < len(spaces):
            free, row = spaces.pop(position)
        else:
            free = capacity
            row = len(rows)
            rows.append([])
        rows[row].append(document)
        bisect.insort(spaces, (free - length, row))
    return rows


def collate_documents(
    documents: Sequence[Document],
    device: torch.device,
    capacity: int | None = None,
) -> Batch:
    """Lay documents out on the host, one in each row or packed into rows of at most `capacity`
    tokens; in pinned memory for a GPU.

    The first token of a document must be no target: it would be predicted by another document.
    Without documents the batch has one token and no target, for an idle rank to take part in
    collectives.
    """
    if not documents:
        token = _make_tensor(np.zeros((1, 1), np.int64), device)
        empty = _make_tensor(np.zeros(0, np.int64), device)
        return Batch(
            input_ids=token,
            position_ids=None if capacity is None else token,
            index=empty,
            labels=empty,
            counts=empty,
            boundaries=_make_tensor(np.array([0, 1], np.int32), device),
            longest=1,
        )
    lengths = np.array([len(document.ids) for document in documents])
    rows = [[index] for index in range(len(documents))]
    if capacity is not None:
        rows = pack_documents(lengths.tolist(), capacity)
    width = max(int(lengths[row].sum()) for row in rows)
    # By document: where it starts in the flattened batch, and in the documents laid end to end.
    starts = np.empty(len(documents), np.int64)
    for number, row in enumerate(rows):
        starts[row] = number * width + np.cumsum(lengths[row]) - lengths[row]
    offsets = np.cumsum(lengths) - lengths
    # By token, document by document: its position in the document, and in the flattened batch.
    positions = np.arange(lengths.sum()) - np.repeat(offsets, lengths)
    places = np.repeat(starts, lengths) + positions
    ids = _join_tokens(document.ids for document in documents)
    is_target = _join_tokens(document.targets for document in documents)
    targets = np.flatnonzero(is_target)
    labels = _join_tokens(document.labels or document.ids for document in documents)[targets]
    boundaries = _find_boundaries(starts, lengths, width, len(rows))

    def spread(values: np.ndarray) -> Tensor:
        # Padding gets position 0, so that each pad is a document by itself.
        flat = np.zeros(len(rows) * width, np.int64)
        flat[places] = values
        return _make_tensor(flat.reshape(-1, width), device)

    return Batch(
        input_ids=spread(ids),
        position_ids=None if capacity is None else spread(positions),
        # The output at a token predicts the next one.
        index=_make_tensor(places[targets] - 1, device),
        labels=_make_tensor(labels, device),
        counts=_make_tensor(np.add.reduceat(is_target, offsets), device),
        boundaries=_make_tensor(boundaries, device),
        longest=int(np.diff(boundaries).max()),
    )


def _find_boundaries(start: np.ndarray, lengths: np.ndarray, width: int, rows: int) -> np.ndarray:
    """List where sequences begin in rows of `width` laid end to end, and where the last one ends."""
    ends = np.arange(1, rows + 1) * width
    return np.unique(np.concatenate([[0], start, start + lengths, ends])).astype(np.int32)


def _make_tensor(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array as a tensor of the host, in pinned memory if `device` is a GPU."""
    tensor = torch.from_numpy(values)
    if device.type != "cuda":
        return tensor
    # A new thread's current device is the first GPU, where this would allocate memory.
    with torch.cuda.device(device):
        return tensor.pin_memory()


def _join_tokens(parts: Iterable[Sequence[int]]) -> np.ndarray:
    """Concatenate the values of all tokens, document by document, into one int64 array."""
    return np.concatenate([np.asarray(part, np.int64) for part in parts])
