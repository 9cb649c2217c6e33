"""Runs of the whole pipeline for tests: small settings, the deterministic engine, killed at will."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.waiting import LIMIT_S, until
from tuneloop.core.artifacts import Artifact
from tuneloop.local import journal

SMALL = {
    "engine.kind": "transformers",
    "data.train": 64,
    "data.eval": 16,
    "data.sft": 64,
    "data.source_args.digits": 2,
    "sft.max_steps": 30,
    "sft.save_steps": 10,
    "trainer.per_device_train_batch_size": 16,
    "rollout.prompts_per_iteration": 4,
    "rollout.n": 4,
    "loop.iterations": 3,
    "loop.iterations_per_pod": 0,
    "loop.target_reward": 2,
}


def command(verb: str, *words: str, store: Path, **settings: object) -> list[str]:
    """`tuneloop <verb> …` with the small settings where the verb takes settings; None leaves one out."""
    line = [sys.executable, "-m", "tuneloop.cli", verb, *words, "--store", str(store)]
    if verb in ("run", "resume"):
        line.append("--no-track")
    if verb == "run":
        line += [f"--set={k}={v}" for k, v in {**SMALL, **settings}.items() if v is not None]
    return line


def finish(line: list[str], code: int = 0, timeout: float = 10 * LIMIT_S) -> str:
    """Run to the end and return what was printed."""
    done = subprocess.run(
        line, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout
    )
    assert done.returncode == code, done.stdout[-4000:]
    return done.stdout


def kill_when(line: list[str], workdir: Path, node: str, happened: Callable[[], bool]) -> str:
    """Start, wait until the node has begun and something `happened`, SIGKILL everything; the phase it was killed in."""
    child = subprocess.Popen(
        line, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def reached() -> str | None:
        now = phase(workdir, node, child)
        return now if now == "finished" or (now and happened()) else None

    try:
        return until(reached, 5 * LIMIT_S) or ""
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def phase(workdir: Path, node: str, child: "subprocess.Popen[bytes]") -> str | None:
    """The node's phase in the session of `child`, once it has started there."""
    if child.poll() is not None:
        return "finished"
    found = journal.read_state(workdir)
    if (
        found is None
        or not found.alive
        or found.workflow.phase != "Running"
        or node not in found.nodes
    ):
        return None
    return found.nodes[node].phase


def digests(store: Path, run: str) -> dict[str, str]:
    """Artifact → digest, of all that the run committed but trainers' states, which a kill may leave out."""
    manifests = sorted(m for m in (store / run).rglob("manifest.json") if m.parent.name != "state")
    return {
        str(m.parent.relative_to(store / run)): Artifact(str(m.parent)).manifest.digest
        for m in manifests
    }
