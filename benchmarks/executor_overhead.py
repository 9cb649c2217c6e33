"""Seconds that the local executor adds to an iteration, beside the work of its stages, measured in one run.

An iteration is rollout, reward, policy_update. The work is what each stage's manifest says it took inside its function;
all the rest of the wall time is overhead: forking, opening and verifying inputs, committing, and the executor's own.

    python benchmarks/executor_overhead.py [--iterations 20]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tuneloop.core.artifacts import Artifact
from tuneloop.local import journal

STAGES = ("rollout", "reward", "policy-update")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=20)
    count = parser.parse_args().iterations
    with tempfile.TemporaryDirectory() as work:
        command = [
            sys.executable,
            "-m",
            "tuneloop.cli",
            "run",
            "sft_then_grpo",
            "--run",
            "b",
            "--store",
            work,
        ]
        settings = [
            "engine.kind=transformers",
            "sft.max_steps=60",
            f"loop.iterations={count}",
            "loop.target_reward=2",
        ]
        settings.append("loop.iterations_per_pod=0")
        flags = ["--no-track", *(f"--set={s}" for s in settings)]
        subprocess.run([*command, *flags], check=True, stdout=subprocess.DEVNULL)
        found = journal.read_state(Path(work, "b"))
        assert found is not None
        ends = sorted(
            n.finished
            for n in found.nodes.values()
            if n.type == "Pod" and n.template == "policy-update"
        )
        walls = [b - a for a, b in itertools.pairwise(ends)]
        works = [
            sum(
                Artifact(f"{work}/b/iterations/{i}/{stage}").manifest.timings["total"]
                for stage in STAGES
            )
            for i in range(2, len(ends) + 1)
        ]
    rows = {
        "wall": walls,
        "work of the stages": works,
        "overhead": [a - b for a, b in zip(walls, works, strict=True)],
    }
    print(
        f"{'seconds an iteration':<22} {'median':>8} {'min':>8} {'max':>8}   ({len(walls)} iterations, 3 stages each)"
    )
    for name, values in rows.items():
        print(
            f"{name:<22} {statistics.median(values):>8.3f} {min(values):>8.3f} {max(values):>8.3f}"
        )


if __name__ == "__main__":
    main()
