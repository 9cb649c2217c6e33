"""A line of real runs: each begins with the last good result, and a bad one is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S
from tuneloop.core.artifacts import Artifact
from tuneloop.core.store import Store
from tuneloop.formats.promotions import read_history
from tuneloop.runs.promotions import promote_result
from tuneloop.runs.run_record import Run

pytestmark = [pytest.mark.local, pytest.mark.slow]
SETTINGS = [
    "data.train=64",
    "data.eval=16",
    "data.sft=64",
    "data.source_args.digits=2",
    "data.source_args.sft_wrong_share=0.0",
]


def train(store: Path, run: str, *sets: str) -> None:
    words = ["run", "sft", "--run", run, "--store", str(store), "--no-track"]
    settings = [f"--set={item}" for item in [*SETTINGS, *sets]]
    command = [sys.executable, "-m", "tuneloop.cli", *words, *settings]
    result = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stdout + result.stderr


def read_reward(store: Path, run: str, stage: str) -> float:
    return float(Artifact(f"{store}/{run}/{stage}").manifest.results["mean_reward"])


def test_three_nights(tmp_path: Path) -> None:
    """As the ticks of a schedule with `--promote` do it, on this machine."""
    train(tmp_path, "monday", "sft.max_steps=120")
    learned = read_reward(tmp_path, "monday", "evaluate-after")
    assert learned > read_reward(tmp_path, "monday", "evaluate-before")
    monday = Run("monday", str(tmp_path))
    assert promote_result(monday, "nightly", {}).startswith("promoted: monday: mean_reward")
    # The next one begins with what the last one has learned, and forgets it.
    base = "base_model=run://nightly@promoted"
    train(tmp_path, "tuesday", base, "sft.max_steps=5", "sft.learning_rate=1.0")
    assert read_reward(tmp_path, "tuesday", "evaluate-before") == learned
    model = Artifact(f"{tmp_path}/tuesday/base-model").manifest.params["model"]
    assert model == Artifact(f"{tmp_path}/monday/sft").ref
    assert read_reward(tmp_path, "tuesday", "evaluate-after") < learned
    tuesday = Run("tuesday", str(tmp_path))
    said = promote_result(tuesday, "nightly", {})
    assert said.startswith("not promoted: tuesday: ") and "is not reached by evaluate-after" in said
    # The one after that begins where the good one ended.
    train(tmp_path, "wednesday", base, "sft.max_steps=5", "sft.learning_rate=1e-6")
    assert Artifact(f"{tmp_path}/wednesday/base-model").manifest.params["model"] == model
    assert read_reward(tmp_path, "wednesday", "evaluate-before") == learned
    history, _ = read_history(Store(str(tmp_path)))
    assert [item["run"] for item in history] == ["monday"]
