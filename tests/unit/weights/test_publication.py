"""A stage publishes what it committed: once, in order, after a crash too, and never over another run's versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.weights import exports
from tuneloop.core.artifacts import Artifact, Manifest
from tuneloop.core.component import OptionalInput, Results, Stage, component
from tuneloop.core.errors import Corrupt
from tuneloop.kfp import stage as kfp_stage
from tuneloop.weights import publication
from tuneloop.weights.inspect import delete_unused_versions, list_versions
from tuneloop.weights.materialize import materialize_version
from tuneloop.weights.pointer import PointerConflict, PointerRewind
from tuneloop.weights.publication import Weights, read_publications


def publish_late(stage: Stage, manifest: Manifest) -> None:
    """As the stages do; looked up, so that a test can end the process here."""
    publication.publish_checkpoint(stage, manifest)


@component("checkpoint", image="base", results={}, after=publish_late)
def toy(stage: Stage, policy: OptionalInput, *, weights: Weights = None, seed: int = 0) -> Results:
    """Write the checkpoint that follows `policy`."""
    version = policy.manifest.facts["version"] + 1 if policy else 0
    rng = np.random.default_rng(0)
    made = exports.model(rng)
    for step in range(version):
        made = exports.update(np.random.default_rng([seed, step]), made, 0.02)
    exports.save(stage.out / "model", made)
    stage.facts["version"] = version
    return {}


def chain(root: Path, count: int, **params: Any) -> list[Artifact]:
    """Checkpoints 0, 1, …"""
    made: list[Artifact] = []
    for version in range(count):
        given = {"policy": made[-1].ref} if made else {}
        toy(out=f"{root}/{version}", **given, **params)
        made.append(Artifact(f"{root}/{version}"))
    return made


def test_every_version_is_that_of_its_checkpoint(tmp_path: Path) -> None:
    root = str(tmp_path / "w")
    policies = chain(tmp_path, 4, weights=root)
    assert [(v.version, v.base_version) for v in list_versions(root)] == [
        (0, None),
        (1, 0),
        (2, 1),
        (3, 2),
    ]
    for version, policy in enumerate(policies):
        done = materialize_version(root, version, tmp_path / f"m{version}")
        assert done.source == policy.manifest.digest
        assert exports.content(tmp_path / f"m{version}") == exports.content(policy.path / "model")
    records = read_publications(root)
    assert sorted(records) == [0, 1, 2, 3] and records[3]["delta_bytes"] < records[3]["full_bytes"]


def test_a_base_that_was_collected_comes_from_the_chain(tmp_path: Path) -> None:
    root = str(tmp_path / "w")
    *_, newest = chain(tmp_path, 2, weights=root)
    for name in newest.manifest.files:
        (newest.path / name).unlink()
    toy(out=f"{tmp_path}/2", policy=newest.ref, weights=root)
    assert [(v.version, v.base_version) for v in list_versions(root)] == [(0, None), (1, 0), (2, 1)]


def test_without_a_root_nothing_is_published(tmp_path: Path) -> None:
    chain(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["0"]


def test_a_crash_between_commit_and_publication_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = str(tmp_path / "w")
    first, second = chain(tmp_path, 2, weights=root)

    def die(*_: object) -> None:
        raise exports.Crash

    with monkeypatch.context() as crashing:
        crashing.setattr(publication, "publish_checkpoint", die)
        with pytest.raises(exports.Crash):
            toy(out=f"{tmp_path}/2", policy=second.ref, weights=root)
    assert list_versions(root)[-1].version == 1, "committed, and the old version is served"
    toy(out=f"{tmp_path}/2", policy=second.ref, weights=root)
    assert list_versions(root)[-1].version == 2
    listed = list_versions(root)
    toy(out=f"{tmp_path}/1", policy=first.ref, weights=root)
    assert list_versions(root) == listed, "run again, an overtaken stage changes nothing"


def test_two_runs_do_not_share_a_root(tmp_path: Path) -> None:
    root = str(tmp_path / "w")
    chain(tmp_path / "a", 3, weights=root)
    with pytest.raises(PointerConflict, match="use another root"):
        chain(tmp_path / "b", 2, weights=root, seed=1)  # version 0 is the same in both
    delete_unused_versions(root)
    (tmp_path / "w" / "weight_v000001" / "model.safetensors.index.json").unlink()
    with pytest.raises(PointerRewind, match="a root of its own"):
        toy(out=f"{tmp_path}/c", policy=Artifact(f"{tmp_path}/a/0").ref, weights=root, seed=2)


def test_a_damaged_checkpoint_is_not_published(tmp_path: Path) -> None:
    (policy,) = chain(tmp_path, 1)
    path = policy.path / "model" / "model.safetensors"
    path.write_bytes(
        path.read_bytes()[:-1] + b"\x00"
        if path.read_bytes()[-1]
        else path.read_bytes()[:-1] + b"\x01"
    )
    with pytest.raises(Corrupt, match="differs from its manifest"):
        toy(out=f"{tmp_path}/0", weights=str(tmp_path / "w"))
    assert not (tmp_path / "w" / "latest").exists()


def test_the_stages_publish() -> None:
    from tuneloop.stages.base_model import base_model
    from tuneloop.stages.policy_update import policy_update
    from tuneloop.stages.sft import sft

    for stage in (base_model, sft, policy_update):
        assert stage.after.__qualname__ in (
            "publish_checkpoint",
            "checkpoint_stage.<locals>.finish",
        )
        assert "weights" in stage.Params.model_fields


def test_an_update_at_the_rate_of_rl_sends_a_tenth_of_the_model_at_most(tmp_path: Path) -> None:
    """A tiny model in bfloat16, AdamW's step at 1e-6; and what arrives are the trainer's bytes."""
    from tests.making import prompts_artifact, rewards_artifact, rollout_rows
    from tuneloop.stages.base_model import base_model
    from tuneloop.stages.policy_update import policy_update

    root, prompts = f"{tmp_path}/w", prompts_artifact(tmp_path / "prompts")
    base_model(out=f"{tmp_path}/base", prompts=prompts.ref, save_dtype="bfloat16", weights=root)
    base = Artifact(f"{tmp_path}/base")
    rows = [{**row, "score": float(i % 2)} for i, row in enumerate(rollout_rows(base))]
    rewards = rewards_artifact(tmp_path / "rewards", base, rows)
    about = {
        "learning_rate": 1e-6,
        "warmup_steps": 0,
        "save_dtype": "bfloat16",
        "device": "cpu",
        "weights": root,
    }
    policy_update(out=f"{tmp_path}/1", policy=base.ref, rewards=rewards.ref, **about)
    sent = read_publications(root)[1]
    assert sent["encoding"] == "gap8-xor" and 0 < sent["sent_bytes"] <= sent["full_bytes"] / 10
    materialize_version(root, 1, tmp_path / "held")
    assert exports.content(tmp_path / "held") == exports.content(
        Artifact(f"{tmp_path}/1").path / "model"
    )


def test_a_task_of_kfp_publishes_too(tmp_path: Path) -> None:
    """The adapter runs the stage's own program, so that what follows the commit follows it there."""
    weights_url, at = str(tmp_path / "w"), tmp_path / "kfp"
    given = {
        "inputs": {
            "parameterValues": {"url": f"{tmp_path}/0", "weights": weights_url},
            "artifacts": {},
        },
        "outputs": {
            "artifacts": {
                "checkpoint": {"artifacts": [{"name": "checkpoint", "uri": f"{at}/checkpoint"}]}
            },
            "outputFile": f"{at}/executor_output.json",
        },
    }
    assert kfp_stage.main([f"{__name__}:toy", "--executor-input", json.dumps(given)]) == 0
    (listed,) = list_versions(weights_url)
    assert listed.version == 0 and listed.latest
    assert read_publications(weights_url)[0]["full"]
