"""Seconds an iteration over a slow line to the store: state written before the next rollout, and beside it.

    python benchmarks/state_overlap.py [--layers 11 --hidden 512] [--mb-per-s 200] [--iterations 5]

The loop of `benchmarks/store_bytes.py` in one process, as a pod runs it, and its S3 in another, with a line of so many
MB/s in each direction. An iteration is from one rollout's start to the next one's; the first, which has no state before
it, does not count. Random completions are rewarded for ending in ASCII, which some do, so that updates take steps.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import statistics
import tempfile
import time
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from store_bytes import make_model, run_loop, serve_s3

from tuneloop.core.threads import BACKGROUND
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.rollout import rollout
from tuneloop.training.checkpoint import RESIDENT


def serve_store(directory: Path, mb_per_s: float, line: Connection) -> None:
    """Serve S3 until the other end of `line` is closed; send it the environment that names the server."""
    with serve_s3(directory) as server:
        server.bytes_per_s = mb_per_s * 1e6
        line.send({name: value for name, value in os.environ.items() if name.startswith("AWS_")})
        with contextlib.suppress(EOFError):
            line.recv()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--mb-per-s", type=float, default=200.0)
    parser.add_argument("--iterations", type=int, default=5)
    parser.add_argument("--completions", type=int, default=8, help="of each of four prompts")
    parser.add_argument("--tokens", type=int, default=128, help="of a completion")
    flags = parser.parse_args()
    took: dict[str, float] = {}
    starts: list[float] = []
    steps: list[int] = []

    def measure(name: str, stage: Any, **given: Any) -> None:
        if stage is rollout:
            given |= {"n": flags.completions, "max_tokens": flags.tokens}
        if stage is data_prep:
            given |= {"rewards": {"format": 1.0}, "reward_args": {"format": {"pattern": ".*[ -~]"}}}
        start = time.perf_counter()
        starts.extend([start] if stage is rollout else [])
        made = stage(**given)
        steps.append(made.facts.get("updates", 0))
        kind = name.partition(" ")[0]
        took[kind] = took.get(kind, 0.0) + time.perf_counter() - start

    with tempfile.TemporaryDirectory() as scratch:
        objects = Path(scratch) / "objects"
        context = multiprocessing.get_context("spawn")
        line, theirs = context.Pipe()
        context.Process(
            target=serve_store, args=(objects, flags.mb_per_s, theirs), daemon=True
        ).start()
        os.environ.update(line.recv())
        model = make_model(Path(scratch), flags.layers, flags.hidden)
        for number, beside in enumerate((False, True, False, True)):
            RESIDENT.options, BACKGROUND.is_concurrent = None, beside
            os.environ["TUNELOOP_CACHE"] = f"{scratch}/cache-{number}"
            took.clear()
            starts.clear()
            steps.clear()
            run_loop("s3://bucket/run", model, measure, flags.iterations)
            BACKGROUND.wait()
            for path in objects.iterdir():
                path.unlink()
            each = [round(b - a, 2) for a, b in pairwise(starts)][1:]
            stages = ", ".join(
                f"{name} {took[name] / flags.iterations:.2f}"
                for name in ("rollout", "policy_update")
            )
            when, median = "beside" if beside else "before", statistics.median(each)
            print(f"{when} the next rollout: median {median:.2f} s {each}; ", end="")
            print(f"mean of {stages}; {sum(steps)} steps", flush=True)


if __name__ == "__main__":
    main()
