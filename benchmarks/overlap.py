"""What sampling the next batch beside the update gains: seconds an iteration of the loop, in turn and overlapped.

    python benchmarks/overlap.py [--engine vllm] [--iterations 15]

One SFT checkpoint, then the same loop three times: in turn with all cores for each stage; in turn with one thread a
process; overlapped with one thread a process, so that one core samples while the other trains. Rollouts of the
overlapped loop are one version old. An iteration's seconds are the median over all but the first two, from the commit
of one update to that of the next. `busy` is how long its stages worked, laid end to end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from itertools import pairwise
from pathlib import Path

from algorithms import exported, run

LOOPS = {
    "in turn, all cores": (False, None),
    "in turn, 1 thread": (False, "1"),
    "overlapped, 1 thread": (True, "1"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", default="vllm", choices=("vllm", "transformers"))
    parser.add_argument("--iterations", type=int, default=15)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        store = Path(work)
        run(store, "sft", "sft", {})
        print(
            f"{'loop':<22} {'s/iteration':>11} {'busy':>6}   {flags.engine}, {os.cpu_count()} cores"
        )
        for number, (name, (overlapped, threads)) in enumerate(LOOPS.items()):
            if threads:
                os.environ["OMP_NUM_THREADS"] = threads
            settings = {
                **{
                    "base_model": exported(store, "sft"),
                    "engine.kind": flags.engine,
                    "loop.target_reward": 2,
                },
                **{"loop.iterations": flags.iterations, "loop.asynchronous": overlapped},
                "loop.iterations_per_pod": 0,
            }
            run(store, "grpo", f"loop-{number}", settings)
            show(store, f"loop-{number}", name)


def show(store: Path, run_name: str, name: str) -> None:
    from tuneloop.runs.run_record import Run

    found = Run.open(run_name, str(store))
    ends = [entry.finished for entry in found.with_role("trainer") if entry.iteration]
    each = statistics.median(after - before for before, after in pairwise(ends[1:]))
    busy = sum(
        found.seconds_an_iteration()[stage] for stage in ("rollout", "reward", "policy-update")
    )
    print(f"{name:<22} {each:>11.3f} {busy:>6.3f}", flush=True)


if __name__ == "__main__":
    main()
