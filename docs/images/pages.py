"""Take the pictures of docs/ui.md: `make pictures`, with Chromium (`apt-get install chromium`).

The runs are made here in seconds, by the same numbers each time: no model was trained for them. Their artifacts are
like those of `sft_then_grpo` as far as the pages read them; the weights are those of a small random model, and what
changes from version to version is published as a run would.
"""

import io
import json
import math
import random
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests import policies
from tests.browser import Page, open_browser, serve
from tests.rollouts import SCORED
from tuneloop.core.artifacts import Draft, Manifest
from tuneloop.formats.rollouts import SCHEMA
from tuneloop.local.journal import Journal, Node, Workflow, lock_workdir
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run
from tuneloop.stages.base_model import train_tokenizer
from tuneloop.weights.publish import publish_version

HERE = Path(__file__).parent
BEGAN = 1_790_000_000.0
"""Unix seconds: the pictures say when a run began."""
PROMPTS, SAMPLES, MOST_BYTES = 8, 8, 60_000
SECONDS = {"rollout": 21.0, "reward": 1.4, "policy-update": 11.0}
FIRST = "digits"
RIGHT = "The digits from the last to the first are 9 8 7 6 5 4 3 2 1."
WRONG = (
    "It begins with the last digit, so I think it is 1 2 3 4 5 6 7 8 9, or perhaps another order."
)
WORKFLOW = "spec: {templates: [{name: main, dag: {tasks: [{name: export, template: export}]}}]}"


class Maker:
    """Commits the artifacts of a run one after another, each with the time at which it would have been.

    Args:
        store: a folder.
        name: of the run.
        rate: how fast the share of right completions grows from iteration to iteration.
    """

    def __init__(self, store: Path, name: str, rate: float) -> None:
        self.at, self.rate, self.clock = store / name, rate, BEGAN
        self.draw = random.Random(name)
        config = {
            "seed": len(name),
            "rollout": {"temperature": 1.0},
            "grpo": {"learning_rate": round(rate * 1e-4, 8)},
        }
        record = Record(
            run=name,
            pipeline="sft_then_grpo",
            path="sft_then_grpo.py",
            config=config,
            store=f"file://{store}",
        )
        Run.create(record.model_copy(update={"created": BEGAN}), WORKFLOW)
        self.journal = Journal(self.at)
        self.words, self.model = (
            train_tokenizer(iter([RIGHT, WRONG] * 50), 512, 1024),
            policies.model(),
        )

    def commit(
        self, key: str, kind: str, seconds: float, files: Mapping[str, bytes], **about: Any
    ) -> Manifest:
        """Commit an artifact of these files and return its manifest."""
        draft = Draft(f"{self.at}/{key}")
        for name, data in files.items():
            (draft.path / name).parent.mkdir(exist_ok=True)
            (draft.path / name).write_bytes(data)
        provenance = {
            "started": self.clock,
            "device": "cpu (x86_64)",
            "code": "0.1.0",
            "image": "tuneloop:0.1.0",
        }
        self.clock += seconds + 0.5
        stage = re.sub("-(before|after)$", "", key.rpartition("/")[2]).replace("-", "_")
        timings = {"total": seconds, **about.pop("timings", {})}
        return draft.commit(stage=stage, kind=kind, provenance=provenance, timings=timings, **about)

    def commit_checkpoint(
        self, key: str, version: int, seconds: float, metrics: list[dict[str, float]], **about: Any
    ) -> str:
        """Commit and publish a version of the policy, of whose weights a part has changed; returns its reference."""
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.rand_like(parameter).lt(0.002) * 0.01)
        with tempfile.TemporaryDirectory() as made:
            self.model.save_pretrained(made)
            self.words.save_pretrained(made)
            files = {f"model/{path.name}": path.read_bytes() for path in Path(made).iterdir()}
            files["metrics.jsonl"] = write_lines(metrics)
            facts, results = {"version": version}, {"loss": metrics[-1]["loss"], "version": version}
            said = self.commit(
                key,
                "checkpoint",
                seconds,
                files,
                role="trainer",
                facts=facts,
                results=results,
                **about,
            )
            if self.at.name == FIRST:  # whose weights are pictured
                publish_version(f"{self.at}/weights", version, made, source=said.digest)
        return f"{self.at}/{key}@{said.digest}"

    def sample(self, skill: float, count: int, version: int) -> list[dict[str, Any]]:
        """Make the completions of 8 prompts, each right as often as the policy's skill says, and their scores."""
        rows = []
        for place in range(PROMPTS * count):
            prompt = random.Random(place // count).sample("123456789", 6)
            said = list(reversed(prompt))
            if wrong := self.draw.random() > skill:
                i = self.draw.randrange(5)
                said[i], said[i + 1] = said[i + 1], said[i]
            rows.append(self.make_row(place, count, prompt, said, wrong, version))
        return rows

    def make_row(
        self, place: int, count: int, prompt: list[str], said: list[str], wrong: bool, version: int
    ) -> dict[str, Any]:
        """Make the row of a completion: a wrong digit is one that the policy found less probable."""
        group, answer = f"g{place // count}", " ".join(reversed(prompt))
        text = re.sub(r"\d.*\d", " ".join(said), WRONG if wrong else RIGHT)
        ids = self.words.encode(text)
        doubts = [self.draw.expovariate(0.5 if wrong else 4.0) for _ in ids]
        return {
            **dict.fromkeys(SCORED.names, ""),
            **{
                "request_id": f"{group}-s{place % count:02d}",
                "group": group,
                "id": f"p{place // count}",
            },
            **{
                "prompt": f"reverse {' '.join(prompt)} =",
                "completion": text,
                "answer": answer,
                "finish_reason": "stop",
            },
            **{
                "prompt_ids": [1],
                "completion_ids": ids,
                "logprobs": [-each for each in doubts],
                "metadata": "{}",
            },
            **{
                "loss_mask": [True] * len(ids),
                "policy_versions": [version] * len(ids),
                "outcome": "score",
            },
            **{"score": float(not wrong), "breakdown": json.dumps({"exact": float(not wrong)})},
        }

    def evaluate(self, name: str, policy: str, skill: float, version: int) -> None:
        """Commit an evaluation."""
        rows = self.sample(skill, 32, version)
        about = {
            "version": version,
            "sampling": {"temperature": 0.0},
            "outcomes": {"score": len(rows)},
        }
        results = {"mean_reward": sum(row["score"] for row in rows) / len(rows)}
        files = {"samples.parquet": write_table(rows, SCORED)}
        self.commit(
            name,
            "metrics",
            9.0,
            files,
            role="evaluator",
            inputs={"policy": policy},
            facts=about,
            results=results,
        )

    def iterate(self, i: int, policy: str) -> str:
        """Commit an iteration; returns its checkpoint's reference."""
        skill, noise = self.skill(i), lambda size: self.draw.gauss(0, size)
        rows, at = self.sample(skill, SAMPLES, i), f"iterations/{i}"
        reward = sum(row["score"] for row in rows) / len(rows)
        facts = {
            "version": i,
            "sampling": {"temperature": 1.0},
            "outcomes": {"score": len(rows)},
            "staleness": {"mean": 0.0},
        }
        length = sum(len(row["completion_ids"]) for row in rows) / len(rows)
        files = {
            "rollouts.parquet": write_table(rows, SCHEMA),
            "metrics.jsonl": write_lines([{"mean_length": length, "cut": 0.0}]),
        }
        made = self.commit(
            f"{at}/rollout", "rollouts", SECONDS["rollout"] + noise(1.5), files, role="sampler", facts=facts,
            inputs={"policy": policy}, results={"completions": len(rows)}, timings={"load": 0.8, "canary": 0.3},
        )  # fmt: skip
        rollouts = f"{self.at}/{at}/rollout@{made.digest}"
        files = {"rewards.parquet": write_table(rows, SCORED)}
        made = self.commit(
            f"{at}/reward", "rewards", SECONDS["reward"], files, role="scorer", facts=facts,
            inputs={"rollouts": rollouts}, results={"mean_reward": reward},
        )  # fmt: skip
        rewards = f"{self.at}/{at}/reward@{made.digest}"
        entropy, decay = 0.9 * math.exp(-i * self.rate / 12) + 0.05, math.exp(-i / 10)
        measures = {
            **{
                "loss": noise(0.02),
                "kl": 0.002 * i + abs(noise(0.002)),
                "entropy": entropy + noise(0.02),
            },
            **{
                "clip_fraction": 0.02 + 0.08 * decay + abs(noise(0.01)),
                "logprob_gap": 0.0021 + abs(noise(0.0004)),
            },
            **{"grad_norm": 0.4 + decay + noise(0.08), "learning_rate": self.rate * 1e-4},
        }
        taken = SECONDS["policy-update"] + noise(0.8)
        inputs = {"policy": policy, "rewards": rewards}
        return self.commit_checkpoint(
            f"{at}/policy-update", i + 1, taken, [measures], inputs=inputs
        )

    def skill(self, i: int) -> float:
        """Compute the share of right completions at an iteration."""
        return 0.3 + 0.68 / (1 + math.exp(4 - self.rate * i / 3))

    def make(self, iterations: int, *, whole: bool = True) -> None:
        """Commit a run of so many iterations; with its evaluation and its exported model where it is whole."""
        about = {
            "params": {"source": "digits", "train": 512, "eval": 256},
            "results": {"prompts": 512},
        }
        prompts = self.commit("data-prep", "prompts", 1.2, {"train.jsonl": b"{}\n"}, **about)
        losses = [{"step": step, "loss": 2.4 * math.exp(-step / 9) + 0.4} for step in range(1, 41)]
        inputs = {"data": f"{self.at}/data-prep@{prompts.digest}"}
        policy = self.commit_checkpoint("sft", 1, 34.0, losses, inputs=inputs)
        self.evaluate("evaluate-before", policy, self.skill(0), 1)
        for i in range(1, iterations + 1):
            policy = self.iterate(i, policy)
        if whole:
            self.evaluate("evaluate-after", policy, self.skill(iterations), iterations + 1)
            files = {"model.safetensors": b"\0" * 100_000}
            self.commit(
                "export",
                "model",
                2.0,
                files,
                inputs={"policy": policy},
                results={"parameters": 172_000},
            )


def write_lines(rows: list[dict[str, float]]) -> bytes:
    """Write rows as lines of JSON."""
    return "".join(f"{json.dumps(row)}\n" for row in rows).encode()


def write_table(rows: list[dict[str, Any]], schema: pa.Schema) -> bytes:
    """Write rows as a Parquet file."""
    out = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema), out)
    return out.getvalue()


def make_store(store: Path) -> None:
    """Make a run that succeeded, one like it, one that failed, and what one that goes on has by now."""
    why = "out of memory: lower policy_update.rows_per_step"
    for name, rate, iterations in (
        (FIRST, 1.0, 40),
        ("digits-slow", 0.55, 40),
        ("too-large", 0.8, 9),
        ("live", 0.9, 14),
    ):
        maker = Maker(store, name, rate)
        maker.make(iterations, whole=iterations == 40)
        about: dict[str, Any] = {"started": BEGAN, "parameters": {"iterations": "40"}}
        maker.journal.write(Workflow("sft-then-grpo", **about))
        if name == "live":
            node = Node(
                "n", "live.rollout(0)", "rollout(0)", "rollout", "Pod", "Running", progress="37/64"
            )
            node.started = maker.clock
            maker.journal.write(node)
            continue
        if name == "too-large":
            node = Node(
                "n",
                "toy.policy-update(0)",
                "policy-update(0)",
                "policy-update",
                "Pod",
                "Failed",
                message=why,
            )
            node.started, node.finished, node.exit_code = maker.clock, maker.clock + 4, 137
            maker.journal.write(node)
            about["message"] = why
        phase = "Failed" if name == "too-large" else "Succeeded"
        maker.journal.write(Workflow("sft-then-grpo", phase=phase, finished=maker.clock, **about))


PICTURES: dict[str, tuple[str, str, int, int, bool]] = {
    "runs": ("/", "(sft_then_grpo(.|\\n)*){4}", 1280, 540, False),
    "run": ("/runs/digits", "Seconds by phase", 1280, 1180, False),
    "samples": ("/runs/digits/samples/12", "of 64 completions", 1280, 900, False),
    "weights": ("/runs/digits/weights", "Checkpoints", 1280, 640, False),
    "compare": ("/compare?run=digits&run=digits-slow", "Settings that differ", 1280, 1000, True),
    "lineage": ("/runs/digits/lineage", "Lineage of export", 390, 844, False),
}
"""File name → address, what is shown once the page is drawn, width and height, and whether it is dark."""


def take_picture(page: Page, path: Path, width: int, height: int, dark: bool) -> int:
    """Write what the window shows as a PNG of 128 colours; returns its bytes."""
    full = path.with_suffix(".full.png")
    page.take_picture(full, width, height, dark)
    with Image.open(full) as shot:
        shot.convert("RGB").crop((0, 0, width, height)).quantize(
            128, dither=Image.Dither.NONE
        ).save(path, optimize=True)
    full.unlink()
    return path.stat().st_size


def main() -> None:
    """Make the runs, take the pictures beside this file, and say how large they are."""
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "runs"
        make_store(store)
        with lock_workdir(store / "live"), serve(store) as site, open_browser() as page:
            for name, (path, shown, width, height, dark) in PICTURES.items():
                page.ask("Emulation.setScrollbarsHidden", hidden=True)
                page.resize(width, height, dark)
                page.open(f"{site}{path}", shown)
                size = take_picture(page, HERE / f"ui-{name}.png", width, height, dark)
                print(f"docs/images/ui-{name}.png: {size} bytes")
                if size > MOST_BYTES:
                    raise SystemExit(
                        f"docs/images/ui-{name}.png: has {size} bytes, at most {MOST_BYTES}: show less of it"
                    )


if __name__ == "__main__":
    main()
