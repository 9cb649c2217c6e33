"""The first hour with a file of one's own: what the terminal says, and how to talk to the model."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import LIMIT_S

pytestmark = [pytest.mark.local, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
COLOURS = ["red", "blue", "green", "black", "white", "yellow", "brown", "pink"]


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file in ShareGPT's form."""
    path = tmp_path_factory.mktemp("hour") / "chats.jsonl"
    lines: list[str] = []
    for number in range(24):
        colour = COLOURS[number % len(COLOURS)]
        turns = [
            {"from": "human", "value": f"What is the colour of ball {number}?"},
            {"from": "gpt", "value": f"Ball {number} is {colour}."},
        ]
        lines.append(json.dumps({"conversations": turns}))
    path.write_text("\n".join(lines))
    return path


def call(directory: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run a command in a directory, as a user does."""
    command = [sys.executable, "-m", "tuneloop.cli", *words]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}/components:{ROOT}",
        "OMP_NUM_THREADS": "1",
    }
    result = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def test_a_run_on_a_file_says_what_it_does_and_its_model_answers(
    smollm2: Path, chats: Path
) -> None:
    place = chats.parent
    settings = [
        f"base_model={smollm2}",
        f"data={chats}",
        "sft.max_steps=3",
        "sft.gradient_accumulation_steps=1",
        "sft.learning_rate=1e-5",
    ]
    sets = [word for setting in settings for word in ("--set", setting)]
    run = call(place, "run", "sft", "--run", "mine", "--no-track", *sets)
    recognised = "data-prep: recognised: ShareGPT; conversations from conversations"
    assert run.stdout.count(recognised) == 1
    assert run.stdout.count("data-prep: 23 demonstrations, 1 held out") == 1
    assert "train 0" not in run.stdout
    assert not re.search(r"\b0 s left", run.stdout)
    # The steps are few: the last one is shown with its loss, whenever the others were.
    assert "sft: 3/3 steps" in run.stdout
    assert "held-out loss " in run.stdout
    assert "caution: Only 1 held-out demonstration was measured" in run.stdout
    assert "note: sft.warmup_steps: 5: is no less than the 3 steps of sft.max_steps" in run.stderr

    status = json.loads(call(place, "status", "mine", "--json").stdout)
    assert status["held_out"]["demonstrations"] == 1
    assert status["held_out"]["loss_before"] > 0

    question = ["--prompt", "What is the capital of France?", "--max-tokens", "16"]
    base = call(place, "generate", "mine", "--version", "0", *question)
    assert base.stdout == "The capital of France is Paris.\n"
    answer = call(place, "generate", "mine", *question)
    assert answer.stdout.strip()
    versions = call(place, "weights", "ls", "mine").stdout
    assert "trainer state" in versions and "1 latest" in versions
    assert "mine: version 1 (export, sha256:" in answer.stderr
    explanation = call(place, "why", "mine")
    assert explanation.stderr.startswith("v1, the newest: it has the versions v0, v1")
    assert explanation.stdout.startswith("sft@sha256:")
