"""Two ranks under torchrun: the exit code of a rank is the exit code of the stage. 75 is tested in test_training."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.making import checkpoint_artifact, prompts_artifact
from tests.waiting import LIMIT_S, until
from tests.warm import forked, python
from tuneloop.stages.sft import sft

pytestmark = [pytest.mark.local, pytest.mark.slow]


def start(work: Path, **arguments: object) -> "subprocess.Popen[str]":
    base, prompts = checkpoint_artifact(work / "base"), prompts_artifact(work / "prompts")
    words = [python(), *sft.command(2)[1:], "--policy", base.ref, "--prompts", prompts.ref]
    words += ["--checkpoint", str(work / "out"), "--device", "cpu"]
    words += [
        word
        for name, value in arguments.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    return subprocess.Popen(words, text=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def begun(work: Path, child: "subprocess.Popen[str]") -> None:
    until(lambda: any((work / "out").glob("data-*/metrics.jsonl")), 2 * LIMIT_S, child)


def test_a_mistake_is_2_and_one_line(tmp_path: Path) -> None:
    child = start(tmp_path, expected_world_size=3)
    said = child.communicate(timeout=2 * LIMIT_S)[1]
    assert child.returncode == 2, said
    # Which rank says it first is not known: the launcher ends the others.
    mistake = "--expected-world-size: 3: 2 processes are training; fix the launcher"
    assert re.search(rf"^error: (rank 1: )?{re.escape(mistake)}$", said, re.M), said
    assert "Traceback" not in said


def test_a_rank_that_is_killed_is_137_and_the_other_says_why_it_ended(tmp_path: Path) -> None:
    child = start(tmp_path, max_steps=100000)
    begun(tmp_path, child)
    launcher = forked(child.pid)
    ranks = [int(p) for p in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()]
    second = next(p for p in ranks if b"\0RANK=1\0" in Path(f"/proc/{p}/environ").read_bytes())
    os.kill(second, signal.SIGKILL)
    said = child.communicate(timeout=2 * LIMIT_S)[1]
    assert child.returncode == 137, said
    assert "another process of this stage has ended" in said
