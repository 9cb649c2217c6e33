"""Adapters for modules that a model does not have, and adapters that change nothing, in every stage that trains."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.making import checkpoint_artifact, prompts_artifact, rewards_artifact
from tuneloop.core.artifacts import Artifact, find_manifest
from tuneloop.core.errors import UserError
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.export import export
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.preference import preference
from tuneloop.stages.reference_logprobs import reference_logprobs
from tuneloop.stages.reward_model import reward_model
from tuneloop.stages.sft import sft


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return checkpoint_artifact(tmp_path_factory.mktemp("policy") / "p")


def prepare_pairs(folder: Path) -> Artifact:
    """Prepare eight pairs, half of them held out."""
    pairs = [{"prompt": f"say {i} =", "chosen": f" {i}", "rejected": f" {9 - i}"} for i in range(8)]
    file = folder / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, pairs)))
    sizes = {"train": 0, "eval": 0, "sft": 0, "preference": 4, "preference_eval": 4}
    data_prep(out=str(folder / "pairs"), source=str(file), **sizes)
    return Artifact(str(folder / "pairs"))


def train(stage: Any, out: Path, policy: Artifact, **options: Any) -> Artifact:
    """Run a stage that trains on artifacts of its kind, on the CPU."""
    inputs = {"policy": policy.ref}
    if stage is policy_update:
        inputs["rewards"] = rewards_artifact(out.with_name("rewards"), policy).ref
        options["iteration"] = 1
    elif stage is sft:
        inputs["prompts"] = prompts_artifact(out.with_name("prompts")).ref
    else:
        inputs["prompts"] = prepare_pairs(out.parent).ref
    if stage is preference:
        logprobs = out.with_name("logprobs")
        reference_logprobs(out=str(logprobs), **inputs, device="cpu")
        inputs["logprobs"] = Artifact(str(logprobs)).ref
    stage(out=str(out), **inputs, device="cpu", **options)
    return Artifact(str(out))


@pytest.mark.parametrize("targets", [["attention"], ["q_proj", "c_attn"], "q_proj"])
@pytest.mark.parametrize("stage", [sft, preference, reward_model, policy_update])
def test_modules_that_do_not_exist_are_refused_before_a_step(
    stage: Any, targets: Any, policy: Artifact, tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match=r"lora\.target_modules: .*names no layer .* q_proj"
    ) as error:
        train(stage, tmp_path / "out", policy, lora={"target_modules": targets})
    assert "\n" not in str(error.value)
    assert find_manifest(str(tmp_path / "out")) is None


@pytest.mark.parametrize("stage", [sft, policy_update])
def test_adapters_that_change_nothing_are_said(
    stage: Any, policy: Artifact, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = {"max_steps": 2} if stage is sft else {}
    # So small a rate is zero in float32.
    options = {"lora": {"r": 1}, "learning_rate": 1e-60, "warmup_steps": 0, **steps}
    unchanged = train(stage, tmp_path / "out", policy, **options)
    assert unchanged.manifest.facts["unchanged_adapters"] is True
    assert "the adapters change nothing after" in capsys.readouterr().err
    export(out=str(tmp_path / "export"), policy=unchanged.ref)
    (tmp_path / "second").mkdir()
    changed = train(
        stage, tmp_path / "second" / "out", policy, **{**options, "learning_rate": 1e-2}
    )
    assert "unchanged_adapters" not in changed.manifest.facts
