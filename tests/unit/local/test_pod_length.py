"""How many iterations a pod runs that is told no number."""

import json
import os
import time
from pathlib import Path

import pytest

from tuneloop.core.artifacts import Draft
from tuneloop.local.iterations import RECORDS, PodLength
from tuneloop.workflow.pod_loop import BEARABLE, count_iterations


@pytest.mark.parametrize(
    ("lost_s", "iteration_s", "count"), [(26, 22, 11), (26, 0.42, 558), (1, 9, 1), (0, 1, 1)]
)
def test_the_fewest_iterations_that_make_what_a_pod_costs_a_tenth(
    lost_s: float, iteration_s: float, count: int
) -> None:
    assert count_iterations(lost_s, iteration_s) == count
    assert lost_s <= BEARABLE * (lost_s + count * iteration_s)
    assert count == 1 or lost_s > BEARABLE * (lost_s + (count - 1) * iteration_s)


def commit(run: Path, place: str, at: float) -> None:
    """Commit an artifact of a run at a time, Unix seconds."""
    Draft(f"{run}/{place}", attempt="data-test").commit(stage="toy")
    os.utime(run / place / "manifest.json", (at, at))


def test_what_a_pod_costs_is_the_time_before_it_and_what_its_first_iteration_takes_longer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commit(tmp_path, "sft", time.time() + 1e6)  # the store's clock is ahead: no time has gone by
    length = PodLength(str(tmp_path), 1)
    assert length.choose_last(1, 5.0, 60) is None, "the first imports libraries"
    assert length.choose_last(2, 2.0, 60) == 14  # 9 × 3 / 2
    line = "pod 1 runs 14 iterations: 0 s between pods, 3 s start, 2 s each"
    assert capsys.readouterr().err.splitlines() == [line]
    for seconds, last in (
        (5.0, 2),
        (0.001, 60),
    ):  # a first iteration that is no longer; one that is far longer
        length = PodLength(str(tmp_path), 1)
        length.choose_last(1, 5.0, 60)
        assert length.choose_last(2, seconds, 60) == last
    assert PodLength(str(tmp_path), 60).choose_last(60, 5.0, 60) == 60, (
        "there is no second one in this workflow"
    )
    assert [each["pod"] for each in json.loads((tmp_path / RECORDS).read_text())] == [1, 2, 3, 4]


def test_of_the_time_between_pods_the_least_counts(tmp_path: Path) -> None:
    """The second pod was waited for by 10 s, the third, of a run that was stopped meanwhile, by days."""
    for first, gap_s in ((1, 100), (13, 10), (25, 1e6)):
        commit(
            tmp_path,
            f"iterations/{first - 1}/policy-update" if first > 1 else "sft",
            time.time() - gap_s,
        )
        length = PodLength(str(tmp_path), first)
        length.choose_last(first, 10.0, 10**9)
        length.choose_last(first + 1, 10.0, 10**9)
    records = json.loads((tmp_path / RECORDS).read_text())
    assert [each["gap_s"] >= gap_s for each, gap_s in zip(records, (100, 10, 1e6))] == [True] * 3
    assert [each["between_s"] for each in records] == [records[i]["gap_s"] for i in (0, 1, 1)]
    assert [each["iterations"] for each in records[1:]] == [
        count_iterations(records[1]["gap_s"], 10.0)
    ] * 2
