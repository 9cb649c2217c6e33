"""From pairs to a policy that prefers, and to a reward model that scores rollouts."""

import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

from tests.making import checkpoint_artifact, commit, lease_of, rewards_artifact, rollout_rows
from tuneloop.algorithms._preference import Judged
from tuneloop.algorithms.dpo import Algorithm as Dpo
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import Interrupted, UserError
from tuneloop.stages.data_prep import data_prep
from tuneloop.stages.model_reward import model_reward
from tuneloop.stages.preference import Learner, preference
from tuneloop.stages.reference_logprobs import reference_logprobs
from tuneloop.stages.reward_model import reward_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Artifact:
    return checkpoint_artifact(tmp_path_factory.mktemp("policy") / "p", dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Artifact:
    """Letters of the first half of the alphabet are better than those of the second; half of the pairs are held out."""
    return pairs_of(tmp_path_factory.mktemp("prompts"), 0)


def pairs_of(folder: Path, seed: int) -> Artifact:
    rng = random.Random(seed)
    halves = ("abcdefghijklm", "nopqrstuvwxyz")
    words = [
        ["".join(rng.choices(half, k=rng.randint(2, 5))) for half in halves] for _ in range(80)
    ]
    rows = [
        {"prompt": f"say {i} =", "chosen": f" {a}", "rejected": f" {b}"}
        for i, (a, b) in enumerate(words)
    ]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sizes = {"train": 0, "eval": 0, "sft": 0, "preference": 40, "preference_eval": 40}
    data_prep(out=str(folder / "p"), source=str(folder / "pairs.jsonl"), **sizes)
    return Artifact(str(folder / "p"))


@pytest.fixture(scope="module")
def logprobs(policy, prompts, tmp_path_factory) -> Artifact:
    path = tmp_path_factory.mktemp("logprobs") / "l"
    about = {"policy": policy.ref, "prompts": prompts.ref}
    reference_logprobs(out=str(path), **about, mismatched_pairs=True, device="cpu", max_length=64)
    return Artifact(str(path))


def train(stage: Any, out: Path, policy: Artifact, prompts: Artifact, **options: Any) -> Artifact:
    options = {
        "max_steps": 12,
        "warmup_steps": 0,
        "learning_rate": 3e-3,
        "device": "cpu",
        "max_length": 64,
        **options,
    }
    stage(out=str(out), policy=policy.ref, prompts=prompts.ref, **options)
    return Artifact(str(out))


def rows(artifact: Artifact) -> list[dict[str, float]]:
    return [json.loads(line) for line in (artifact.path / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["dpo", "ipo", "kto"])
def test_held_out_pairs_are_put_in_order(policy, prompts, logprobs, tmp_path, algorithm):
    found = train(
        preference, tmp_path / "o", policy, prompts, logprobs=logprobs.ref, algorithm=algorithm
    )
    before, after = found.manifest.facts["accuracy_before"], found.manifest.results["accuracy"]
    assert before < 0.8 < after, (before, after)
    first, last = rows(found)[0], rows(found)[-1]
    assert first["rewards/margins"] == pytest.approx(
        0, abs=1e-4
    )  # at first the policy is its own reference
    assert last["loss"] < first["loss"] and last["rewards/margins"] > 0
    assert (
        found.manifest.facts["version"] == 1
        and found.manifest.facts["reference"] == policy.manifest.digest
    )


@pytest.mark.parametrize("algorithm", ["dpo", "kto"])
def test_layouts_give_the_same_steps(policy, prompts, logprobs, tmp_path, algorithm):
    about = {"logprobs": logprobs.ref, "algorithm": algorithm, "max_steps": 3}
    cut = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "packing": "packed"}
    one = train(
        preference, tmp_path / "a", policy, prompts, per_device_train_batch_size=12, **about
    )
    two = train(preference, tmp_path / "b", policy, prompts, **cut, **about)
    for a, b in zip(rows(one), rows(two), strict=True):
        if a["step"] == 1:  # margins of 0: rounding puts pairs in order
            del a["rewards/accuracies"], b["rewards/accuracies"]
        assert b == pytest.approx(a, rel=2e-3, abs=1e-4)


def test_a_step_that_hears_sigterm_ends_in_a_resume_point(
    policy, prompts, logprobs, tmp_path, monkeypatch
):
    step = Learner.step

    def told(self: Learner, prepared: Any) -> Any:
        if self.trainer.step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, prepared)

    monkeypatch.setattr(Learner, "step", told)
    with pytest.raises(Interrupted):
        train(
            preference,
            tmp_path / "o",
            policy,
            prompts,
            logprobs=logprobs.ref,
            algorithm="kto",
            max_steps=4,
        )
    assert Artifact(str(tmp_path / "o/resume/00000003")).manifest.facts["step"] == 3


def test_smoothed_labels_by_hand():
    judged = Judged(torch.tensor([2.0, 1.0]), torch.tensor([3, 3]), torch.tensor(0.0))
    found = Dpo(beta=1.0, label_smoothing=0.1).loss(judged)
    sure, wrong = (-torch.tensor([x]).sigmoid().log() for x in (1.0, -1.0))
    torch.testing.assert_close(found, 0.9 * sure + 0.1 * wrong)


def test_a_reward_model_scores_rollouts(policy, prompts, tmp_path):
    scorer = train(reward_model, tmp_path / "s", policy, prompts)
    assert scorer.manifest.results["accuracy"] > 0.8
    assert (
        scorer.manifest.results["loss"] < rows(scorer)[0]["loss"] == pytest.approx(0.6931, abs=1e-3)
    )
    pair = pq.read_table(prompts.path / "preference_eval.parquet").to_pylist()[0]
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    words = AutoTokenizer.from_pretrained(policy.path / "model")
    samples = rollout_rows(policy, 1, 3)
    for sample, said in zip(samples, (pair["chosen"], pair["rejected"], "")):
        sample["prompt_ids"] = words(pair["prompt"])["input_ids"]
        sample["completion_ids"] = [*words(said)["input_ids"], words.eos_token_id]
    samples[2] |= {"outcome": "timeout", "score": None, "breakdown": '{"exact": "slow"}'}
    judged = rewards_artifact(tmp_path / "r", policy, samples)
    model_reward(
        out=str(tmp_path / "o"), rollouts=judged.ref, scorer=scorer.ref, weight=2.0, device="cpu"
    )
    found = pq.read_table(Artifact(str(tmp_path / "o")).path / "rewards.parquet").to_pylist()
    opened = AutoModelForSequenceClassification.from_pretrained(
        scorer.path / "model", dtype=torch.float32
    )
    for row, sample in zip(found[:2], samples):
        ids = torch.tensor([sample["prompt_ids"] + sample["completion_ids"]])
        with torch.no_grad():
            wanted = float(opened(input_ids=ids).logits)
        assert json.loads(row["breakdown"])["model"] == pytest.approx(wanted, abs=1e-4)
        assert row["score"] == pytest.approx(sample["score"] + 2 * wanted, abs=1e-3)
    assert found[2]["score"] is None and found[2]["outcome"] == "timeout"
    assert json.loads(found[0]["breakdown"])["model"] > json.loads(found[1]["breakdown"])["model"]


def test_a_reference_of_other_mismatched_pairs_is_refused(policy, tmp_path):
    rows = [
        {"prompt": f"say {i} =", "chosen": " a" * (20 if i == 5 else 1), "rejected": " b"}
        for i in range(12)
    ]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    sizes = {"train": 0, "eval": 0, "sft": 0, "preference": 12, "preference_eval": 0}
    data_prep(out=str(tmp_path / "p"), source=str(tmp_path / "pairs.jsonl"), **sizes)
    prompts = Artifact(str(tmp_path / "p"))
    inputs = {"policy": policy.ref, "prompts": prompts.ref}
    reference_logprobs(
        out=str(tmp_path / "l"), **inputs, mismatched_pairs=True, device="cpu", max_length=64
    )
    options = {"logprobs": str(tmp_path / "l"), "max_length": 32, "max_steps": 1}
    # The pair that only the reference has stands before another one, whose own tokens are the same.
    train(preference, tmp_path / "dpo", policy, prompts, algorithm="dpo", **options)
    with pytest.raises(UserError, match="another completion behind its prompt"):
        train(preference, tmp_path / "kto", policy, prompts, algorithm="kto", **options)


def test_bad_input(policy, prompts, logprobs, tmp_path):
    def bad(
        match: str, stage: Any = preference, prompts: Artifact = prompts, **options: Any
    ) -> None:
        about = {} if stage is reward_model else {"logprobs": logprobs.ref}
        with pytest.raises(UserError, match=match):
            train(stage, tmp_path / "o", policy, prompts, **{**about, **options})

    bad("algorithm: 'grpo': learns from rewards", algorithm="grpo")
    bad("algorithm_args.beta", algorithm_args={"beta": 0})
    bad("40 of 40 rows.*prompt of .* over the max_length 8", max_length=8)
    (tmp_path / "others").mkdir()
    bad("has other tokens for it", prompts=pairs_of(tmp_path / "others", 1))
    draft = Draft(str(tmp_path / "plain"), attempt="data-test")
    table = pq.read_table(logprobs.path / "preference.parquet")
    pq.write_table(
        table.drop_columns(["tokens_kl", "chosen_kl", "rejected_kl"]),
        draft.path / "preference.parquet",
    )
    plain = commit(tmp_path / "plain", "reference_logprobs", digest=policy.manifest.digest)
    bad("set reference_logprobs' mismatched_pairs", algorithm="kto", logprobs=plain.ref)
    bad("holds no preference.parquet; set data_prep's", reward_model, prompts=policy)


def test_the_device_is_given_back_before_anything_is_written(
    policy, prompts, logprobs, tmp_path, monkeypatch
):
    with lease_of(tmp_path, monkeypatch) as check_released:
        found = train(
            preference,
            tmp_path / "out",
            policy,
            prompts,
            logprobs=logprobs.ref,
            weights=str(tmp_path / "weights"),
        )
        check_released(found, tmp_path / "weights")
    assert (
        train(
            preference, tmp_path / "alone", policy, prompts, logprobs=logprobs.ref
        ).manifest.digest
        == found.manifest.digest
    ), "the same as without a lease"
