"""Seconds an iteration over a slow line to the store: state written before the next rollout, and beside it.

    python benchmarks/state_overlap.py [--layers 11 --hidden 512] [--mb-per-s 200] [--iterations 6]

The loop of `benchmarks/store_bytes.py` in one process, as a pod runs it, with its S3, whose line all requests share.
An iteration is from one rollout's start to the next one's; the first, which has no state before it, does not count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from store_bytes import make_model, run_loop, serve_s3

from tuneloop.core.background import BACKGROUND
from tuneloop.stages.rollout import rollout
from tuneloop.training.resident import RESIDENT


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=11)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--mb-per-s", type=float, default=200.0)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--completions", type=int, default=8, help="of each of four prompts")
    parser.add_argument("--tokens", type=int, default=32, help="of a completion")
    flags = parser.parse_args()
    took: dict[str, float] = {}
    starts: list[float] = []

    def measure(name: str, stage: Any, **given: Any) -> None:
        if stage is rollout:
            given |= {"n": flags.completions, "max_tokens": flags.tokens}
        start = time.perf_counter()
        starts.extend([start] if stage is rollout else [])
        stage(**given)
        kind = name.partition(" ")[0]
        took[kind] = took.get(kind, 0.0) + time.perf_counter() - start

    with tempfile.TemporaryDirectory() as scratch, serve_s3(Path(scratch) / "objects") as server:
        model = make_model(Path(scratch), flags.layers, flags.hidden)
        for beside in (False, True, False, True):
            RESIDENT.options, BACKGROUND.beside = None, beside
            os.environ["TUNELOOP_CACHE"] = f"{scratch}/cache-{len(starts)}-{beside}"
            took.clear()
            starts.clear()
            server.bytes_per_s = flags.mb_per_s * 1e6
            run_loop("s3://bucket/run", model, measure, flags.iterations)
            BACKGROUND.wait()
            for key in server.keys("bucket/run"):
                server.path(key).unlink()
            each = [round(b - a, 2) for a, b in pairwise(starts)][1:]
            stages = ", ".join(f"{name} {took[name] / flags.iterations:.2f}" for name in ("rollout", "policy_update"))
            when = "beside the next rollout" if beside else "before the next rollout"
            print(f"{when}: median {statistics.median(each):.2f} s an iteration {each}, mean of {stages}", flush=True)


if __name__ == "__main__":
    main()
