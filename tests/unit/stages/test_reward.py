"""Rollouts are judged, what could not be judged is typed, and too much of that stops the run."""

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import Retryable, UserError
from tuneloop.rewards.scoring import Outcome
from tuneloop.stages.reward import reward, summarize_rewards

BY_NAME = {"tests.unit.rewards.bad:by_name": 1.0}


def rollouts(path: Path, completions: list[str], spec: dict[str, float] | None = None) -> str:
    """Rollouts of prompts with the answer 42, four samples each."""
    columns: dict[str, Any] = {
        "request_id": [f"i000000-p{i // 4:05d}-s{i % 4:02d}" for i in range(len(completions))],
        "group": [f"p{i // 4}" for i in range(len(completions))],
        "completion_ids": [[i] for i in range(len(completions))],
        "completion": completions,
        "answer": ["42"] * len(completions),
        "reward_spec": [json.dumps(spec or {"exact": 1.0})] * len(completions),
        "metadata": ["{}"] * len(completions),
    }
    draft = Draft(str(path))
    pq.write_table(pa.table(columns), draft.path / "rollouts.parquet")
    draft.commit(stage="rollout", facts={"version": 3, "digest": "d"})
    return str(path)


def test_scores_facts_and_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuneloop.stages.reward.ROWS", 3)
    given = rollouts(tmp_path / "r", ["42", "41", " 42", "", "1", "2", "3", "4"])
    manifest = reward(out=str(tmp_path / "w"), rollouts=given)
    root = Artifact(str(tmp_path / "w")).path
    table = pq.read_table(root / "rewards.parquet")
    assert pq.ParquetFile(root / "rewards.parquet").num_row_groups == 3
    before = pq.read_table(Artifact(given).path / "rollouts.parquet")
    assert table.select(before.column_names).equals(before)
    assert table["score"].to_pylist() == [1, 0, 1, 0, 0, 0, 0, 0]
    assert table["score"].type == pa.float32()
    assert set(table["outcome"].to_pylist()) == {"score"}
    assert json.loads(table["breakdown"][0].as_py()) == {"exact": 1.0}
    assert manifest.results == {"mean_reward": 0.25}
    assert manifest.facts["version"] == 3 and manifest.facts["digest"] == "d"
    assert manifest.facts["reward"] == {
        "mean": 0.25,
        "std": pytest.approx(math.sqrt(0.1875)),
        "solved": 0.25,
        "outcomes": {"score": 8, "timeout": 0, "infra_error": 0, "unverifiable": 0, "escape": 0},
        "breakdown": {"exact": 0.25},
        "zero_variance": 0.5,
    }
    (line,) = (root / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "step": 3, "mean": 0.25, "std": pytest.approx(math.sqrt(0.1875)), "solved": 0.25, "zero_variance": 0.5
    }  # fmt: skip


def test_failures_within_the_budget_are_no_scores(tmp_path: Path) -> None:
    given = rollouts(tmp_path / "r", ["fine"] * 6 + ["raises", "hangs"], BY_NAME)
    manifest = reward(out=str(tmp_path / "w"), rollouts=given, timeout_s=1.0, error_budget=0.25)
    table = pq.read_table(Artifact(str(tmp_path / "w")).path / "rewards.parquet")
    assert table["outcome"].to_pylist() == ["score"] * 6 + ["infra_error", "timeout"]
    assert table["score"].to_pylist() == [1.0] * 6 + [None] * 2
    assert manifest.results["mean_reward"] == 1.0  # failures are not zeros
    assert manifest.facts["reward"]["outcomes"] == {
        "score": 6,
        "timeout": 1,
        "infra_error": 1,
        "unverifiable": 0,
        "escape": 0,
    }


def test_more_failures_than_the_budget_stop_the_run(tmp_path: Path) -> None:
    given = rollouts(tmp_path / "r", ["fine"] * 5 + ["raises", "raises", "hangs"], BY_NAME)
    with pytest.raises(Retryable) as caught:
        reward(out=str(tmp_path / "w"), rollouts=given, timeout_s=1.0, error_budget=0.25)
    assert "3 of 8 completions have no score" in str(caught.value)
    assert "2 × tests.unit.rewards.bad:by_name: raised RuntimeError: no luck (bad.py:" in str(
        caught.value
    )
    assert "the budget is 25%" in str(caught.value)
    assert not (tmp_path / "w" / "manifest.json").exists()


def test_a_reward_that_raises_by_itself_is_not_tried_again(tmp_path: Path) -> None:
    given = rollouts(tmp_path / "r", ["fine"] * 5 + ["raises", "raises", "hangs"], BY_NAME)
    with pytest.raises(
        UserError,
        match=r"2 × tests.unit.rewards.bad:by_name: raised RuntimeError: no luck \(bad.py:\d+",
    ):
        reward(out=str(tmp_path / "w"), rollouts=given, timeout_s=1.0, error_budget=0.2)


def test_what_no_retry_can_mend_is_the_users(tmp_path: Path) -> None:
    given = rollouts(tmp_path / "r", ["fine"] * 4, {"format": 1.0})
    with pytest.raises(
        UserError,
        match=r"4 of 4 completions have no score.*format: could not judge it; correct the data",
    ):
        reward(out=str(tmp_path / "w"), rollouts=given)
    with pytest.raises(UserError, match="4 of 4"):  # nothing to learn from, whatever the budget
        reward(out=str(tmp_path / "w"), rollouts=given, error_budget=1.0)


def test_other_rewards_than_the_rows_own(tmp_path: Path) -> None:
    given = rollouts(tmp_path / "r", ["42", "x"], {"none-such": 1.0})
    spec = {"exact": 2.0, "tests.unit.rewards.bad:good": 1.0}
    manifest = reward(out=str(tmp_path / "w"), rollouts=given, reward_weights=spec, workers=2)
    assert manifest.results["mean_reward"] == pytest.approx((2.2 + 0.1) / 2)
    assert manifest.facts["reward"]["breakdown"] == {
        "exact": 0.5,
        "tests.unit.rewards.bad:good": pytest.approx(0.15),
    }
    assert manifest.facts["reward"]["solved"] == 0.0  # full marks would be 4


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"reward_weights": {"exactly": 1.0}}, "reward_weights.exactly: 'exactly': unknown"),
        ({"reward_weights": {"exact": math.inf}}, "rewards.exact: inf: must be a finite number"),
        ({"timeout_s": 0}, "reward.timeout_s"),
        ({"error_budget": 1.1}, "reward.error_budget"),
        ({"workers": 0}, "reward.workers"),
    ],
)
def test_bad_parameters(tmp_path: Path, params: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        reward(out=str(tmp_path / "w"), rollouts=rollouts(tmp_path / "r", ["42"]), **params)


def test_bad_inputs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rollouts\.parquet': has no rows"):
        reward(out=str(tmp_path / "w"), rollouts=rollouts(tmp_path / "r", []))
    draft = Draft(str(tmp_path / "other"))
    draft.commit(stage="data_prep")
    with pytest.raises(UserError, match=r"holds no rollouts\.parquet"):
        reward(out=str(tmp_path / "w"), rollouts=str(tmp_path / "other"))


def test_groups_with_failures_count_by_their_scores() -> None:
    rows = [{"group": group, "reward_spec": '{"exact": 1.0}'} for group in "aaabb"]
    lost = Outcome("timeout", None, {"exact": "slow"})
    outcomes = [lost, *(Outcome("score", s, {"exact": s}) for s in (1.0, 1.0, 0.0, 1.0))]
    facts = summarize_rewards(rows, outcomes)
    assert (facts["zero_variance"], facts["mean"], facts["solved"]) == (0.5, 0.75, 0.75)
