import json
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.making import (
    checkpoint_artifact,
    lease_of,
    prompts_artifact,
    rewards_artifact,
    rollout_rows,
)
from tuneloop.algorithms import _terms, dapo
from tuneloop.algorithms._objective import LossOutput, Tokens
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import Interrupted, UserError
from tuneloop.stages.policy_update import policy_update
from tuneloop.stages.sft import sft
from tuneloop.training.checkpoint import RESIDENT


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def policy(request, tmp_path_factory) -> Artifact:
    return checkpoint_artifact(tmp_path_factory.mktemp("policy") / request.param, request.param)


def run(out: Path, policy: Artifact, rewards: Artifact, **options) -> Artifact:
    """GRPO with the mean over tokens, which a dense computation is easily written for."""
    options = {"warmup_steps": 0, "device": "cpu", "save_dtype": "float32", **options}
    policy_update(out=str(out), policy=policy.ref, rewards=rewards.ref, **options)
    return Artifact(str(out))


def rows(artifact: Artifact) -> list[dict[str, float]]:
    return [json.loads(line) for line in (artifact.path / "metrics.jsonl").read_text().splitlines()]


def weights(artifact: Artifact) -> dict[str, torch.Tensor]:
    return load_file(artifact.path / "model" / "model.safetensors")


def dense(
    policy: Artifact, samples: list[dict[str, Any]], reference: Artifact | None = None, **terms
) -> tuple[float, float]:
    """Loss and gradient norm from all logits, one rollout at a time, with autograd on the formula as printed."""
    model = AutoModelForCausalLM.from_pretrained(policy.path / "model", dtype=torch.float32)
    other = reference and AutoModelForCausalLM.from_pretrained(
        reference.path / "model", dtype=torch.float32
    )
    scored = [s for s in samples if s["outcome"] == "score"]
    groups = sorted({s["group"] for s in scored})
    advantages = _terms.group_relative(
        torch.tensor([s["score"] for s in scored]),
        torch.tensor([groups.index(s["group"]) for s in scored]),
        torch.ones(len(scored), dtype=torch.bool),
        "group",
    )
    total, count = torch.tensor(0.0), 0
    for s, advantage in zip(scored, advantages):
        ids, start = torch.tensor([s["prompt_ids"] + s["completion_ids"]]), len(s["prompt_ids"])
        for t, (engine, wanted) in enumerate(zip(s["logprobs"], s["loss_mask"]), start):
            if not wanted:
                continue
            logp = model(input_ids=ids).logits[0, t - 1].log_softmax(-1)[ids[0, t]]
            weight = (logp.detach() - engine).exp().clamp(max=2.0)
            total = total - weight * (logp - logp.detach()).exp() * advantage
            if other is not None:
                x = other(input_ids=ids).logits[0, t - 1].log_softmax(-1)[ids[0, t]].detach() - logp
                total = total + terms["beta"] * (logp - logp.detach()).exp() * (x.exp() - x - 1)
            count += 1
    (total / count).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    return float(total.detach() / count), float(norm)


def test_loss_and_gradient_equal_a_dense_computation(policy, tmp_path):
    samples = rollout_rows(policy, 3, 4, gap=0.5)
    samples[0] |= {"outcome": "infra_error", "score": None}
    samples[5]["loss_mask"] = [False, *samples[5]["loss_mask"][1:]]
    found = run(tmp_path / "out", policy, rewards_artifact(tmp_path / "rewards", policy, samples))
    (row,) = rows(found)
    assert (row["loss"], row["grad_norm"]) == pytest.approx(dense(policy, samples), rel=1e-4)
    assert 0.1 < row["logprob_gap"] < row["logprob_gap_max"]
    assert 0 < row["importance_ess"] < 1
    assert row["tokens"] == sum(sum(s["loss_mask"]) for s in samples[1:])


def test_kl_term_equals_a_dense_computation(policy, tmp_path):
    arch = policy.manifest.params.get("arch") or policy.url.rsplit("/", 1)[1]
    reference = checkpoint_artifact(tmp_path / "reference", arch, seed=7)
    samples = rollout_rows(policy, 2, 3)
    for s in samples[:3]:
        s["score"] = 1.0  # a group without variance still has a KL
    found = run(
        tmp_path / "out",
        policy,
        rewards_artifact(tmp_path / "rewards", policy, samples),
        reference=reference.ref,
        algorithm_args={"beta": 0.3},
    )
    (row,) = rows(found)
    assert (row["loss"], row["grad_norm"]) == pytest.approx(
        dense(policy, samples, reference, beta=0.3), rel=1e-4
    )
    assert row["kl"] > 0


def test_temperature_comes_from_the_rollouts(policy, tmp_path):
    samples = rollout_rows(policy, 2, 4)
    model = AutoModelForCausalLM.from_pretrained(policy.path / "model", dtype=torch.float32)
    for s in samples:
        with torch.no_grad():
            logits = (
                model(input_ids=torch.tensor([s["prompt_ids"] + s["completion_ids"]])).logits[0]
                / 0.5
            )
        picked = logits.log_softmax(-1)[len(s["prompt_ids"]) - 1 : -1].gather(
            1, torch.tensor(s["completion_ids"])[:, None]
        )
        s["logprobs"] = picked[:, 0].tolist()
    rewards = rewards_artifact(tmp_path / "rewards", policy, samples, sampling={"temperature": 0.5})
    (row,) = rows(run(tmp_path / "out", policy, rewards))
    assert row["logprob_gap_max"] < 1e-4  # at any other temperature it would be near one


@pytest.mark.parametrize("options", [{"per_device_train_batch_size": 1}, {"packing": "packed"}])
def test_layouts_give_the_same_step(policy, tmp_path, options):
    rewards = rewards_artifact(tmp_path / "rewards", policy, rollout_rows(policy, gap=0.2))
    whole, cut = (
        run(tmp_path / "a", policy, rewards),
        run(tmp_path / "b", policy, rewards, **options),
    )
    (a,), (b,) = rows(whole), rows(cut)
    assert b == pytest.approx(a, rel=1e-3, abs=1e-6)


def test_good_completions_become_likelier(policy, tmp_path):
    samples = rollout_rows(policy, 4, 4)
    after = run(
        tmp_path / "out",
        policy,
        rewards_artifact(tmp_path / "rewards", policy, samples),
        updates_per_batch=2,
    )
    gain = {1.0: [], 0.0: []}
    model = AutoModelForCausalLM.from_pretrained(after.path / "model", dtype=torch.float32)
    for s in samples:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([s["prompt_ids"] + s["completion_ids"]])).logits[
                0
            ]
        ids = torch.tensor(s["completion_ids"])[:, None]
        now = logits.log_softmax(-1)[len(s["prompt_ids"]) - 1 : -1].gather(1, ids)
        gain[s["score"]].append(float(now.mean()) - sum(s["logprobs"]) / len(s["logprobs"]))
    assert sum(gain[1.0]) / len(gain[1.0]) > 0 > sum(gain[0.0]) / len(gain[0.0])


def test_several_updates_use_every_group_once_and_clip_against_the_first_policy(policy, tmp_path):
    samples = [{**s, "score": float(i % 2)} for i, s in enumerate(rollout_rows(policy, 4, 4))]
    rewards = rewards_artifact(tmp_path / "rewards", policy, samples)
    found = run(tmp_path / "out", policy, rewards, updates_per_batch=4, learning_rate=3e-2)
    steps = rows(found)
    assert sum(row["tokens"] for row in steps) == sum(len(s["completion_ids"]) for s in samples)
    assert [row["step"] for row in steps] == [1, 2, 3, 4]
    assert steps[0]["ratio"] == pytest.approx(1, abs=1e-5)
    assert all(abs(row["ratio"] - 1) > 1e-3 for row in steps[1:])
    assert any(row["clip_fraction"] > 0 for row in steps[1:])
    assert all(
        row["logprob_gap"] < 1e-3 for row in steps
    )  # engine against the old policy, not the moving one


def test_optimizer_is_carried_on_between_updates_only(tmp_path):
    base, prompts = checkpoint_artifact(tmp_path / "base"), prompts_artifact(tmp_path / "prompts")
    sft(out=str(tmp_path / "sft"), policy=base.ref, prompts=prompts.ref, max_steps=2, device="cpu")
    said, policy = [], Artifact(str(tmp_path / "sft"))
    for i, options in enumerate([{}, {}, {"reset_optimizer": True}, {"adam_beta2": 0.9}]):
        rewards = rewards_artifact(tmp_path / f"rewards{i}", policy)
        policy = run(
            tmp_path / f"update{i}", policy, rewards, warmup_steps=4, iteration=i, **options
        )
        said.append(policy.manifest.facts["optimizer"])
        assert rows(policy)[-1]["step"] == policy.manifest.facts["step"] == (2 if i == 1 else 1)
        assert rows(policy)[-1]["learning_rate"] == pytest.approx(
            5e-4 * rows(policy)[-1]["step"] / 4
        )
    assert said == [
        "fresh: sft wrote it with betas [0.9, 0.95]",
        "carried on from step 1",
        "fresh: reset_optimizer",
        "fresh: policy_update wrote it with betas [0.9, 0.99]",
    ]
    assert policy.manifest.facts["version"] == 5


def test_adapters_go_on_over_the_base_of_the_first_update(tmp_path):
    """A loop of three: from one process to the next as in one; the reference is the base, the adapters switched off."""
    base = checkpoint_artifact(tmp_path / "base")
    about: dict[str, Any] = {
        "lora": {"r": 2},
        "algorithm_args": {"beta": 0.1},
        "learning_rate": 1e-2,
        "updates_per_batch": 2,
    }
    policy = base
    for i in range(3):
        rewards = rewards_artifact(tmp_path / f"rewards{i}", policy)
        # The first finds the trainer that wrote `policy` in this process, the second does not.
        assert i == 0 or RESIDENT.attempt == policy.manifest.root
        kept, read = (
            run(tmp_path / f"{name}{i}", policy, rewards, iteration=i, reference=base.ref, **about)
            for name in ("kept", "read")
        )
        assert kept.manifest.digest == read.manifest.digest
        policy = read
        assert policy.manifest.facts["base"] == base.ref
    assert policy.manifest.facts["optimizer"] == "carried on from step 4"
    assert rows(policy)[0]["kl"] > 0
    whole = run(tmp_path / "whole", policy, rewards_artifact(tmp_path / "r", policy), iteration=3)
    assert whole.manifest.facts["optimizer"].startswith("fresh: it was written with lora {'")
    reset = run(
        tmp_path / "reset",
        policy,
        rewards_artifact(tmp_path / "s", policy),
        lora={"r": 2},
        reset_optimizer=True,
    )
    assert reset.manifest.facts["base"] == policy.ref
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(UserError, match="base checkpoint of the adapters is gone"):
        run(tmp_path / "gone", policy, rewards_artifact(tmp_path / "t", policy), lora={"r": 2})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"score": 0.5}, "all rewards are equal"),
        ({"score": None, "outcome": "timeout"}, "no rollout has a score"),
    ],
)
def test_nothing_to_learn_takes_no_step(policy, tmp_path, change, why):
    samples = [{**s, **change} for s in rollout_rows(policy)]
    found = run(
        tmp_path / "out",
        policy,
        rewards_artifact(tmp_path / "rewards", policy, samples),
        save_dtype="bfloat16",
    )
    assert why in found.manifest.facts["skipped"]
    assert found.manifest.results == {"loss": 0.0, "version": 1}
    before = weights(policy)
    assert all(value.equal(before[name]) for name, value in weights(found).items())


def test_a_failed_reward_is_not_a_zero(policy, tmp_path):
    """The batch with a failure gives the step of the batch without that row, whatever stands in its score."""
    samples = rollout_rows(policy)
    failed = [{**samples[0], "outcome": "infra_error", "score": 123.0}, *samples[1:]]
    one = run(tmp_path / "a", policy, rewards_artifact(tmp_path / "ra", policy, failed))
    two = run(tmp_path / "b", policy, rewards_artifact(tmp_path / "rb", policy, samples[1:]))
    for name, value in weights(two).items():
        torch.testing.assert_close(weights(one)[name], value)


def scored_groups(policy: Artifact, *scores: Sequence[float | None]) -> list[dict[str, Any]]:
    """Rollouts of a group for each of `scores`, which has its completions' scores, None where the judge failed."""
    each = [score for group in scores for score in group]
    outcomes = ["infra_error" if score is None else "score" for score in each]
    made = rollout_rows(policy, len(scores), 4, gap=0.2)
    return [
        {**s, "score": score, "outcome": outcome}
        for s, score, outcome in zip(made, each, outcomes, strict=True)
    ]


EQUAL, SOLVED, FAILED, ALONE = [0.0] * 4, [1.0] * 4, [None] * 4, [None, 1.0, None, None]
TELLING = [0.0, 1.0, 1.0, 0.0], [None, 0.0, 0.0, 1.0], [0.25, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "reinforce_plus_plus"])
def test_of_more_groups_than_it_needs_the_first_whose_rewards_differ_are_the_batch(
    policy, tmp_path, algorithm
):
    """Those of the places 1 and 4, in the order of requests: the update is that of a batch of these two alone."""
    first, second, unused = TELLING
    samples = scored_groups(policy, SOLVED, first, FAILED, EQUAL, second, ALONE, unused)
    kept = [*samples[4:8], *samples[16:20]]
    sampled = {"groups": {"asked": 7, "wanted": 2}}
    about: dict[str, Any] = {
        "algorithm": algorithm,
        "updates_per_batch": 2 if algorithm == "dapo" else 1,
    }
    if algorithm == "reinforce_plus_plus":
        about["algorithm_args"] = {"kl_in": "loss", "kl_estimator": "k2"}
    chosen = run(
        tmp_path / "a",
        policy,
        rewards_artifact(tmp_path / "ra", policy, samples, **sampled),
        **about,
    )
    alone = run(tmp_path / "b", policy, rewards_artifact(tmp_path / "rb", policy, kept), **about)
    counts, *steps = rows(chosen)
    assert steps == rows(alone) and len(steps) == about["updates_per_batch"]
    assert all(value.equal(weights(alone)[name]) for name, value in weights(chosen).items())
    if algorithm == "grpo":
        assert (steps[0]["loss"], steps[0]["grad_norm"]) == pytest.approx(
            dense(policy, kept), rel=1e-4
        )
    expected = {"asked": 7, "kept": 2, "rejected": 4, "unused": 1}
    assert chosen.manifest.facts["groups"] == expected
    assert counts == {"step": 0, **{f"groups_{name}": count for name, count in expected.items()}}
    assert chosen.manifest.facts["rollouts"] == 8 and "groups" not in alone.manifest.facts
    again = run(
        tmp_path / "c",
        policy,
        rewards_artifact(tmp_path / "rc", policy, samples, **sampled),
        **about,
    )
    assert again.manifest.files == chosen.manifest.files


@pytest.mark.parametrize("beta", [0.0, 0.1])
def test_where_fewer_groups_are_left_these_are_the_batch(policy, tmp_path, beta):
    """With one group it takes one of the two steps that it was asked for, and without one it takes none."""
    sampled = {"groups": {"asked": 3, "wanted": 2}}
    about: dict[str, Any] = {
        "updates_per_batch": 2,
        "algorithm_args": {"beta": beta},
        "reference": policy.ref,
    }
    one, none = (
        run(
            tmp_path / name,
            policy,
            rewards_artifact(tmp_path / f"r{name}", policy, samples, **sampled),
            **about,
        )
        for name, samples in (
            ("one", scored_groups(policy, EQUAL, TELLING[0], SOLVED)),
            ("none", scored_groups(policy, EQUAL, ALONE, SOLVED)),
        )
    )
    assert one.manifest.facts["groups"] == {"asked": 3, "kept": 1, "rejected": 2, "unused": 0}
    assert one.manifest.facts["updates"] == 1 and "skipped" not in one.manifest.facts
    assert none.manifest.facts["groups"] == {"asked": 3, "kept": 0, "rejected": 3, "unused": 0}
    assert (
        "all rewards are equal" in none.manifest.facts["skipped"]
        and none.manifest.results["loss"] == 0
    )
    assert all(value.equal(weights(policy)[name]) for name, value in weights(none).items())


def test_same_inputs_same_bytes(policy, tmp_path):
    rewards = rewards_artifact(tmp_path / "rewards", policy)
    a, b = (run(tmp_path / n, policy, rewards, updates_per_batch=2).manifest for n in "ab")
    assert a.digest == b.digest


def test_a_committed_update_stands_whoever_trains_now(policy, tmp_path):
    rewards = rewards_artifact(tmp_path / "rewards", policy, rollout_rows(policy, 2, 2))
    made = run(tmp_path / "out", policy, rewards)
    assert run(tmp_path / "out", policy, rewards, expected_world_size=8).ref == made.ref


def test_rollouts_of_another_policy_are_refused(policy, tmp_path):
    other = "sha256:" + "0" * 32
    foreign = rewards_artifact(tmp_path / "foreign", policy, digest=other)
    with pytest.raises(UserError, match=r"sampled by version 0 .*--policy is version 0"):
        run(tmp_path / "out", policy, foreign)
    with pytest.raises(
        UserError, match="sampled by version 0"
    ):  # staleness excuses age, not another run
        run(tmp_path / "out", policy, foreign, max_staleness=3)


def test_stale_rollouts_need_leave(policy, tmp_path):
    first = rewards_artifact(tmp_path / "r0", policy)
    newer = run(tmp_path / "one", policy, first)
    with pytest.raises(UserError, match="raise max_staleness"):
        run(tmp_path / "out", newer, first)
    assert run(tmp_path / "out", newer, first, max_staleness=1).manifest.facts["version"] == 2
    mixed = rollout_rows(newer)
    mixed[3]["policy_versions"][0] = 0
    with pytest.raises(UserError, match="policy_versions of i000000-p00000-s03: 0"):
        run(tmp_path / "mixed", newer, rewards_artifact(tmp_path / "r1", newer, mixed))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"logprobs": [float("nan")]}, "logprobs of i000000-p00000-s00.*finite"),
        ({"logprobs": []}, "logprobs of i000000-p00000-s00.*one a token"),
        ({"score": float("inf")}, "score of i000000-p00000-s00"),
        ({"score": None}, "score of i000000-p00000-s00"),
        ({"completion_ids": [41]}, "ids of i000000-p00000-s00: 41: must be from 0 to 40"),
        ({"prompt_ids": [5, -1]}, "ids of i000000-p00000-s00: -1: must be from 0 to 40"),
    ],
)
def test_rows_that_can_not_be(policy, tmp_path, change, match):
    samples = rollout_rows(policy, 1, 2)
    one = {"completion_ids": [5], "logprobs": [-1.0], "loss_mask": [True], "policy_versions": [0]}
    samples[0] |= one | change
    with pytest.raises(UserError, match=match):
        run(tmp_path / "out", policy, rewards_artifact(tmp_path / "rewards", policy, samples))


@pytest.mark.parametrize(("kind", "one"), [(pa.int64(), 5 + 2**32), (pa.float32(), 5.0)])
def test_ids_are_whole_numbers_of_four_bytes(policy, tmp_path, kind, one):
    """As JSON's numbers could become, if nobody looked."""
    rewards = rewards_artifact(tmp_path / "rewards", policy)
    table, draft = pq.read_table(rewards.path / "rewards.parquet"), Draft(str(tmp_path / "other"))
    at = table.schema.get_field_index("completion_ids")
    ids = table["completion_ids"].to_pylist()
    ids[0][0] = one
    table = table.set_column(at, "completion_ids", pa.array(ids, pa.list_(kind)))
    pq.write_table(table, draft.path / "rewards.parquet")
    draft.commit(stage="reward", facts=rewards.manifest.facts)
    with pytest.raises(
        UserError, match=r"ids of i000000-p00000-s00: '(float|int)64 up to .*must be int32"
    ):
        run(tmp_path / "out", policy, Artifact(draft.url))


def test_a_step_is_one_row_of_at_most_a_kilobyte_whatever_the_batch(policy, tmp_path):
    for groups in (2, 12):
        samples = [
            {**s, "score": float(i % 2)} for i, s in enumerate(rollout_rows(policy, groups, 4))
        ]
        rewards = rewards_artifact(tmp_path / f"r{groups}", policy, samples)
        found = run(tmp_path / f"o{groups}", policy, rewards, updates_per_batch=2)
        lines = (found.path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == [1, 2] and max(
            map(len, lines)
        ) <= 1024


def test_bad_input(policy, tmp_path):
    rewards, out = rewards_artifact(tmp_path / "rewards", policy), tmp_path / "out"
    for options, match in [
        ({"algorithm_args": {"beta": 0.1}}, "needs --reference"),
        ({"updates_per_batch": 9}, "4 groups"),
        ({"algorithm": "nonsense"}, "unknown; known: cispo"),
        ({"algorithm_args": {"epsilon": -1}}, "algorithm_args.epsilon"),
        (
            {"algorithm_args": {"nonsense": 1}},
            "algorithm_args.nonsense.*grpo has no such option; it has epsilon",
        ),
        ({"algorithm": "dr_grpo", "algorithm_args": {}}, "max_completion_length must be set"),
        ({"lr_scheduler_type": "cosine"}, "must know where it ends"),
        ({"expected_world_size": 2}, "1 processes are training"),
    ]:
        with pytest.raises(UserError, match=match):
            run(out, policy, rewards, **options)
    with pytest.raises(UserError, match="greedy"):
        run(out, policy, rewards_artifact(tmp_path / "greedy", policy, sampling={"temperature": 0}))
    with pytest.raises(UserError, match="has no rows"):
        run(out, policy, rewards_artifact(tmp_path / "none", policy, []))
    with pytest.raises(UserError, match="does not state its version"):
        run(
            out,
            policy,
            policy if "digest" in policy.manifest.facts else prompts_artifact(tmp_path / "prompts"),
        )
    cut = [{k: v for k, v in s.items() if k != "logprobs"} for s in rollout_rows(policy)]
    with pytest.raises(UserError, match="'logprobs': is not a column"):
        run(out, policy, rewards_artifact(tmp_path / "cut", policy, cut))
    assert not out.exists() or not any(out.iterdir())


class Stopped(dapo.Algorithm):
    """DAPO in whose first loss SIGTERM arrives."""

    def loss(self, tokens: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(tokens)


class Regularized(dapo.Algorithm):
    """DAPO with an auxiliary loss: what a sampled token costs in nats, on average."""

    def loss(self, tokens: Tokens) -> LossOutput:
        output = super().loss(tokens)
        terms = {"surprise": -0.1 * tokens.logprobs.mean()}
        return LossOutput(output.per_token, output.metrics, terms)


class RegularizedAll(Regularized):
    needs_every_completion = True


def test_an_auxiliary_loss_reaches_completions_without_an_advantage_if_it_says_so(
    policy, tmp_path, monkeypatch
):
    classes = SimpleNamespace(Regularized=Regularized, RegularizedAll=RegularizedAll)
    monkeypatch.setitem(sys.modules, "regularized", classes)
    samples = rollout_rows(policy, 3, 4)
    for position, sample in enumerate(samples):
        # The first group has equal rewards.
        sample["score"] = float(position % 2) if position >= 4 else 1.0
    rewards = rewards_artifact(tmp_path / "rewards", policy, samples)
    surprises = []
    for name in ("Regularized", "RegularizedAll"):
        out = run(tmp_path / name, policy, rewards, algorithm=f"regularized:{name}")
        (row,) = rows(out)
        surprises.append(row["surprise"])
    logprobs = [value for sample in samples for value in sample["logprobs"]]
    assert surprises[1] == pytest.approx(-0.1 * sum(logprobs) / len(logprobs), rel=1e-3)
    assert surprises[0] != pytest.approx(surprises[1], rel=1e-3)


class MisnamedTerm(dapo.Algorithm):
    """An auxiliary loss under the name of a metric."""

    def loss(self, tokens: Tokens) -> LossOutput:
        output = super().loss(tokens)
        return LossOutput(output.per_token, output.metrics, {"entropy": tokens.logprobs.mean()})


def test_an_auxiliary_loss_is_not_named_as_a_metric(policy, tmp_path, monkeypatch):
    classes = SimpleNamespace(MisnamedTerm=MisnamedTerm)
    monkeypatch.setitem(sys.modules, "misnamed", classes)
    samples = rollout_rows(policy, 2, 2)
    for position, sample in enumerate(samples):
        sample["score"] = float(position % 2)
    rewards = rewards_artifact(tmp_path / "rewards", policy, samples)
    with pytest.raises(UserError, match="'entropy', which is a metric; use another name"):
        run(tmp_path / "out", policy, rewards, algorithm="misnamed:MisnamedTerm")


def test_an_auxiliary_loss_is_the_same_however_the_batch_is_cut(policy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "regularized", SimpleNamespace(Regularized=Regularized))
    samples = rollout_rows(policy, 3, 4)
    for position, sample in enumerate(samples):
        sample["score"] = float(position % 2)  # every completion has an advantage
    rewards = rewards_artifact(tmp_path / "rewards", policy, samples)
    (plain,) = rows(run(tmp_path / "plain", policy, rewards, algorithm="dapo"))
    measured = []
    for limit in (2, 128):
        out = run(
            tmp_path / f"of-{limit}",
            policy,
            rewards,
            algorithm="regularized:Regularized",
            per_device_train_batch_size=limit,
        )
        (row,) = rows(out)
        measured.append((row["loss"], row["grad_norm"], row["surprise"]))
        assert row["surprise"] > 0.1
        assert row["loss"] - plain["loss"] == pytest.approx(row["surprise"], rel=1e-4)
    assert measured[0] == pytest.approx(measured[1], rel=1e-4)
    assert measured[1][1] != pytest.approx(plain["grad_norm"], rel=1e-3)


def test_a_signal_leaves_nothing_behind(policy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "stopped", SimpleNamespace(Stopped=Stopped))
    rewards = rewards_artifact(tmp_path / "rewards", policy)
    with pytest.raises(Interrupted):
        run(
            tmp_path / "out",
            policy,
            rewards,
            algorithm="stopped:Stopped",
            algorithm_args={},
            per_device_train_batch_size=2,
        )
    assert not any((tmp_path / "out").iterdir())


def test_the_device_is_given_back_before_anything_is_written(policy, tmp_path, monkeypatch):
    rewards = rewards_artifact(tmp_path / "rewards", policy, rollout_rows(policy, 3, 4))
    with lease_of(tmp_path, monkeypatch) as check_released:
        found = run(tmp_path / "out", policy, rewards, weights=str(tmp_path / "weights"))
        check_released(found, tmp_path / "weights")
    assert run(tmp_path / "alone", policy, rewards).manifest.digest == found.manifest.digest, (
        "the same as without a lease"
    )
