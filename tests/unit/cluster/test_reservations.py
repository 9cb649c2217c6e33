"""Seats on claims, without a cluster."""

from hypothesis import given
from hypothesis import strategies as st

from tuneloop.cluster.reservations import choose_claim, filter_active_runs, find_free_name


@given(st.lists(st.sampled_from("abcdefg"), max_size=30), st.integers(1, 3))
def test_runs_that_come_fill_claims_in_order(comers: list[str], limit: int) -> None:
    """Each run has one seat, whoever comes twice the same; there is no claim more than needed, none over its limit."""
    claims: dict[str, list[str]] = {}
    for run in comers:
        name = choose_claim(claims, run, limit) or find_free_name("g", claims)
        if run not in claims.setdefault(name, []):
            claims[name].append(run)
    assert sorted(run for runs in claims.values() for run in runs) == sorted(set(comers))
    assert all(len(runs) <= limit for runs in claims.values())
    assert len(claims) == -(-len(set(comers)) // limit)


def test_a_seat_is_taken_on_the_fullest_claim_so_that_others_empty() -> None:
    claims = {"g-1": ["a"], "g-2": ["b", "c"], "g-3": ["d", "e", "f"]}
    assert choose_claim(claims, "x", 3) == "g-2"
    assert choose_claim(claims, "a", 1) == "g-1", "a run that sits stays, whatever the limit is now"
    assert choose_claim(claims, "x", 1) is None
    assert find_free_name("g", ["g-1", "g-3", "h-2"]) == "g-2"


def test_a_run_keeps_its_seat_as_long_as_one_of_its_workflows_is_active() -> None:
    active = {"a": [("a-2", "u2")], "b": [], "other": [("other", "u3")]}
    assert filter_active_runs(["b", "a", "gone"], active) == (["a"], [("a-2", "u2")])
