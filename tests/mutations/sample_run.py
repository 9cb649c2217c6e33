"""A small real run that has every kind of file that a run and its weight versions have.

The pipeline of toy stages is executed by `tuneloop run` in processes of its own. Then stages of this module follow in
this process: a trainer that publishes safetensors as weight versions, and a sampler that writes real rollouts.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tests.unit import toy
from tests.unit.weights.exports import Model, model, save, update
from tuneloop.cli import run_cli
from tuneloop.core.artifacts import Artifact, Manifest, dump_checked_json
from tuneloop.core.component import Input, OptionalInput, Results, Stage, component
from tuneloop.core.errors import Interrupted
from tuneloop.core.store import Store
from tuneloop.formats.canary import Canary, Noise
from tuneloop.formats.rollouts import FILE, write_rollouts
from tuneloop.runs.audit import compute_root
from tuneloop.runs.run_record import Run
from tuneloop.weights import live
from tuneloop.weights.publication import Weights, publish_checkpoint
from tuneloop.weights.publish import publish_version

ROOT = Path(__file__).parents[2]
RUN = "toy"
TUNED = 4
"""Versions that the trainer makes here, of which the first is published in full."""
PULLED = {
    "fetch_s": 0.5,
    "apply_s": 0.5,
    "pause_s": 0.1,
    "identical": 8,
    "tensors": 8,
    "full": None,
}
_STATES: list[Model] = [model(np.random.default_rng(0))]
for _seed in range(1, TUNED + 3):
    _STATES.append(update(np.random.default_rng(_seed), _STATES[-1], 0.05))


@component(
    "checkpoint", role="trainer", results={"loss": float, "version": int}, after=publish_checkpoint
)
def tune(
    stage: Stage, policy: OptionalInput = None, *, iteration: int = 0, weights: Weights = None
) -> Results:
    """Make and publish the next version, with a canary, and the trainer's state beside it."""
    version = policy.manifest.facts["version"] + 1 if policy else 10
    save(stage.out / "model", _STATES[version - 10])
    (stage.out / "model/tokenizer.json").unlink()  # it is none of a real tokenizer
    noise = Noise(dtype="bfloat16", mean=0.01, max=0.02, rms=0.015)
    canary = Canary(ids=[3, 1, 4], logprobs=[-0.5, -1.25 - version], noise=noise)
    canary.write(stage.out / "canary.json")
    stage.metric(iteration, loss=1.0 / version, entropy=0.5)
    state = {
        "stage": "tune",
        "step": version,
        "betas": [0.9, 0.99],
        "digest": f"{version:032x}",
    }
    stage.facts.update(
        version=version, iteration=iteration, save_dtype="float32", trainer_state=state
    )
    figures = {
        "mfu": None,
        "flops_per_s": 1e9,
        "peak_memory_bytes": 10**6,
        "step_s": 1.0,
        "communication_s": 0.1,
    }
    stage.notes.update(efficiency=figures, world_size=1, state_since=policy.ref if policy else "")
    stage.timings["tokens_per_s"] = 100.0
    stage.commit_later("state", lambda path: _write_state(path, version), facts=state)
    return {"loss": 1.0 / version, "version": version}


def _write_state(path: Path, version: int) -> None:
    (path / "trainer").mkdir(exist_ok=True)
    (path / "trainer" / "state.json").write_text(json.dumps({"step": version, "lr": 0.1}))


@component("rollouts", role="sampler", results={"mean_length": float})
def sample(stage: Stage, policy: Input, *, iteration: int = 0, temperature: float = 1.0) -> Results:
    """Write rollouts as the stage `rollout` does."""
    version = policy.manifest.facts["version"]
    ids = [5, 6, 7]
    lists = {
        "prompt_ids": [3, 4],
        "completion_ids": ids,
        "logprobs": [-0.5, -0.25, -1.0],
        "loss_mask": [True] * 3,
    }
    texts = {
        "finish_reason": "stop",
        "prompt": "a",
        "completion": "b",
        "answer": "b",
        "reward_spec": "{}",
    }
    row = {**lists, **texts, "policy_versions": [version] * 3, "metadata": "{}"}
    write_rollouts(
        stage.out / FILE,
        ({**row, "request_id": f"r{n}", "group": "g", "id": f"i{n}"} for n in range(4)),
    )
    stage.metric(iteration, mean_length=3.0)
    stage.facts.update(
        version=version, sampling={"temperature": temperature}, staleness={"mean": 0.0}
    )
    stage.notes["pulled"] = {"version": version, "served_at": 0.0, **PULLED}
    stage.timings.update(load=0.1, canary=0.1)
    return {"mean_length": 3.0}


def _write_step(path: Path) -> None:
    (path / "step.json").write_text('{"step": 2}')


@component("checkpoint", results={"step": int})
def interrupted(stage: Stage, policy: Input) -> Results:
    """Leave a resume point at the first attempt, and end by it at the second."""
    point = stage.latest_resume()
    if point is None:
        stage.save_resume(2, _write_step)
        raise Interrupted("as asked for")
    (stage.out / "step.json").write_bytes(point.part("step.json").read_bytes())
    return {"step": json.loads(point.part("step.json").read_text())["step"]}


@dataclass
class SampleRun:
    """The run's places, and what was committed: key → reference, as the stages that follow were given it.

    Attributes:
        root: that a trusted person would have told.
        kept: every file below `home`, as it has to be: bytes and time of its last change.
    """

    home: Path
    refs: dict[str, str] = field(default_factory=dict)
    root: str = ""
    kept: dict[Path, tuple[bytes, int]] = field(default_factory=dict)

    @property
    def store(self) -> str:
        return f"{self.home}/store"

    @property
    def url(self) -> str:
        return f"{self.store}/{RUN}"

    @property
    def weights(self) -> str:
        return f"{self.url}/weights"

    def compute_again(self) -> dict[str, Manifest]:
        """Run all stages again in this process, as a resumed run does: what is committed ends at once."""
        made = toy.make(self.url)
        policy = None
        for i in range(3, 3 + TUNED):
            at = f"{self.url}/iterations/{i}"
            given = {"policy": policy} if policy else {}
            made[f"{i}/tune"] = tune(out=f"{at}/tune", iteration=i, weights=self.weights, **given)
            policy = f"{at}/tune@{made[f'{i}/tune'].digest}"
            made[f"{i}/sample"] = sample(out=f"{at}/sample", policy=policy, iteration=i)
        with contextlib.suppress(Interrupted):
            made["interrupted"] = interrupted(out=f"{self.url}/interrupted", policy=policy)
        return made

    def remember(self) -> None:
        """Remember all files as they are."""
        for path in filter(Path.is_file, self.home.rglob("*")):
            self.kept[path] = path.read_bytes(), path.stat().st_mtime_ns

    def restore(self) -> None:
        """Undo whatever was done to the files since `remember`."""
        left = dict(self.kept)
        for folder, _, names in os.walk(self.home):
            for name in names:
                path = Path(folder, name)
                kept, status = left.pop(path, None), path.stat()
                if kept is None:
                    path.unlink()
                elif (len(kept[0]), kept[1]) != (status.st_size, status.st_mtime_ns):
                    _write(path, *kept)
        for path, kept in left.items():
            _write(path, *kept)


def _write(path: Path, data: bytes, mtime_ns: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    os.utime(path, ns=(mtime_ns, mtime_ns))


def make_sample_run(home: Path) -> SampleRun:
    """Make the run below `home`."""
    run = SampleRun(home)
    os.environ["PYTHONPATH"] = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    words = ["run", str(ROOT / "tests/unit/toy_pipeline.py"), "--run", RUN, "--store", run.store]
    assert run_cli([*words, "--no-track", "--no-warm"]) == 0
    run.compute_again()
    newest = Artifact(f"{run.url}/iterations/{2 + TUNED}/tune")
    more = {
        "base": newest.path / "model",
        "base_version": 9 + TUNED,
        "source": newest.manifest.digest,
    }
    for version in (
        10 + TUNED,
        11 + TUNED,
    ):  # an anchor with a delta beside it, and a delta on that
        directory = save(home / f"export{version}", _STATES[version - 10])
        publish_version(
            run.weights,
            version,
            directory,
            restore_bound=0.0 if version == 10 + TUNED else 3.0,
            **more,
        )
        more = {"base": directory, "base_version": version}
    live.announce_version(Store(run.weights), "replica", 10)
    later = time.time() + 86400  # for the replica to live as long as this process reads
    os.utime(f"{run.weights}/live/replica.json", (later, later))
    live.record_pull(Store(run.weights), "replica", {"version": 10, "served_at": 1.0, **PULLED})
    failure = {"message": "is away", "time": 9e9}
    Store(run.url).put(
        "iterations/1/failing/failure.json", dump_checked_json(failure, "failure.json")
    )
    opened = Run.open(RUN, run.store)
    opened._index._save()  # as readers of more artifacts than these do
    run.refs = {
        entry.key: f"{run.url}/{entry.key}@{entry.manifest.digest}" for entry in opened.entries
    }
    run.root = compute_root(opened)
    run.remember()
    return run
