"""Manifests state the same as before: the facts of a small run, in the order and form of an earlier version."""

import json
import re
from pathlib import Path
from typing import Any

from tests.making import rewards_artifact
from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import Component
from tuneloop.core.threads import BACKGROUND
from tuneloop.stages.base_model import base_model
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.sft import sft
from tuneloop.stages.tokenize_data import tokenize_data

STORED = Path(__file__).with_name("stored_facts.json")
"""Stage → facts of its manifest, written before facts had types (`mask` leaves out what libraries decide)."""


def mask(value: Any) -> Any:
    """Replace what depends on versions of torch and pyarrow: digests, and numbers that are computed."""
    if isinstance(value, dict):
        # The objective repeats the options of an algorithm, which may have new ones.
        return {name: mask(part) for name, part in value.items() if name != "objective"}
    if isinstance(value, list):
        return [mask(part) for part in value]
    if isinstance(value, float):
        return "a number"
    if isinstance(value, str):
        return re.sub(r"[^ ']*[0-9a-f]{32,}", "a digest", value)
    return value


def run(stage: Component, out: Path, **arguments: Any) -> Artifact:
    stage(out=str(out), **arguments)
    return Artifact(str(out))


def make_manifests(place: Path) -> dict[str, dict[str, Any]]:
    data = run(
        data_prep, place / "data", train=20, eval=4, sft=12, sft_eval=4, preference=0, seed=3
    )
    base = run(base_model, place / "base", prompts=data.ref, model="tiny-llama", seed=3)
    tokens = run(tokenize_data, place / "tokens", policy=base.ref, prompts=data.ref)
    options: dict[str, Any] = {"device": "cpu", "per_device_train_batch_size": 4, "seed": 3}
    tuned = run(sft, place / "sft", policy=base.ref, prompts=tokens.ref, max_steps=2, **options)
    rewards = rewards_artifact(place / "rewards", tuned)
    updated = run(
        policy_update,
        place / "update",
        policy=tuned.ref,
        rewards=rewards.ref,
        iteration=1,
        lora={"r": 2},
        **options,
    )
    BACKGROUND.wait()
    artifacts = [data, base, tokens, tuned, updated, Artifact(f"{updated.url}/state")]
    return {f"{a.manifest.stage} {a.manifest.kind}": mask(a.manifest.facts) for a in artifacts}


def test_facts_are_stored_as_before(tmp_path: Path) -> None:
    # As text: the order of the keys is part of the bytes.
    assert json.dumps(make_manifests(tmp_path), indent=1) + "\n" == STORED.read_text()
