import random
from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.sharing.lease_plans import GROUP, in_turn, overlap_tasks
from tests.unit.sharing.lease_simulation import (
    Rules,
    Schedule,
    Task,
    compute_percentile,
    simulate_runs,
)
from tuneloop.core.artifacts import Role


def loop(
    rollout: float, reward: float, update: float, iterations: int = 2, lead: float = 0.0
) -> list[Task]:
    """What a run took; `lead` is that of each stage."""
    each: tuple[tuple[str, float, str, Role], ...] = (
        ("rollout", rollout, "sampler", "sampler"),
        ("reward", reward, "", "scorer"),
        ("policy-update", update, "trainer", "trainer"),
    )
    numbers = range(1, iterations + 1)
    return [
        Task(name, i, seconds, on, lead, role=role)
        for i in numbers
        for name, seconds, on, role in each
    ]


def told(schedule: Schedule) -> list[tuple[str, float, float]]:
    """Run, beginning and end of what holds a device."""
    return [(span.run, span.began, span.ended) for span in schedule.spans if span.task.device]


def test_a_run_alone_takes_what_it_took() -> None:
    schedule = simulate_runs(
        {"a": in_turn(loop(3, 1, 2, iterations=3, lead=0.5))}, Rules(GROUP, swap=9, handover=9)
    )
    assert schedule.total == 3 * (3 + 1 + 2 + 3 * 0.5)
    assert schedule.steps == [7.5, 7.5]
    assert (schedule.busy("sampler"), schedule.busy("trainer")) == (9, 6)


def test_two_runs_take_turns() -> None:
    """By hand: b waits for a's rollout, then each trains while the other's rewards are counted, or waits."""
    runs = {"a": in_turn(loop(3, 1, 2, 1)), "b": in_turn(loop(2, 4, 1, 1))}
    assert told(simulate_runs(runs, Rules(GROUP))) == [
        ("a", 0, 3),
        ("b", 3, 5),
        ("a", 5, 7),
        ("b", 9, 10),
    ]
    slow = simulate_runs(runs, Rules(GROUP, swap=1, handover=0.5))
    assert told(slow) == [("a", 0, 3), ("b", 4.5, 6.5), ("a", 8, 10), ("b", 11.5, 12.5)], (
        "a waited from 4, b from 10.5"
    )
    apart = simulate_runs(runs, Rules({"trainer": "t", "sampler": "s"}))
    assert told(apart) == [("a", 0, 3), ("b", 3, 5), ("a", 4, 6), ("b", 9, 10)], (
        "one samples, the other trains"
    )


def test_the_overlapped_loop_samples_beside_the_update() -> None:
    """By hand: batch 1 until 4; then update 1 (5) beside batch 2 (4), update 2 beside batch 3, update 3 alone."""
    tasks = overlap_tasks(loop(3, 1, 5, 3))
    schedule = simulate_runs({"a": tasks})
    assert schedule.total == 4 + 3 * 5
    assert schedule.steps == [5, 5]
    assert simulate_runs({"a": overlap_tasks(loop(6, 1, 5, 3))}).total == 7 * 3 + 5, (
        "where the batch is longer, it is the step"
    )
    assert simulate_runs({"a": tasks}, Rules(GROUP)).total == 3 * (3 + 1 + 5), (
        "one turn for both: nothing overlaps"
    )


def test_evaluation_comes_between_iterations() -> None:
    tasks = loop(1, 1, 1, 2)
    tasks.insert(3, Task("evaluate", 1, 10, "sampler", role="evaluator"))
    assert simulate_runs({"a": in_turn(tasks)}).total == 16
    assert simulate_runs({"a": overlap_tasks(tasks)}).total == 2 + 2 + 10 + 1, (
        "as the graph has it: both, then the evaluation"
    )


def test_least_recently_served_leaves_less_idle() -> None:
    """By hand: from 8 on c, whose rewards take longest, is served before a, and is not waited for in the end."""
    runs = {"a": in_turn(loop(1, 1, 4)), "b": in_turn(loop(1, 1, 1)), "c": in_turn(loop(1, 4, 2))}
    fifo, lrs = (simulate_runs(runs, Rules(GROUP, policy=policy)) for policy in ("fifo", "lrs"))  # type: ignore[arg-type]
    assert "".join(run for run, *_ in told(fifo)) == "abcabacbacbc"
    assert "".join(run for run, *_ in told(lrs)) == "abcabcabcabc"
    assert (fifo.total, lrs.total) == (23, 20)
    idle = [
        schedule.total - schedule.busy("trainer") - schedule.busy("sampler")
        for schedule in (fifo, lrs)
    ]
    assert idle == [3, 0]


def test_of_two_loops_both_policies_serve_the_same() -> None:
    """Whoever has just had a turn is last by either: only where three wait, or one run waits twice, do they differ."""
    source = random.Random(0)
    for _ in range(50):
        runs = {
            name: in_turn(loop(*(source.uniform(0.5, 5) for _ in range(3)), 5)) for name in "ab"
        }
        assert simulate_runs(runs, Rules(GROUP, "fifo", 0.3, 0.1)) == simulate_runs(
            runs, Rules(GROUP, "lrs", 0.3, 0.1)
        )


seconds = st.integers(0, 6)
one_run = st.builds(
    lambda form, lead, *phases: form(loop(*phases, 3, lead)),
    *(st.sampled_from((in_turn, overlap_tasks)), seconds, seconds, seconds, seconds),
)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(one_run, min_size=1, max_size=4),
    st.sampled_from(("fifo", "lrs")),
    st.sampled_from((GROUP, {"trainer": "t", "sampler": "s"})),
    seconds,
    seconds,
)
def test_no_device_is_busy_longer_than_there_was_time(
    each: list[list[Task]], policy: str, turns: Mapping[str, str], swap: int, handover: int
) -> None:
    runs: dict[str, Sequence[Task]] = {f"run-{number}": tasks for number, tasks in enumerate(each)}
    rules = Rules(turns, policy, swap, handover)  # type: ignore[arg-type]
    schedule = simulate_runs(runs, rules)
    assert simulate_runs(runs, rules) == schedule
    assert len(schedule.spans) == sum(map(len, each)), "everything is carried out, once"
    held: dict[str, list[tuple[float, float]]] = {}
    for span in schedule.spans:
        assert span.asked <= span.began <= span.ended <= schedule.total
        if span.task.device:
            held.setdefault(turns[span.task.device], []).append((span.began, span.ended))
    for spans in held.values():
        assert all(before[1] <= after[0] for before, after in pairwise(sorted(spans))), (
            "one turn at a time"
        )
    assert all(schedule.busy(device) <= schedule.total for device in turns)
    if not swap and not handover:
        assert schedule.total <= sum(
            simulate_runs({"a": in_turn(tasks)}).total for tasks in each
        ), "sharing is free, then"


@pytest.mark.parametrize(("share", "value"), [(0.95, 19), (0.96, 20), (0.5, 10), (0.0, 1)])
def test_percentiles_are_values(share: float, value: int) -> None:
    assert compute_percentile(range(20, 0, -1), share) == value
