"""Each alarm is given by curves that show what it names, and by no healthy run."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tuneloop.runs.alarms import CHECKS
from tuneloop.runs.run_record import Curve, Run
from tuneloop.runs.summary import summarize_run


def told(**curves: Sequence[float]) -> list[str]:
    points = {name: [*enumerate(map(float, values), start=1)] for name, values in curves.items()}
    return [alarm for check in CHECKS if (alarm := check(points))]


HEALTHY = {
    "logprob_gap": [0.01, 0.02] * 10,
    "zero_variance": [0.3] * 20,
    "mean_length": [8.0] * 20,
    "entropy": [2.0 - 0.05 * i for i in range(20)],
    "clip_fraction": [0.1] * 20,
    "mean_reward": [0.3 + 0.02 * i for i in range(20)],
}


def test_a_healthy_run_gives_none() -> None:
    assert not told(**HEALTHY)
    assert not told()
    assert not told(**{name: values[:3] for name, values in HEALTHY.items()})


def test_noise_of_kernels_is_no_gap() -> None:
    assert not told(**{**HEALTHY, "logprob_gap": [1e-7] * 12 + [1.1e-6]})


@pytest.mark.parametrize(
    ("wrong", "alarm"),
    [
        (
            {"logprob_gap": [0.01] * 12 + [0.2]},
            "the engine's log-probabilities of its own tokens are ten times as far from the trainer's since "
            "iteration 13 (0.01 → 0.2 nats): they no longer compute the same policy",
        ),
        ({"zero_variance": [0.9] * 20}, "all rewards are equal in 90% of groups"),
        (
            {"mean_length": [10.0] * 10 + [40.0] * 10, "mean_reward": [0.5] * 20},
            "completions grew from 10 to 40 tokens, and the reward did not (0.500 → 0.500)",
        ),
        ({"entropy": [2.0] * 10 + [0.01] * 10}, "the entropy fell from 2 to 0.01 nats"),
        ({"clip_fraction": [0.7] * 20}, "70% of tokens are clipped"),
    ],
)
def test_what_is_wrong_is_said_with_its_number(wrong: dict[str, list[float]], alarm: str) -> None:
    (said,) = told(**{**HEALTHY, **wrong})
    assert said.startswith(alarm)


def test_a_solved_task_gives_none() -> None:
    solved = {
        "zero_variance": [1.0] * 20,
        "entropy": [2.0] * 10 + [0.01] * 10,
        "mean_reward": [0.5] * 10 + [1.0] * 10,
    }
    assert not told(**{**HEALTHY, **solved})


def test_the_summary_at_the_end_of_a_run_has_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Curve(
        "zero_variance", "policy-update", "trainer", "", "iteration", x=[1.0], y=[1.0], at=[0.0]
    )
    monkeypatch.setattr(Run, "curves", lambda self: [share])
    said = summarize_run(Run("a", str(tmp_path)))
    assert said.startswith("  alarms       all rewards are equal in 100% of groups: ")
