"""A keyed permutation: every place once, and no pattern that a shuffle has not."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tuneloop.core.context import Stage
from tuneloop.core.seeds import derive_seed, permute_index


@given(st.integers(1, 300), st.integers(0, 2**63 - 1))
def test_every_index_is_met_once(count: int, seed: int) -> None:
    assert sorted(permute_index(place, count, seed) for place in range(count)) == list(range(count))


@given(st.integers(5, 10**15), st.data())
def test_any_count_needs_no_more_than_the_place(count: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=5, unique=True))
    found = [permute_index(place, count, 7) for place in places]
    assert len({*found}) == len(places) and all(0 <= index < count for index in found)


def test_each_place_gets_each_index_equally_often() -> None:
    """Of 4,000 seeds; a cell's count has mean 400 and a standard deviation of 19."""
    counts = [[0] * 10 for _ in range(10)]
    for seed in range(4000):
        for place in range(10):
            counts[place][permute_index(place, 10, seed)] += 1
    assert all(abs(count - 400) < 5 * 19 for row in counts for count in row)


def test_neighbours_part() -> None:
    """In a random order of n, about one place is followed by the next index."""
    orders = [[permute_index(place, 1000, seed) for place in range(1000)] for seed in range(20)]
    steps = [b - a for order in orders for a, b in itertools.pairwise(order)]
    assert all(steps.count(step) < 60 for step in range(-40, 41))
    assert len({tuple(order) for order in orders}) == 20


def test_a_stage_draws_by_its_own_seed(tmp_path: Path) -> None:
    class Unseeded(BaseModel):
        iteration: int = 3

    class Seeded(Unseeded):
        seed: int = 7

    stage = Stage("rollout", Seeded(), tmp_path, str(tmp_path), "a")
    assert stage.seed("sample", "i0") == derive_seed(7, "sample", 3, "i0")
    with pytest.raises(LookupError, match=r"rollout: .* needs a parameter `seed`"):
        Stage("rollout", Unseeded(), tmp_path, str(tmp_path), "a").seed("sample")
