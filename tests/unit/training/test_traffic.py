import pytest

from tuneloop.training.fsdp.trainer import compute_union_length


@pytest.mark.parametrize(
    ("spans", "length"),
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(5, 6), (0, 2), (1, 4)], 5),
        ([(0, 9), (2, 3)], 9),
        ([(0, 1), (1, 2)], 2),
    ],
)
def test_overlapping_collectives_count_once(spans, length):
    assert compute_union_length(spans) == length
