"""Draw held-out loss by step, and held-out reward before and after, of runs of `sft` that differ in their seed.

    python docs/images/seeds.py runs/smollm2-0 runs/smollm2-1 runs/smollm2-2 > docs/images/smollm2.svg

The table of docs/training.md is printed to standard error.
"""

import io
import json
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib
import pyarrow.parquet as pq

matplotlib.use("svg")
from matplotlib import pyplot

from tuneloop.core.artifacts import Artifact

# Text stays text, and equal runs give an equal file.
pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "seeds", "font.size": 10})

STAGES = ("evaluate-before", "evaluate-after")
HEAD = (
    "| seed | reward before | reward after | held-out loss before | after "
    "| last number right, before | after |"
)


def main() -> None:
    """Read the runs that the arguments name, print the table and the picture."""
    runs = [Path(argument) for argument in sys.argv[1:]]
    rewards = [[read_reward(run, stage) for stage in STAGES] for run in runs]
    losses = [read_losses(run) for run in runs]
    print(HEAD, file=sys.stderr)
    print(f"|{'---|' * HEAD.count(' | ')}---|", file=sys.stderr)
    for run, (before, after), curve in zip(runs, rewards, losses, strict=True):
        row = [read_seed(run), before, after, curve[0][1], curve[-1][1]]
        row += [count_right(run, stage) for stage in STAGES]
        cells = [f"{value:.3f}" if isinstance(value, float) else str(value) for value in row]
        print(f"| {' | '.join(cells)} |", file=sys.stderr)
    rewards_after = [after for _, after in rewards]
    print(f"after: mean {statistics.mean(rewards_after):.3f}", file=sys.stderr)
    print(f"after: standard deviation {statistics.stdev(rewards_after):.3f}", file=sys.stderr)
    print(draw(runs, rewards, losses))


def read_reward(run: Path, stage: str) -> float:
    """Read the mean reward of an evaluation."""
    return float(Artifact(str(run / stage)).manifest.results["mean_reward"])


def count_right(run: Path, stage: str) -> str:
    """Count the answers whose last number is the sum, in whatever form they are."""
    table = pq.read_table(Artifact(str(run / stage)).path / "samples.parquet")
    rows = table.select(["completion", "answer"]).to_pylist()
    right = sum(re.findall(r"-?\d+", row["completion"])[-1:] == [row["answer"]] for row in rows)
    return f"{right} of {len(rows)}"


def read_seed(run: Path) -> int:
    """Read the seed of a run from what its fine-tuning was started with."""
    return int(Artifact(str(run / "sft")).manifest.params["seed"])


def read_losses(run: Path) -> list[tuple[int, float]]:
    """Read the held-out loss by step, in nats a token, from the metrics of `sft`."""
    lines = (Artifact(str(run / "sft")).path / "metrics.jsonl").read_text().splitlines()
    rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
    return [(row["step"], row["eval_loss"]) for row in rows if "eval_loss" in row]


def draw(
    runs: list[Path], rewards: list[list[float]], losses: list[list[tuple[int, float]]]
) -> str:
    """Return the picture as SVG."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for run, curve in zip(runs, losses, strict=True):
        steps, values = zip(*curve, strict=True)
        left.plot(steps, values, marker=".", label=f"seed {read_seed(run)}")
    left.set_xlabel("optimizer step")
    left.set_ylabel("held-out loss, nats a token")
    left.set_ylim(bottom=0)
    left.legend(frameon=False)
    for pair in rewards:
        right.plot([0, 1], pair, marker="o")
    right.set_xticks([0, 1], ["before", "after"])
    right.set_xlim(-0.3, 1.3)
    right.set_ylim(0, 1)
    right.set_ylabel("mean reward of held-out prompts")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    picture = io.StringIO()
    figure.savefig(picture, format="svg", metadata={"Date": None})
    return picture.getvalue()


if __name__ == "__main__":
    main()
