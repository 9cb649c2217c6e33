"""Seconds of the whole demo: `tuneloop demo` beside two scripts of TRL, SFTTrainer's and then GRPOTrainer's.

    python benchmarks/demo_time.py [--repeat 3]

Same base model, demonstrations, prompts, batches, steps of SFT, learning rates and clipping; both loops end with the
first batch that earns the demo's target reward, or after its 60 iterations. Each side is timed from the start of its
first process, with all imports. Ours includes what TRL's scripts do not do: making the data and the model, evaluation
before and after the loop, every artifact committed to disk, the export and the report. `TRL` starts with data and model
there, generates with transformers (its vLLM modes need a GPU), and saves the model of the first script; the end of the
second, after the target, is not timed. The two take turns; the median of each is compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tuneloop.core.artifacts import Artifact
from tuneloop.runs.run_record import Run

TARGET, ITERATIONS = 0.98, 60
"""Of the demo: `loop.target_reward` and `loop.iterations`."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--trl-sft", nargs=3, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    if flags.trl_sft:
        return train_by_trl(*map(Path, flags.trl_sft))
    loops = {"tuneloop, vLLM": (), "tuneloop, transformers": ("--set=engine.kind=transformers",)}
    print(
        f"{'':24}{'seconds':>9}{'iterations':>12}{'last reward':>13}{'to a mean of 0.95':>19}",
        flush=True,
    )
    totals: dict[str, list[float]] = {}
    for seed in range(flags.repeat):
        with tempfile.TemporaryDirectory() as work:
            for name, options in loops.items():
                result = run_demo(Path(work), f"demo-{len(options)}", seed, options)
                totals.setdefault(name, []).append(show(name, *result))
            totals.setdefault("TRL, two scripts", []).append(
                show("TRL, two scripts", *run_trl(Path(work), seed))
            )
    peer = statistics.median(totals["TRL, two scripts"])
    for name, seconds in totals.items():
        median = statistics.median(seconds)
        print(f"{name:24}{median:9.1f} s, median of {len(seconds)}: {median / peer:.2f} of TRL's")


def show(name: str, seconds: float, rewards: list[float]) -> float:
    means = [statistics.fmean(rewards[i - 4 : i + 1]) for i in range(4, len(rewards))]
    reached = next((i + 5 for i, mean in enumerate(means) if mean >= 0.95), None)
    print(
        f"{name:24}{seconds:9.1f}{len(rewards):12}{rewards[-1]:13.3f}{reached or 'not':>19}",
        flush=True,
    )
    return seconds


def run_demo(
    work: Path, run: str, seed: int, options: tuple[str, ...]
) -> tuple[float, list[float]]:
    command = [
        sys.executable,
        "-m",
        "tuneloop.cli",
        "demo",
        "--run",
        run,
        "--store",
        str(work),
        f"--set=seed={seed}",
    ]
    began = time.perf_counter()
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    took = time.perf_counter() - began
    return took, [score.value for score in Run.open(run, str(work)).training_rewards()]


def run_trl(work: Path, seed: int) -> tuple[float, list[float]]:
    """Run both scripts on what the demo was given; the second ends at the target, so time after it is not counted."""
    model, data, out = (
        Artifact(f"{work}/demo-0/base-model").path / "model",
        Artifact(f"{work}/demo-0/data-prep").path,
        work / "trl-sft",
    )
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, __file__, "--trl-sft", str(model), str(data / "sft.parquet"), str(out)],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    second = time.time()
    tuned = time.perf_counter() - began
    grpo = Path(__file__).with_name("grpo_time.py")
    command = [
        sys.executable,
        str(grpo),
        "--trl-worker",
        str(out),
        str(data / "train.parquet"),
        str(seed),
        str(ITERATIONS),
    ]
    said = subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).stdout
    record = json.loads(said.splitlines()[-1])
    rewards: list[float] = record["rewards"]
    last = next((i for i, reward in enumerate(rewards) if reward >= TARGET), len(rewards) - 1)
    return tuned + record["started"] - second + record["seconds"][last], rewards[: last + 1]


def train_by_trl(model: Path, data: Path, out: Path) -> None:
    import datasets
    import transformers
    from trl import SFTConfig, SFTTrainer

    rows = datasets.Dataset.from_parquet(str(data)).select_columns(["prompt", "completion"])
    config = SFTConfig(
        output_dir=str(out), max_steps=250, per_device_train_batch_size=32, learning_rate=1e-3, warmup_steps=20,
        lr_scheduler_type="constant_with_warmup", adam_beta2=0.95, completion_only_loss=True, max_length=256,
        bf16=False, gradient_checkpointing=False, use_cpu=True, save_strategy="no", report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        args=config,
        train_dataset=rows,
        processing_class=transformers.AutoTokenizer.from_pretrained(model),
    )
    trainer.train()
    trainer.save_model(str(out))
    trainer.processing_class.save_pretrained(out)


if __name__ == "__main__":
    main()
