"""Seats on claims, and the memory of runs that share, without a cluster."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuneloop.sharing.claims import Claim, choose_claim, filter_active_runs, find_free_name
from tuneloop.sharing.memory import Colocation, compute_trainer_memory

GIB = 1 << 30


@given(st.lists(st.sampled_from("abcdefg"), max_size=30), st.integers(1, 3))
def test_runs_that_come_fill_claims_in_order(comers: list[str], limit: int) -> None:
    """Each run has one seat, whoever comes twice the same; there is no claim more than needed, none over its limit."""
    claims: dict[str, list[str]] = {}
    for run in comers:
        standing = [Claim(name, tuple(runs)) for name, runs in claims.items()]
        name = choose_claim(standing, run, limit) or find_free_name("g", claims)
        if run not in claims.setdefault(name, []):
            claims[name].append(run)
    assert sorted(run for runs in claims.values() for run in runs) == sorted(set(comers))
    assert all(len(runs) <= limit for runs in claims.values())
    assert len(claims) == -(-len(set(comers)) // limit)


def test_a_seat_is_taken_on_the_fullest_claim_so_that_others_empty() -> None:
    claims = [Claim("g-1", ("a",)), Claim("g-2", ("b", "c")), Claim("g-3", ("d", "e", "f"))]
    assert choose_claim(claims, "x", 3) == "g-2"
    assert choose_claim(claims, "a", 1) == "g-1", "a run that sits stays, whatever the limit is now"
    assert choose_claim(claims, "x", 1) is None
    assert find_free_name("g", ["g-1", "g-3", "h-2"]) == "g-2"


def test_a_run_keeps_its_seat_as_long_as_one_of_its_workflows_is_active() -> None:
    active = {"a": [("a-2", "u2")], "b": [], "other": [("other", "u3")]}
    assert filter_active_runs(["b", "a", "gone"], active) == (["a"], [("a-2", "u2")])


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
