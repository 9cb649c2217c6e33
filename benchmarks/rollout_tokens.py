"""Tokens per second of the rollout stage over its server, beside bare vLLM in process.

The same requests: prompts of the digits task, a tiny model, one seed a completion, log-probabilities of the sampled
tokens. Ours is `tuneloop.inference.server` in a process of its own and the stage `rollout` as its client: `generation`
is what the stage spends in it, `whole stage` adds reading, tokenizing, canary, Parquet and commit. Bare is `vllm.LLM`
in this process with the same arguments. The two take turns; medians. With `--deterministic` a second server, which is
so, takes its turn with the same requests.

    python benchmarks/rollout_tokens.py [--batches 4 32] [--n 8] [--max-tokens 64] [--repeat 3] [--deterministic]
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ARGS = {
    "max_model_len": 256,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 30,
    "dtype": "float32",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--batches", type=int, nargs="+", default=[4, 32], help="prompts in a batch"
    )
    parser.add_argument("--n", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument(
        "--deterministic", action="store_true", help="beside it, by a server that is deterministic"
    )
    flags = parser.parse_args()
    from tuneloop.stages.base_model import base_model
    from tuneloop.stages.data_prep import data_prep

    with tempfile.TemporaryDirectory() as work, ExitStack() as servers:
        data_prep(out=f"{work}/prompts", train=512, eval=8, sft=64)
        base_model(out=f"{work}/policy", prompts=f"{work}/prompts")
        bare = Bare(Path(work))
        kinds: list[dict[str, Any]] = [{}, {"deterministic": True}][: 1 + flags.deterministic]
        ours = [
            (servers.enter_context(server(f"{work}/policy", {**ARGS, **kind})), kind)
            for kind in kinds
        ]
        beside = (
            f" {'deterministic':>13} {'ratio':>6} {'whole stage':>12}"
            if flags.deterministic
            else ""
        )
        head = f"{'completions':>11} {'bare vLLM':>10} {'generation':>11} {'ratio':>6} {'whole stage':>12}{beside}"
        print(f"{head}   tok/s")
        for size in flags.batches:
            base, generation, whole, *other = median_rates(work, bare, ours, size, flags)
            line = f"{size * flags.n:>11} {base:>10.0f} {generation:>11.0f} {generation / base:>6.2f} {whole:>12.0f}"
            if other:
                line += f" {other[0]:>13.0f} {other[0] / generation:>6.2f} {other[1]:>12.0f}"
            print(line, flush=True)


def median_rates(
    work: str,
    bare: Bare,
    ours: list[tuple[str, dict[str, Any]]],
    size: int,
    flags: argparse.Namespace,
) -> list[float]:
    """Tokens per second: of bare vLLM, then of each server (URL and engine arguments) as `stage_rates` has them."""
    rates: list[list[float]] = []
    for turn in range(flags.repeat + 1):  # the first warms up
        asked = {
            "prompts_per_iteration": size,
            "n": flags.n,
            "max_tokens": flags.max_tokens,
            "iteration": turn,
        }
        outs = [f"{work}/rollouts/{size}-{turn}-{i}" for i in range(len(ours))]
        row = [
            rate
            for (url, kind), out in zip(ours, outs)
            for rate in stage_rates(work, url, out, {**asked, "engine_args": kind})
        ]
        rates.append([bare.rate(outs[0], flags.max_tokens), *row])
    return [statistics.median(column) for column in zip(*rates[1:])]


class Bare:
    """`vllm.LLM`, asked for the very completions that a committed rollout holds."""

    def __init__(self, work: Path) -> None:
        from vllm import LLM

        from tuneloop.core.artifacts import Artifact

        self.model = Artifact(f"{work}/policy").path / "model"
        fixed: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "skip_tokenizer_init": True}
        self.llm = LLM(str(self.model), use_tqdm_on_load=False, **fixed, **ARGS)

    def rate(self, rollouts: str, max_tokens: int) -> float:
        """Generated tokens per second for the prompts of a rollouts artifact."""
        import pyarrow.parquet as pq
        from vllm import SamplingParams

        from tuneloop.core.artifacts import Artifact
        from tuneloop.formats.tokens import load_tokenizer, stop_ids

        stops = list(stop_ids(load_tokenizer(self.model), self.model))
        rows = pq.read_table(Artifact(rollouts).path / "rollouts.parquet").to_pylist()
        prompts = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
        common: dict[str, Any] = {
            "max_tokens": max_tokens,
            "logprobs": 0,
            "detokenize": False,
            "flat_logprobs": True,
        }
        params = [
            SamplingParams(seed=i, temperature=1.0, stop_token_ids=stops, **common)
            for i in range(len(rows))
        ]
        began = time.perf_counter()
        made = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        return sum(len(out.outputs[0].token_ids) for out in made) / seconds


def stage_rates(work: str, url: str, out: str, asked: dict[str, Any]) -> tuple[float, float]:
    """Tokens per second of one rollout: inside generation, and of the whole stage."""
    from tuneloop.stages.rollout import rollout

    began = time.perf_counter()
    manifest = rollout(
        out=out, policy=f"{work}/policy", prompts=f"{work}/prompts", endpoint=url, **asked
    )
    seconds = time.perf_counter() - began
    tokens = manifest.results["completions"] * manifest.results["mean_length"]
    return manifest.timings["generated_tokens_per_s"], tokens / seconds


@contextmanager
def server(
    policy: str, args: dict[str, Any], stderr: int | None = subprocess.DEVNULL
) -> Iterator[str]:
    """A running `tuneloop.inference.server` with the engine arguments `args`; it is killed at the end."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    line = [
        sys.executable,
        "-m",
        "tuneloop.inference.server",
        "--policy",
        policy,
        "--host",
        "127.0.0.1",
    ]
    line += ["--port", str(port), "--engine-args", json.dumps(args)]
    process = subprocess.Popen(line, stderr=stderr)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the server did not start"
                time.sleep(0.2)
        yield url
    finally:
        process.kill()  # a suspended one would not hear SIGTERM
        process.wait()


if __name__ == "__main__":
    main()
