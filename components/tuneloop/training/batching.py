"""Documents, and the tensors they travel in: padded rectangles or packed rows.

A document is a token sequence with a mask that says which tokens the model is to predict. Documents of a batch may be
laid out in any way, since a loss divides by the target count of the whole batch, never by that of a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tuneloop.formats.token_files import Document

FORWARD_COST = 256
"""What one forward and backward costs beside its tokens, in tokens (tiny model on a CPU: 15 ms at 17,000 a second)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What a forward pass takes. No attention mask: padding stands right of all it could disturb.

    Attributes:
        input_ids: int64 ``[rows, length]``.
        position_ids: int64 ``[rows, length]``, restarting at 0 with each document of a row, which is how transformers
            knows to keep them apart; None where a row is one document.
        index: int64 ``[targets]``, the places of ``input_ids.flatten()`` whose output predicts a target.
        labels: int64 ``[targets]``, the targets, document by document in the order they were given.
    """

    input_ids: Tensor
    position_ids: Tensor | None
    index: Tensor
    labels: Tensor


def plan_micro_batches(lengths: Sequence[int], limit: int, world: int, packed: bool) -> list[list[list[int]]]:
    """Deal documents to ranks: rank → micro-batches → indices into `lengths`.

    Every rank gets equally many micro-batches, as the collectives of a sharded model demand; some may be empty. Those
    that run side by side are neighbours in size: over all of them ranks wait for one another no longer than the largest
    takes.

    Args:
        limit: at most so many documents in a micro-batch.
        packed: micro-batches of equal make-up, to be packed; else of equal lengths, to be padded.
    """
    limit = min(limit, max(1, math.ceil(len(lengths) / world)))
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    if packed:
        count = math.ceil(len(order) / limit)
        micro = [order[start::count] for start in range(count)]
    else:
        micro = cut_into_rectangles(order, lengths, limit)
    if world > 1:
        micro.sort(key=lambda batch: count_batch_tokens(batch, lengths, packed))
    micro = [[] for _ in range(-len(micro) % world)] + micro
    return [micro[rank::world] for rank in range(world)]


def count_batch_tokens(batch: Sequence[int], lengths: Sequence[int], packed: bool) -> int:
    """Count the tokens of a micro-batch, with padding where there is some."""
    own = [lengths[i] for i in batch]
    return sum(own) if packed else len(own) * max(own, default=0)


def cut_into_rectangles(order: Sequence[int], lengths: Sequence[int], limit: int) -> list[list[int]]:
    """Cut documents sorted by length into rectangles, at the least cost.

    A rectangle costs its area, padding included, and `FORWARD_COST`. The best cut of the first k documents follows
    from the best cuts of fewer (dynamic programming).
    """
    best = [(0.0, 0)]  # cost of the first k documents, and where their last rectangle begins
    for end in range(1, len(order) + 1):
        height = lengths[order[end - 1]]
        begins = range(max(0, end - limit), end)
        best.append(min((best[begin][0] + FORWARD_COST + (end - begin) * height, begin) for begin in begins))
    pieces, end = [], len(order)
    while end:
        begin = best[end][1]
        pieces.append(list(order[begin:end]))
        end = begin
    return pieces[::-1]


def pack_documents(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack documents into rows of at most `capacity` tokens by best-fit decreasing (arXiv 2404.10830)."""
    rows: list[list[int]] = []
    room: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [row for row, left in enumerate(room) if left >= lengths[i]]
        row = min(fitting, key=room.__getitem__, default=len(rows))
        if row == len(rows):
            rows.append([])
            room.append(capacity)
        rows[row].append(i)
        room[row] -= lengths[i]
    return rows


def collate_documents(documents: Sequence[Document], device: torch.device, capacity: int | None = None) -> Batch:
    """Lay documents out, one a row, or packed into rows of at most `capacity` tokens.

    No document gives a batch of one token and no target: what an idle rank runs to keep step with the others.
    """
    lengths = [len(document.ids) for document in documents]
    rows = [[i] for i in range(len(documents))] if capacity is None else pack_documents(lengths, capacity)
    width = max((sum(lengths[i] for i in row) for row in rows), default=1)
    ids = [[0] * width for _ in rows] or [[0]]
    positions = [[0] * width for _ in rows] or [[0]]  # 0, 0, … in what is left of a row: each pad stands alone
    start = {}
    for r, row in enumerate(rows):
        at = 0
        for i in row:
            start[i] = r * width + at
            ids[r][at : at + lengths[i]] = documents[i].ids
            positions[r][at : at + lengths[i]] = range(lengths[i])
            at += lengths[i]
    places = [
        (start[i] + t - 1, (d.labels or d.ids)[t])
        for i, d in enumerate(documents)
        for t, wanted in enumerate(d.targets)
        if wanted
    ]
    index, labels = torch.tensor(places, dtype=torch.long, device=device).reshape(-1, 2).unbind(1)
    return Batch(
        input_ids=torch.tensor(ids, device=device),
        position_ids=None if capacity is None else torch.tensor(positions, device=device),
        index=index.contiguous(),
        labels=labels.contiguous(),
    )
