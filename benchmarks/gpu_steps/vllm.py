"""Whole loops with a vLLM server beside the trainer on one GPU, and what a server away leaves."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.gpu_steps.loop import read_iterations
from benchmarks.gpu_steps.records import Step, measure_seconds
from benchmarks.gpu_steps.training import write_model
from benchmarks.rollout_tokens import server
from tests.local.loops import digests
from tests.waiting import free_port
from tuneloop.core.artifacts import Artifact

SHORT = {"max_model_len": 256, "enforce_eager": True, "gpu_memory_utilization": 0.15}
LONGER = {
    "max_model_len": 1024,
    "enforce_eager": True,
    "gpu_memory_utilization": 0.5,
    "kv_cache_memory_bytes": 8 << 30,
}
QUICK = {"loop.target_reward": 2, "loop.iterations": 3, "loop.iterations_per_pod": 0}


def read_memory() -> float:
    """GiB in use on the GPU, by all processes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(output.split()[0]) / 1024


def choose_settings(args: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"engine.args": json.dumps(SHORT | args), "engine.port": free_port()} | more


@contextmanager
def started(
    verb: str, *words: str, store: Path, settings: dict[str, Any]
) -> Iterator[subprocess.Popen[str]]:
    """`tuneloop <verb> …`, which with all its stages and servers has ended afterwards."""
    line = [sys.executable, "-m", "tuneloop.cli", verb, *words, "--store", str(store), "--no-track"]
    line += [f"--set={name}={value}" for name, value in settings.items()]
    child = subprocess.Popen(
        line, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def finish(child: subprocess.Popen[str]) -> str:
    """Return what a command prints. Raises SystemExit: it fails."""
    output, _ = child.communicate()
    if child.returncode:
        raise SystemExit(f"exit code {child.returncode}: {output[-6000:]}")
    return output


def record_iterations(step: Step, run: str) -> None:
    for iteration in read_iterations(step.work / run):
        step.record(**iteration)


def run_loop(step: Step) -> None:
    settings = choose_settings({}, **{"loop.iterations": 40})
    start = time.perf_counter()
    with started(
        "run", "sft_then_grpo", "--run", "loop", store=step.work, settings=settings
    ) as child:
        output = finish(child)
    step.record(seconds=time.perf_counter() - start, output=output[-2500:])
    record_iterations(step, "loop")


def run_bits(step: Step) -> None:
    deterministic = QUICK | {"engine.deterministic": True}
    calm = choose_settings({}, **deterministic)
    killed = choose_settings({}, **deterministic)
    first = step.work / "killed" / "iterations" / "1" / "policy-update" / "manifest.json"
    line = ("run", "sft_then_grpo", "--run")
    with started(*line, "calm", store=step.work, settings=calm) as whole:
        with started(*line, "killed", store=step.work, settings=killed) as child:
            while not first.exists():
                if child.poll() is not None:
                    raise SystemExit(f"it ended before it could be killed: {finish(child)[-3000:]}")
                time.sleep(0.05)
            time.sleep(0.7)  # somewhere in the second iteration
        with started("resume", "killed", store=step.work, settings={}) as child:
            finish(child)
        finish(whole)
    ours = digests(step.work, "calm")
    theirs = digests(step.work, "killed")
    different = sorted(
        name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)
    )
    step.record(artifacts=len(ours), different=different)
    if different:
        raise SystemExit(f"different bits: {different}")


def watch_run(step: Step, run: str, settings: dict[str, Any]) -> None:
    """Run to the end, and record the GPU's memory in use meanwhile, twice a second."""
    memory: list[float] = []
    with started("run", "sft_then_grpo", "--run", run, store=step.work, settings=settings) as child:
        while child.poll() is None:
            memory.append(round(read_memory(), 1))
            time.sleep(0.5)
        finish(child)
    step.record(gib_in_use=memory)
    record_iterations(step, run)


def run_colocate(step: Step) -> None:
    watch_run(step, "colocate", choose_settings({}, **QUICK, **{"engine.colocate": True}))


def run_suspend(step: Step) -> None:
    settings = choose_settings(
        {"kv_cache_memory_bytes": 4 << 30}, **QUICK, **{"engine.snapshot": True}
    )
    watch_run(step, "suspend", settings)


def make_policy(step: Step) -> Artifact:
    from tuneloop.stages.base_model import base_model
    from tuneloop.stages.data_prep import data_prep

    work = step.work
    source = write_model(work / "model", step.small)
    data_prep(out=f"{work}/prompts", train=16, eval=8, sft=64)
    base_model(out=f"{work}/tiny", prompts=f"{work}/prompts")  # for its tokenizer
    for file in Artifact(f"{work}/tiny").part("model").iterdir():
        if not (source / file.name).exists() and file.suffix != ".safetensors":
            (source / file.name).write_bytes(file.read_bytes())
    base_model(out=f"{work}/policy", model=str(source))
    return Artifact(f"{work}/policy")


def run_server(step: Step) -> None:
    policy = make_policy(step)
    failures = 0
    for way in (
        {"enable_sleep_mode": True},
        {"snapshot": True},
        {"snapshot": True, "enable_sleep_mode": True},
    ):
        empty = read_memory()
        start = time.perf_counter()
        try:
            with server(policy.ref, LONGER | way, stderr=None) as url:
                step.record(way=way, start_s=time.perf_counter() - start, gib=read_memory() - empty)
                take_turns(step, url, policy, empty)
        except Exception as error:
            failures += 1
            step.record(way=way, error=f"{type(error).__name__}: {error}")
    if failures:
        raise SystemExit(1)


def take_turns(step: Step, url: str, policy: Artifact, empty: float) -> None:
    """Put a server to sleep and wake it, three times; `empty`: GiB in use on the GPU without it."""
    from tuneloop.formats.rollouts import Request
    from tuneloop.inference.engines import Sampling
    from tuneloop.inference.engines._client import Client

    client = Client(url, 120, sleeps=True, patience_s=0)
    rng = random.Random(1)
    requests = [
        Request(str(i), [rng.randrange(3, 150000) for _ in range(200)], [i]) for i in range(64)
    ]

    def sample() -> list[list[int]]:
        sampling = Sampling(max_tokens=64, temperature=1.0)
        completions = client.generate(requests, sampling, lambda done: None)
        return [list(group[0].ids) for group in completions]

    client.load(policy)
    expected = sample()
    for turn in range(3):
        away_s, _ = measure_seconds(client.close)
        left = read_memory() - empty
        back_s, _ = measure_seconds(lambda: client.load(policy))
        seconds, tokens = measure_seconds(sample)
        step.record(
            turn=turn,
            away_s=away_s,
            gib_left=left,
            back_s=back_s,
            gib=read_memory() - empty,
            tokens_per_s=sum(map(len, tokens)) / seconds,
        )
        if tokens != expected:
            raise SystemExit("it says other tokens than before")
    change_s, _ = measure_seconds(lambda: client.load(policy, force=True))
    step.record(weights_changed_in_place_s=change_s)
