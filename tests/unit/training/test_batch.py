import itertools

import torch
from hypothesis import given
from hypothesis import strategies as st

from tuneloop.formats.token_files import Document
from tuneloop.training.batching import (
    FORWARD_COST,
    collate_documents,
    count_batch_tokens,
    cut_into_rectangles,
    pack_documents,
    plan_micro_batches,
)

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=24)
CPU = torch.device("cpu")


def document(length: int, first: int) -> Document:
    """Distinct ids; the second half are targets."""
    return Document(range(first, first + length), [t >= (length + 1) // 2 for t in range(length)])


@given(LENGTHS, st.integers(1, 8), st.integers(1, 4), st.booleans())
def test_every_document_is_dealt_once(lengths, limit, world, packed):
    ranks = plan_micro_batches(lengths, limit, world, packed)
    assert len(ranks) == world
    assert len({len(micro) for micro in ranks}) == 1  # collectives need equal counts
    flat = [i for micro in ranks for batch in micro for i in batch]
    assert sorted(flat) == list(range(len(lengths)))
    assert all(len(batch) <= limit for micro in ranks for batch in micro)


@given(LENGTHS, st.integers(1, 8), st.integers(2, 4), st.booleans())
def test_ranks_wait_for_one_another_no_longer_than_the_largest_micro_batch(
    lengths, limit, world, packed
):
    side_by_side = [
        [count_batch_tokens(batch, lengths, packed) for batch in batches]
        for batches in zip(*plan_micro_batches(lengths, limit, world, packed))
    ]
    waited = sum(max(sizes) - min(sizes) for sizes in side_by_side)
    assert waited <= max(max(sizes) for sizes in side_by_side)


@given(st.lists(st.integers(1, 400), min_size=1, max_size=9), st.integers(1, 9))
def test_the_cut_is_the_cheapest(lengths, limit):
    order = sorted(range(len(lengths)), key=lengths.__getitem__)

    def cost(pieces):
        return sum(FORWARD_COST + len(piece) * max(lengths[i] for i in piece) for piece in pieces)

    def ways():
        for places in itertools.product([False, True], repeat=len(order) - 1):
            bounds = [0, *(i + 1 for i, here in enumerate(places) if here), len(order)]
            pieces = [order[a:b] for a, b in itertools.pairwise(bounds)]
            if all(len(piece) <= limit for piece in pieces):
                yield cost(pieces)

    assert cost(cut_into_rectangles(order, lengths, limit)) == min(ways())


@given(LENGTHS)
def test_packed_rows_hold_everything_within_capacity(lengths):
    rows = pack_documents(lengths, 64)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in row) <= 64 for row in rows)
    assert len(rows) <= 2 * sum(lengths) / 64 + 1  # no two rows could share one


@given(LENGTHS, st.booleans())
def test_each_index_stands_before_its_label(lengths, packed):
    documents = [document(length, 100 * i + 1) for i, length in enumerate(lengths)]
    batch = collate_documents(documents, CPU, 64 if packed else None)
    wanted = [token for d in documents for token, target in zip(d.ids, d.targets) if target]
    assert batch.labels.tolist() == wanted
    flat = batch.input_ids.flatten()
    assert flat[batch.index].tolist() == [label - 1 for label in wanted]
    assert flat[batch.index + 1].tolist() == wanted
    if packed:
        assert batch.position_ids.flatten()[batch.index].tolist() == [
            (label - 1) % 100 - 1 for label in wanted
        ]
    else:
        assert batch.position_ids is None
        assert batch.input_ids.shape == (len(lengths), max(lengths))


def test_no_documents_still_make_a_pass():
    batch = collate_documents([], CPU)
    assert batch.input_ids.shape == (1, 1)
    assert len(batch.index) == len(batch.labels) == 0
