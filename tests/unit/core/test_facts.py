"""Facts are read by type: a missing or mistyped one is one line that names artifact and fact."""

import json
from pathlib import Path
from typing import Any

import pytest

from tuneloop.core.artifacts import Artifact, Draft, Manifest
from tuneloop.core.errors import UserError
from tuneloop.formats.facts import (
    CheckpointFacts,
    LineageFacts,
    PromptFacts,
    RewardFacts,
    TrainerState,
)

STATE = {"format": 1, "stage": "policy_update", "step": 7, "betas": [0.9, 0.99], "digest": "d"}


def commit_facts(url: Path, **facts: Any) -> Artifact:
    Draft(str(url)).commit(stage="policy_update", facts=facts)
    return Artifact(str(url))


def test_facts_are_read_by_type(tmp_path: Path) -> None:
    policy = commit_facts(
        tmp_path / "p", version=3, trainer_state=STATE, save_dtype="bfloat16", x=1
    )
    facts = CheckpointFacts.read(policy)
    assert facts == CheckpointFacts.read(policy.manifest)
    assert (facts.version, facts.save_dtype, facts.base) == (3, "bfloat16", None)
    assert facts.trainer_state == TrainerState(
        "policy_update", step=7, betas=[0.9, 0.99], digest="d"
    )


def test_facts_have_their_defaults_where_an_artifact_does_not_state_them(tmp_path: Path) -> None:
    prompts = commit_facts(tmp_path / "p", drop_at_most=0)
    assert PromptFacts.read(prompts).length_policy.share == 0
    assert PromptFacts.read(prompts).history == "as-rendered"
    assert LineageFacts.read(prompts).trainer_state is None


@pytest.mark.parametrize(
    ("facts", "problem"),
    [
        ({}, "does not state its version; give a checkpoint"),
        ({"version": None}, "states None as its version, and input should be a valid integer"),
        ({"version": 1, "save_dtype": 16}, "states 16 as its save_dtype"),
        (
            {"version": 1, "trainer_state": {"stage": "sft"}},
            "does not state its trainer_state.step",
        ),
        (
            {"version": 1, "trainer_state": {**STATE, "step": "7"}},
            "states '7' as its trainer_state.step",
        ),
    ],
)
def test_a_wrong_fact_is_named_with_its_artifact(
    tmp_path: Path, facts: dict[str, Any], problem: str
) -> None:
    policy = commit_facts(tmp_path / "p", **facts)
    with pytest.raises(UserError) as caught:
        CheckpointFacts.read(policy, "--policy")
    text = str(caught.value)
    assert text.startswith(f"--policy: '{policy.url}': ") and problem in text
    assert "\n" not in text
    with pytest.raises(UserError, match=r"^artifact: 'p'"):
        CheckpointFacts.read(policy.manifest)


def test_rollouts_that_do_not_say_how_they_were_sampled_are_refused(tmp_path: Path) -> None:
    rewards = commit_facts(tmp_path / "r", version=1, digest="d", sampling={"n": 8})
    with pytest.raises(
        UserError, match=r"does not state its sampling\.temperature; give the output"
    ):
        RewardFacts.read(rewards, "--rewards")


def test_reading_facts_does_not_change_what_a_manifest_states(tmp_path: Path) -> None:
    """The digest of an artifact is of the facts as the stage left them, unknown ones included."""
    policy = commit_facts(tmp_path / "p", version=3, unknown={"b": 1, "a": [1.0, 2]})
    stored = json.loads((tmp_path / "p" / "manifest.json").read_text())
    CheckpointFacts.read(policy)
    assert policy.manifest.facts == stored["facts"]
    assert Manifest.model_validate(stored).compute_digest() == policy.manifest.digest
