"""The same task by every policy gradient: the demo's, from one SFT checkpoint, batch and learning rate of the demo.

    python benchmarks/algorithms.py [--algorithms grpo dapo gspo rloo] [--seed 0] [--iterations 80]

One run makes the SFT checkpoint; each algorithm goes on from its export with its own defaults (`dr_grpo` needs one
option), on the engine `transformers`, all iterations in one process. A row: the iteration at which the mean training
reward of five batches reached the target, that of the last ten, and the greedy reward on held-out prompts before and
after. No peer: it shows that each variant learns; on a task this small it does not rank them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

TARGET, WINDOW = 0.95, 5
ALGORITHMS = {
    **dict.fromkeys(("grpo", "dapo", "gspo", "rloo", "cispo", "reinforce_plus_plus"), "{}"),
    "dr_grpo": "{max_completion_length: 8}",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--algorithms", nargs="+", default=list(ALGORITHMS), choices=list(ALGORITHMS)
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--iterations", type=int, default=80)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        store = Path(work)
        run(store, "sft", "sft", {"seed": flags.seed})
        model = exported(store, "sft")
        print(f"{'algorithm':<20} {'to ' + str(TARGET):>8} {'last 10':>8}  greedy, held out")
        for algorithm in flags.algorithms:
            name = algorithm.replace("_", "-")
            settings = {
                **{"seed": flags.seed, "base_model": model, "engine.kind": "transformers"},
                "update.algorithm": {"kind": algorithm} | ALGORITHMS[algorithm],
                **{"loop.iterations": flags.iterations, "loop.target_reward": 2},
                **{
                    "loop.per_workflow": flags.iterations,
                    "loop.iterations_per_pod": flags.iterations,
                },
            }
            run(store, "grpo", name, settings)
            show(store, name)


def run(store: Path, pipeline: str, name: str, settings: dict[str, object]) -> None:
    command = [
        sys.executable,
        "-m",
        "tuneloop.cli",
        "run",
        pipeline,
        "--run",
        name,
        "--store",
        str(store),
    ]
    command += ["--no-track", *(f"--set={key}={value}" for key, value in settings.items())]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def exported(store: Path, name: str) -> Path:
    from tuneloop.core.artifacts import Artifact

    return Artifact(f"{store}/{name}/export").path


def show(store: Path, name: str) -> None:
    from tuneloop.runs.run_record import Run

    found = Run.open(name, str(store))
    rewards = [score.value for score in found.training_rewards()]
    means = [sum(rewards[i - WINDOW + 1 : i + 1]) / WINDOW for i in range(WINDOW - 1, len(rewards))]
    reached = next((str(i + WINDOW) for i, mean in enumerate(means) if mean >= TARGET), "not")
    last = sum(rewards[-10:]) / len(rewards[-10:])
    before, after = (
        entry.manifest.results["mean_reward"] for entry in found.with_role("evaluator")
    )
    print(f"{name:<20} {reached:>8} {last:>8.3f}  {before:.3f} → {after:.3f}", flush=True)


if __name__ == "__main__":
    main()
