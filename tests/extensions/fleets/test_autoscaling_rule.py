"""The rule by which rollout replicas come and go: by hand, at random, and in a simulated run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.extensions.fleets.fleet_simulation import Trace, follow, simulate_run, tabulate
from tuneloop.extensions.fleets.autoscaling_rule import AutoscalingRule, Iteration


@pytest.mark.parametrize(
    ("replicas", "requests", "clients", "wanted"),
    [
        (0, 0, 0, 0),
        (0, 0, 3, 1),  # nobody counts what waits: the first replica will
        (0, 1, 0, 1),
        (1, 64, 1, 1),
        (1, 70, 1, 1),  # within a tenth of the target
        (1, 71, 1, 2),
        (2, 256, 1, 4),
        (2, 10_000, 1, 8),  # at most
    ],
)
def test_replicas_by_requests(replicas: int, requests: float, clients: int, wanted: int) -> None:
    """As the HorizontalPodAutoscaler computes it from an average value, and KEDA from activation."""
    assert AutoscalingRule(0, 8, 64).decide(0, replicas, replicas, requests, clients) == wanted


def test_replicas_go_after_a_window_in_which_fewer_would_have_done() -> None:
    rule = AutoscalingRule(0, 8, 64, window_s=300)
    assert rule.decide(0, 1, 1, 512, 1) == 8
    assert [rule.decide(at, 8, 8, 0, 0) for at in (100, 200, 299)] == [8, 8, 8]
    assert rule.decide(300, 8, 8, 0, 0) == 0
    assert rule.decide(301, 0, 0, 0, 1) == 1, "up at once"


def test_a_rule_that_was_started_again_takes_nothing_away_at_once() -> None:
    rule = AutoscalingRule(0, 8, 64, window_s=300)
    assert [rule.decide(at, 5, 5, 0, 0) for at in (1000, 1299, 1300)] == [5, 5, 0]


def test_a_lower_maximum_holds_at_once() -> None:
    assert AutoscalingRule(0, 3, 64).decide(0, 5, 5, 512, 1) == 3


@pytest.mark.parametrize(
    ("weight", "sampling", "idle", "wanted"),
    [
        (1, 100, 100, 2),  # sqrt(4): 4 replicas for 100 s are 400 s of work
        (1, 100, 25, 4),
        (4, 100, 100, 4),  # a trainer of four devices idles four times as dearly
        (1, 100, 1, 8),  # sqrt(400), of which requests and maximum leave 8
        (1, 1, 400, 1),
    ],
)
def test_replicas_that_idle_longer_than_they_spare_the_trainer_go(
    weight: float, sampling: float, idle: float, wanted: int
) -> None:
    rule = AutoscalingRule(0, 8, 64, window_s=0, weight=weight)
    assert rule.decide(0, 4, 4, 1000, 1, Iteration(0, sampling, idle)) == wanted


def test_an_iteration_that_other_replicas_sampled_says_nothing() -> None:
    rule = AutoscalingRule(0, 8, 64, window_s=0)
    assert rule.decide(100, 4, 3, 256, 1) == 4, "one of them is starting"
    assert rule.decide(200, 4, 4, 256, 1, Iteration(99, 100, 100)) == 4
    assert rule.decide(300, 4, 4, 256, 1, Iteration(100, 100, 100)) == 2


def test_idle_times_that_vary_by_little_change_nothing() -> None:
    rule = AutoscalingRule(0, 8, 1, window_s=0)
    assert rule.decide(0, 2, 2, 100, 1, Iteration(0, 100, 34)) == 2  # 2.43
    assert rule.decide(1, 2, 2, 100, 1, Iteration(0, 100, 30)) == 2  # 2.58
    assert rule.decide(2, 2, 2, 100, 1, Iteration(0, 100, 28)) == 3  # 2.67


LOADS = st.tuples(
    st.floats(0, 60),
    st.integers(0, 10),
    st.floats(0, 1e6),
    st.integers(0, 3),
    st.floats(0, 1e4),
    st.floats(0, 1e4),
)


@given(st.integers(0, 3), st.integers(3, 9), st.floats(1, 1000), st.lists(LOADS, max_size=20))
def test_replicas_stay_within_their_bounds(
    minimum: int, maximum: int, target: float, loads: list[tuple]
) -> None:
    rule, now, replicas = AutoscalingRule(minimum, maximum, target, window_s=100), 0.0, minimum
    for later, ready, requests, clients, sampling, idle in loads:
        now += later
        replicas = rule.decide(
            now, replicas, min(ready, replicas), requests, clients, Iteration(now, sampling, idle)
        )
        assert minimum <= replicas <= maximum
        assert replicas or not (requests or clients), "who asks is answered"


@pytest.mark.parametrize("way", ["by requests", "by requests and idle times"])
def test_a_run_gets_its_replicas_once_and_none_is_left(way: str) -> None:
    """0 while nobody asks, more under load, at most 8, and no coming and going in between."""
    made = tabulate()[way]
    meanwhile = [number for at, number in made.decided if at <= made.seconds]
    after = [number for at, number in made.decided if at > made.seconds]
    assert meanwhile[:2] == [1, 8] and after[-1] == 0
    assert made.decided[0][0] == 0, "the first comes as soon as there is a client"
    fewer = [*meanwhile[1:], *after]
    assert fewer == sorted(fewer, reverse=True)
    assert meanwhile[-1] == (8 if way == "by requests" else 4)


def test_a_run_that_pauses_for_less_than_a_window_keeps_its_replicas() -> None:
    trace = Trace([[30] * 64] * 3, training=200)
    made = simulate_run(trace, follow(AutoscalingRule(0, 2, 32), idle=False))
    assert [number for at, number in made.decided if at <= made.seconds] == [1, 2]
    assert made.decided[-1][1] == 0


def test_by_idle_times_a_run_takes_the_least_device_time() -> None:
    """Of the four ways, with what starts, and what idles after the run."""
    table = dict(tabulate())
    rule = table.pop("by requests and idle times")
    assert all(rule.devices < made.devices for made in table.values())
    assert table["8 replicas"].seconds < rule.seconds < table["1 replica"].seconds
