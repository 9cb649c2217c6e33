"""A whole GRPO loop of a pretrained model on sums: held-out reward, and that of each batch."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from benchmarks.gpu_steps.records import Step
from tuneloop.core.artifacts import Artifact

RUN = "sums"
SECONDS = 165.0
"""A run that is not over then is ended, and its last policy is evaluated."""
MAX_TOKENS = 24


def write_sums(path: Path, count: int) -> Path:
    """Write questions with their answers, of which the model gets a share right."""
    rng = random.Random(0)
    rows = []
    for first in range(2, 60):
        for second in range(2, 60):
            prompt = f"What is {first} + {second}? Answer with the number only."
            rows.append({"prompt": prompt, "answer": str(first + second)})
    rng.shuffle(rows)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:count]))
    return path


def list_settings(step: Step) -> dict[str, Any]:
    source = write_sums(step.work / "sums.jsonl", 128 if step.small else 4096)
    settings: dict[str, Any] = {
        "base_model": str(step.model),
        "data.source": "jsonl",
        "data.source_args": json.dumps({"train": str(source)}),
        "data.rewards": json.dumps({"numeric": 1.0}),
        "data.chat": True,
        "data.eval": 8 if step.small else 256,
        "data.train": 64 if step.small else 3000,
        "engine.kind": "transformers",
        "engine.args": json.dumps({"max_num_seqs": 512}),
        "rollout.prompts_per_iteration": 4 if step.small else 64,
        "rollout.n": 4 if step.small else 8,
        "rollout.max_tokens": MAX_TOKENS,
        "evaluate.max_tokens": MAX_TOKENS,
        "update.learning_rate": 3e-5,
        "update.warmup_steps": 0,
        "trainer.dtype": "bfloat16",
        "trainer.per_device_train_batch_size": 4 if step.small else 128,
        "loop.iterations": 1 if step.small else 14,
        "loop.target_reward": 2,
    }
    return settings


def run_until(step: Step, settings: dict[str, Any], seconds: float) -> tuple[str, int | None]:
    """Run the pipeline, end it after so many seconds, and return its output and exit code."""
    line = [sys.executable, "-m", "tuneloop.cli", "run", "grpo", "--run", RUN, "--no-track"]
    line += ["--store", str(step.work / "store")]
    line += [f"--set={name}={value}" for name, value in settings.items()]
    with (step.work / "log").open("w+") as log:
        child = subprocess.Popen(
            line, text=True, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            child.wait(seconds)
        except subprocess.TimeoutExpired:
            pass
        finally:
            code = child.poll()
            if code is None:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        log.seek(0)
        return log.read(), code


def read_iterations(run: Path) -> list[dict[str, Any]]:
    """Read the reward and the seconds of each stage, of all iterations that were committed."""
    iterations = []
    for directory in sorted((run / "iterations").iterdir(), key=lambda path: int(path.name)):
        figures: dict[str, Any] = {"iteration": int(directory.name)}
        for name in ("rollout", "reward", "policy-update"):
            if not (directory / name / "manifest.json").exists():
                continue
            manifest = Artifact(str(directory / name)).manifest
            figures[name] = {"seconds": manifest.timings.get("total")}
            if name == "reward":
                figures["reward"] = manifest.facts | manifest.results
            if name == "rollout":
                figures["rollout"]["proof"] = manifest.notes
                figures["rollout"]["timings"] = manifest.timings
            if name == "policy-update":
                figures["policy-update"]["notes"] = manifest.notes
                figures["policy-update"]["timings"] = manifest.timings
        iterations.append(figures)
    return iterations


def read_samples(directory: Path) -> list[dict[str, Any]]:
    """Read some completions with their scores: a reward does not say what was learned."""
    path = Artifact(str(directory)).part("samples.parquet")
    columns = ["prompt", "completion", "answer", "score"]
    rows: list[dict[str, Any]] = pq.read_table(path, columns=columns).slice(0, 8).to_pylist()
    return rows


def evaluate_last(step: Step, run: Path) -> None:
    """Evaluate the last policy of a run that was ended, as its evaluations do."""
    from tuneloop.stages.evaluate import evaluate

    policies = sorted(
        (run / "iterations").glob("*/policy-update/manifest.json"),
        key=lambda path: int(path.parts[-3]),
    )
    (prompts,) = run.glob("data-prep")
    evaluate(
        out=str(step.work / "evaluate-last"),
        policy=str(policies[-1].parent),
        prompts=str(prompts),
        engine="transformers",
        engine_args={"max_num_seqs": 512},
        max_tokens=MAX_TOKENS,
    )
    manifest = Artifact(str(step.work / "evaluate-last")).manifest
    step.record(evaluated=policies[-1].parts[-3], after=manifest.results, facts=manifest.facts)


def run(step: Step) -> None:
    start = time.perf_counter()
    settings = list_settings(step)
    log, code = run_until(step, settings, 600 if step.small else SECONDS)
    step.record(
        settings={name: value for name, value in settings.items() if name != "base_model"},
        code=code,
        seconds=time.perf_counter() - start,
        log=log[-3000:],
    )
    if code:
        raise SystemExit(log[-3000:])
    directory = step.work / "store" / RUN
    for iteration in read_iterations(directory):
        step.record(**iteration)
    for path in sorted(directory.glob("evaluate*/manifest.json")):
        manifest = Artifact(str(path.parent)).manifest
        step.record(
            stage=path.parent.name,
            results=manifest.results,
            facts=manifest.facts,
            samples=read_samples(path.parent),
        )
    if code is None:
        evaluate_last(step, directory)
