"""Two runs of a small loop, one killed in its second iteration and resumed: the same bits."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from typing import Any

from benchmarks.gpu_steps.records import Step
from tests.local.loops import command, digests
from tuneloop.core.artifacts import Artifact


def start(line: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        line, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def finish(child: subprocess.Popen[str]) -> None:
    output, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"exit code {child.returncode}: {output[-3000:]}")


def run(step: Step) -> None:
    settings: dict[str, Any] = {"trainer.dtype": "bfloat16"}
    calm = start(command("run", "sft_then_grpo", "--run", "calm", store=step.work, **settings))
    killed = start(command("run", "sft_then_grpo", "--run", "killed", store=step.work, **settings))
    first = step.work / "killed" / "iterations" / "1" / "policy-update" / "manifest.json"
    while not first.exists():
        if killed.poll() is not None:
            finish(killed)
            raise SystemExit("the run ended before it could be killed")
        time.sleep(0.02)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    finish(start(command("resume", "killed", store=step.work)))
    finish(calm)
    ours = digests(step.work, "calm")
    theirs = digests(step.work, "killed")
    different = [name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)]
    update = Artifact(str(first.parent)).manifest
    step.record(
        artifacts=len(ours),
        different=sorted(different),
        device=update.notes["device"],
        attention=update.facts.get("attention"),
        packing=update.facts.get("packing"),
    )
    if different:
        raise SystemExit(f"different bits: {different}")
