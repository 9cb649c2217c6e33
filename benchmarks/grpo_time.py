"""Seconds to a mean reward of 0.95: our GRPO loop beside TRL's GRPOTrainer.

Same SFT checkpoint, prompts, batch (16 prompts x 8 completions), learning rate, temperature, clipping and token-mean
loss; reward is exact match. Ours is `tuneloop run` with every stage of every iteration committed to disk and, for
`vllm`, a real vLLM server; TRL generates in process with transformers (its vLLM modes need a GPU) and saves nothing.

    python benchmarks/grpo_time.py [--seeds 0 1 2] [--loops pod stage vllm] [--iterations 60]

`stage` is a process a stage, `pod` has all iterations in one (`loop.iterations_per_pod`); both sample with
transformers. `vllm` is `stage` with the server.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TARGET, WINDOW = 0.95, 5
LOOPS: dict[str, dict[str, object]] = {
    "pod": {"engine.kind": "transformers", "loop.iterations_per_pod": 60},
    "stage": {"engine.kind": "transformers", "loop.iterations_per_pod": 0},
    "vllm": {"engine.kind": "vllm", "loop.iterations_per_pod": 0},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--loops", nargs="+", default=list(LOOPS), choices=list(LOOPS))
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--trl-worker", nargs=4, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.trl_worker:
        return trl_worker(*flags.trl_worker)
    print(
        f"{'seed':>4}  {'loop':<22} {'to 0.95: step':>14} {'seconds':>8} {'s/step':>7} {'last 10':>8}   with start-up"
    )
    for seed in flags.seeds:
        with tempfile.TemporaryDirectory() as work:
            for loop in flags.loops:
                show(seed, f"tuneloop, {loop}", *ours(Path(work), seed, loop, flags.iterations))
            show(
                seed, "TRL, transformers", *trl(Path(work), flags.loops[0], seed, flags.iterations)
            )


def ours(
    work: Path, seed: int, loop: str, iterations: int
) -> tuple[list[float], list[float], float]:
    """(mean reward, seconds since the loop began) of each iteration, and the start-up before it."""
    from tuneloop.local import journal
    from tuneloop.runs.run_record import Run

    began = time.time()
    settings: dict[str, object] = {
        "seed": seed,
        "loop.iterations": iterations,
        "loop.target_reward": 2,
        **LOOPS[loop],
    }
    command = [
        sys.executable,
        "-m",
        "tuneloop.cli",
        "run",
        "sft_then_grpo",
        "--run",
        loop,
        "--store",
        str(work),
    ]
    command += [f"--set={name}={value}" for name, value in settings.items()]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    pods = [n for n in journal.read_state(work / loop).nodes.values() if n.type == "Pod"]  # type: ignore[union-attr]
    start = min(n.started for n in pods if n.template in ("rollout", "iterations"))
    run = Run.open(loop, str(work))
    rewards = [score.value for score in run.training_rewards()]
    ends: list[float] = [
        entry.finished - start for entry in run.with_role("trainer") if entry.iteration
    ]
    return rewards, ends, min(n.started for n in pods) - began


def trl(work: Path, run: str, seed: int, iterations: int) -> tuple[list[float], list[float], float]:
    from tuneloop.core.artifacts import Artifact

    model = Artifact(f"{work}/{run}/sft").path / "model"
    prompts = Artifact(f"{work}/{run}/data-prep").path / "train.parquet"
    began = time.time()
    command = [
        sys.executable,
        __file__,
        "--trl-worker",
        str(model),
        str(prompts),
        str(seed),
        str(iterations),
    ]
    out = subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout
    record = json.loads(out.splitlines()[-1])
    return record["rewards"], record["seconds"], record["started"] - began


def trl_worker(model: str, prompts: str, seed: str, iterations: str) -> None:
    import datasets
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    rows = datasets.Dataset.from_parquet(prompts).select_columns(["prompt", "answer"])

    def exact(completions: list[str], answer: list[str], **_: object) -> list[float]:
        return [float(c.strip() == a.strip()) for c, a in zip(completions, answer, strict=True)]

    class Clock(transformers.TrainerCallback):
        def on_train_begin(self, *_: object, **__: object) -> None:
            self.start, self.started = time.perf_counter(), time.time()
            self.ends: list[float] = []

        def on_step_end(self, *_: object, **__: object) -> None:
            self.ends.append(time.perf_counter() - self.start)

    clock = Clock()
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(), max_steps=int(iterations), seed=int(seed), learning_rate=5e-4, warmup_steps=5,
        lr_scheduler_type="constant_with_warmup", adam_beta1=0.9, adam_beta2=0.99, per_device_train_batch_size=128,
        num_generations=8, max_completion_length=8, temperature=1.0, beta=0.0, epsilon=0.2, epsilon_high=0.28,
        loss_type="dapo", scale_rewards="group", bf16=False, gradient_checkpointing=False, use_cpu=True,
        report_to=[], save_strategy="no", logging_steps=1, disable_tqdm=True,
    )  # fmt: skip
    policy = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32")
    trainer = GRPOTrainer(
        model=policy,
        args=config,
        reward_funcs=exact,
        train_dataset=rows,
        processing_class=transformers.AutoTokenizer.from_pretrained(model, padding_side="left"),
        callbacks=[clock],
    )
    trainer.train()
    rewards = [row["reward"] for row in trainer.state.log_history if "reward" in row]
    print(json.dumps({"rewards": rewards, "seconds": clock.ends, "started": clock.started}))


def show(seed: int, name: str, rewards: list[float], seconds: list[float], startup: float) -> None:
    means = [
        sum(rewards[max(0, i - WINDOW + 1) : i + 1]) / min(WINDOW, i + 1)
        for i in range(len(rewards))
    ]
    reached = next((i for i, mean in enumerate(means) if mean >= TARGET and i >= WINDOW - 1), None)
    at = (
        f"{reached + 1:>14} {seconds[reached]:>8.1f}"
        if reached is not None
        else f"{'not':>14} {'-':>8}"
    )
    total = f"{startup + seconds[reached]:.1f}" if reached is not None else "-"
    last = sum(rewards[-10:]) / len(rewards[-10:])
    print(
        f"{seed:>4}  {name:<22} {at} {seconds[-1] / len(seconds):>7.3f} {last:>8.3f}   {total}",
        flush=True,
    )


if __name__ == "__main__":
    main()
