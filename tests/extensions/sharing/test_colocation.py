"""Memory of runs that share a node."""

import pytest

from tuneloop.argo.training_memory import compute_trainer_memory
from tuneloop.extensions.sharing.colocation import Colocation

GIB = 2**30


@pytest.mark.parametrize(("request_gib", "fits"), [(16, True), (24, False)])
def test_two_trainers_of_4b_on_a_node_of_48_gib(request_gib: int, fits: bool) -> None:
    """The figures of open-rl's memory plan: 22.5 GiB a trainer that sleeps in host memory, 45 GiB for two."""
    weights, adam = compute_trainer_memory(4_022_468_096, width=2)
    assert (round(weights / GIB, 1), round(adam / GIB, 1)) == (7.5, 15.0)
    assert round(2 * (weights + adam) / GIB, 1) == 45.0
    of = Colocation(2, request_gib * GIB, weights + adam, 0, 0, 4 * GIB, 48 * GIB)
    assert of.requested == (2 * request_gib + 4) * GIB
    assert list(of.excess()) == ([] if fits else [("request", 52 * GIB)])


def test_what_is_used_at_a_time_is_one_stage_and_all_servers() -> None:
    of = Colocation(3, 1 * GIB, 20 * GIB, 1 * GIB, 5 * GIB, 4 * GIB, 38 * GIB)
    assert of.used == (20 + 3 * 5 + 4) * GIB
    assert list(of.excess()) == [("use", 39 * GIB)]
    assert Colocation(3, 0, None, 0, 5 * GIB, 0, 1).used is None
