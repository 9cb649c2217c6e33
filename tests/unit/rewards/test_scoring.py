"""One bad call costs its own row only, whatever it does; good ones are weighted sums."""

import functools
import gc
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.rewards import bad
from tests.waiting import until
from tuneloop.core.errors import UserError
from tuneloop.rewards import exact
from tuneloop.rewards.scoring import Outcome, compute_full_marks, find_reward, parse_spec, score_all

BAD = "tests.unit.rewards.bad"


def row(completion: str, answer: str = "42", spec: Any = None, **metadata: Any) -> dict[str, str]:
    reward = json.dumps(spec or {"exact": 1.0})
    return {
        "completion": completion,
        "answer": answer,
        "reward_spec": reward,
        "metadata": json.dumps(metadata),
    }


def children() -> set[str]:
    """Processes that this one has started and not yet buried."""
    return {
        pid
        for path in Path("/proc/self/task").glob("*/children")
        for pid in path.read_text().split()
    }


def dead(pid: str) -> bool:
    try:
        return "zombie" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_weighted_sum_with_breakdown() -> None:
    spec = {"exact": 2.0, f"{BAD}:good": -0.5}
    right, wrong = score_all([row(" 42\n", spec=spec), row("4", spec=spec)], timeout_s=5)
    assert right == Outcome("score", 2.0 - 0.5 * 0.4, {"exact": 1.0, f"{BAD}:good": 0.4})
    assert wrong == Outcome("score", -0.05, {"exact": 0.0, f"{BAD}:good": 0.1})


@pytest.mark.parametrize(
    ("deed", "outcome", "story"),
    [
        ("raises", "infra_error", "raised RuntimeError: no luck (bad.py:28)"),
        ("exits", "infra_error", "raised SystemExit: 0 (bad.py:32)"),
        ("unprintable", "score", "crash"),
        ("dies", "score", "crash"),
        ("crashes", "score", "crash"),
        ("hangs", "timeout", "took more than 1 s"),
        ("hangs_in_c", "score", "timeout"),
        ("starts_what_computes", "score", "timeout"),
        ("grows", "score", "crash"),
        ("says_nan", "infra_error", "returned nan, outside its RANGE [0, 2]"),
        ("says_inf", "infra_error", "returned inf, outside its RANGE [0, 2]"),
        ("too_much", "infra_error", "returned 2.5, outside its RANGE [0, 2]"),
        ("text", "infra_error", "returned str, not a number"),
        ("nothing", "unverifiable", "could not judge it"),
    ],
)
@pytest.mark.parametrize("workers", [1, 3])
def test_a_bad_call_costs_its_own_row_only(
    deed: str, outcome: str, story: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # On a machine that is busy with much else, a call gets its second of a processor late.
    monkeypatch.setattr("tuneloop.rewards.workers.PATIENCE", 200)
    name = f"{BAD}:by_name"
    rows = [row(deed if i in (2, 5) else "fine", spec={"exact": 1.0, name: 1.0}) for i in range(6)]
    slow = story == "timeout" or story.startswith("took")
    outcomes = score_all(rows, timeout_s=1.0 if slow else 30.0, workers=workers, memory=1 << 30)
    fine = Outcome("score", 1.0, {"exact": 0.0, name: 1.0})
    bad = Outcome(outcome, None, {"exact": 0.0, name: story})  # type: ignore[arg-type]
    if outcome == "score":
        bad = Outcome("score", 0.0, {"exact": 0.0, name: 0.0, f"{name}.{story}": 1.0})
    assert outcomes == [fine, fine, bad, fine, fine, bad]


@pytest.mark.parametrize(
    ("deed", "outcome"), [("crashes", "infra_error"), ("hangs_in_c", "timeout")]
)
def test_what_ends_its_call_has_no_score_where_it_is_not_to_be_punished(
    deed: str, outcome: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tuneloop.rewards.workers.PATIENCE", 200)
    rows = [row(deed, spec={f"{BAD}:by_name": 1.0}), row("fine", spec={f"{BAD}:by_name": 1.0})]
    assert [o.outcome for o in score_all(rows, timeout_s=1.0, punish=False)] == [outcome, "score"]


def test_what_a_reward_keeps_costs_no_other_completion() -> None:
    """The memory of a process is that of all its calls: the one that goes beyond it is judged again in another."""
    outcomes = score_all(
        [row("fine", spec={f"{BAD}:keeps": 1.0})] * 6, timeout_s=30.0, memory=1 << 28
    )
    assert [outcome.score for outcome in outcomes] == [1.0] * 6


def test_a_process_that_cannot_begin_is_its_hosts_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.times", lambda: 1 / 0)
    assert {
        o.outcome for o in score_all([row("fine", spec={f"{BAD}:good": 1.0})] * 2, timeout_s=30.0)
    } == {"infra_error"}


def test_a_range_without_an_end_has_no_least_score() -> None:
    (ended,) = score_all([row("", spec={f"{BAD}:crashes_below_zero": 1.0})], timeout_s=30.0)
    assert (ended.outcome, ended.score) == ("infra_error", None)


def test_the_least_score_is_what_the_weight_disfavours() -> None:
    (ended,) = score_all([row("crashes", spec={f"{BAD}:by_name": -0.5})], timeout_s=30.0)
    assert ended.score == -1.0


def test_what_a_reward_leaves_behind_does_not_hit_the_next(tmp_path: Path) -> None:
    spec = {f"{BAD}:leaves_an_alarm": 1.0}
    rows = [*(row("", spec=spec) for _ in range(3)), row("hangs", spec={f"{BAD}:hangs": 1.0})]
    outcomes = score_all(rows, timeout_s=1.0)
    assert [o.outcome for o in outcomes] == ["score", "score", "score", "timeout"]
    pid = tmp_path / "pid"
    assert (
        score_all([row("", str(pid), {f"{BAD}:leaves_a_child": 1.0})], timeout_s=5)[0].score == 1.0
    )
    until(lambda: dead(pid.read_text()))


def test_a_hanging_reward_dies_with_the_stage(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys
sys.path.insert(0, {os.getcwd()!r})
from tuneloop.rewards import scoring
rows = [dict(completion="", answer={str(tmp_path / "pid")!r}, metadata="", reward_spec='{{"{BAD}:says_its_pid": 1}}')]
scoring.score_all(rows, timeout_s=60)
"""
    stage = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    pid = (tmp_path / "pid").read_text()
    stage.kill()
    stage.wait()
    until(lambda: dead(pid))


def test_metadata_that_is_no_json_costs_its_own_row() -> None:
    broken, fine = score_all(
        [{**row("42"), "metadata": "{"}, {**row("42"), "metadata": ""}], timeout_s=5
    )
    assert broken.outcome == "infra_error" and "JSONDecodeError" in str(broken.breakdown["exact"])
    assert fine.score == 1.0


def test_many_calls_take_few_processes_and_leave_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [row("42", spec={"exact": 1.0, f"{BAD}:good": 1.0})] * 128
    gc.collect()  # what earlier tests left open is not to be closed in between
    open_before = len(os.listdir("/proc/self/fd"))
    children_before = children()
    fork, forked = os.fork, []
    monkeypatch.setattr(os, "fork", lambda: forked.append(0) or fork())
    assert {outcome.score for outcome in score_all(rows, timeout_s=30, workers=2)} == {1.2}
    assert len(forked) == 2, "a process a worker, not a call"
    assert score_all([row("42")], timeout_s=30)[0].score == 1.0
    assert len(forked) == 2, "a trusted reward needs none"
    assert len(os.listdir("/proc/self/fd")) == open_before
    assert children() == children_before


def test_progress_counts_calls_and_can_stop() -> None:
    seen: list[int] = []
    score_all(
        [row("42", spec={"exact": 1.0, f"{BAD}:good": 1.0})] * 5, timeout_s=5, progress=seen.append
    )
    assert seen == sorted(seen) and seen[-1] == 10

    def stop(done: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        score_all([row("hangs", spec={f"{BAD}:by_name": 1.0})], timeout_s=0.2, progress=stop)
    with pytest.raises(ChildProcessError):  # the worker is gone
        os.waitpid(-1, os.WNOHANG)


def test_nothing_to_score() -> None:
    assert score_all([], timeout_s=1) == []


@pytest.mark.parametrize(
    ("spec", "field", "remedy"),
    [
        ({"exactly": 1.0}, "rewards", "unknown; known: choice, code, environment, exact"),
        ({"no.such.module:fn": 1.0}, "rewards", "cannot be imported"),
        ({f"{BAD}:missing": 1.0}, "rewards", "cannot be imported"),
        ({f"{BAD}:NOT_CALLABLE": 1.0}, "rewards", "has no function score"),
        ({"exact": math.inf}, "rewards.exact", "must be a finite number"),
        ({"exact": "1"}, "rewards.exact", "must be a finite number"),
        ({"exact": True}, "rewards.exact", "must be a finite number"),
        ({"exact": 10**400}, "rewards.exact", "must be a finite number"),
        ([], "rewards", "must name at least one reward"),
        ("exact", "rewards", "must name at least one reward"),
    ],
)
def test_specs_are_checked_before_anything_is_scored(spec: Any, field: str, remedy: str) -> None:
    text = json.dumps(spec)
    with pytest.raises(UserError, match=remedy) as caught:
        score_all([{**row("42"), "reward_spec": text}], timeout_s=5)
    assert caught.value.field == field


def test_malformed_spec() -> None:
    with pytest.raises(UserError, match="must name at least one reward"):
        parse_spec("{")


def test_full_marks_take_the_end_that_the_weight_favours() -> None:
    assert compute_full_marks({"exact": 2.0, "length_penalty": 0.5}) == 2.0
    assert compute_full_marks({"exact": -1.0, f"{BAD}:good": 1.0}) == 2.0
    assert find_reward(f"{BAD}:good").high == 2.0


@settings(max_examples=20, deadline=None)
@given(
    weights=st.lists(st.floats(-10, 10), min_size=1, max_size=3),
    completions=st.lists(st.text(max_size=10), min_size=1, max_size=5),
    workers=st.integers(1, 3),
)
def test_scores_are_the_weighted_sums_in_order(
    weights: list[float], completions: list[str], workers: int
) -> None:
    spec = dict(zip(("exact", f"{BAD}:good", f"{BAD}:by_name"), weights))
    outcomes = score_all(
        [row(text, spec=spec) for text in completions], timeout_s=5, workers=workers
    )
    for text, outcome in zip(completions, outcomes):
        assert outcome.breakdown[next(iter(spec))] == float(text.strip() == "42")
        assert outcome.score == math.fsum(
            spec[name] * float(outcome.breakdown[name]) for name in spec
        )


def test_what_wraps_a_trusted_reward_is_not_trusted_by_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may do anything besides, and has a process of its own."""
    monkeypatch.setattr(
        bad,
        "wrapped",
        functools.wraps(exact.score)(lambda *given: exact.score(*given)),
        raising=False,
    )
    find_reward.cache_clear()
    assert find_reward("exact").trusted and not find_reward(f"{BAD}:wrapped").trusted
    find_reward.cache_clear()


def test_progress_of_trusted_rewards_comes_to_the_end() -> None:
    seen: list[int] = []
    score_all([row("42")] * 1005, timeout_s=5, progress=seen.append)
    assert seen == [1000, 1005]
