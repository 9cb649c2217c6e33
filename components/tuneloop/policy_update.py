"""Improve the policy on a batch of scored rollouts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pyarrow.parquet as pq
from pydantic import Field

from tuneloop import checkpoint, plugins
from tuneloop.artifacts import Artifact
from tuneloop.component import Input, OptionalInput, Results, Stage, component
from tuneloop.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from tuneloop.trainers._batch import Document
    from tuneloop.trainers.fsdp import Policy, Ranks, Trainer

COLUMNS = (
    "request_id",
    "group",
    "prompt_ids",
    "completion_ids",
    "logprobs",
    "loss_mask",
    "policy_versions",
    "outcome",
    "score",
)


@dataclass(slots=True)
class Sample:
    """One rollout; lists hold one value a target token, in order.

    Attributes:
        group: 0 … G-1.
        score: None unless it was scored.
        engine: log-probabilities under which it was sampled.
        used: whether it goes through the model.
        old: log-probabilities by the trainer before the first step, where there are several steps.
        reference: log-probabilities of the reference policy, where there is one.
    """

    id: str
    document: Document
    group: int
    score: float | None
    engine: list[float]
    advantage: float = 0.0
    used: bool = False
    old: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)


@component("checkpoint", image="trainer", accelerator=True, results={"loss": float, "version": int})
def policy_update(
    stage: Stage,
    policy: Input,
    rewards: Input,
    reference: OptionalInput,
    *,
    iteration: Annotated[int, Field(ge=0, description="of the loop; part of every random stream's name")] = 0,
    algorithm: Annotated[str, Field(description="a module of the family algorithms, or pkg.mod:attr")] = "grpo",
    learning_rate: Annotated[float, Field(gt=0)] = 5e-4,
    warmup_steps: Annotated[int, Field(ge=0, description="counted over all iterations")] = 5,
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant",
    max_steps: Annotated[int, Field(ge=0, description="of all iterations: where linear and cosine reach 0")] = 0,
    adam_beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9,
    adam_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99,
    weight_decay: Annotated[float, Field(ge=0)] = 0.0,
    max_grad_norm: Annotated[float, Field(ge=0, description="0: no clipping")] = 1.0,
    updates_per_batch: Annotated[
        int, Field(ge=1, description="optimizer steps: the groups are split into so many mini-batches, each used once")
    ] = 1,
    per_device_train_batch_size: Annotated[int, Field(ge=1, description="rollouts in a micro-batch")] = 128,
    beta: Annotated[float, Field(ge=0, description="weight of the KL term (k3) to the reference; 0: none")] = 0.0,
    use_bias_correction_kl: Annotated[
        bool, Field(description="weigh the KL term by the ratio, so that its gradient is that of the divergence")
    ] = True,
    epsilon: Annotated[float, Field(gt=0, lt=1, description="the ratio is clipped below 1 - epsilon")] = 0.2,
    epsilon_high: Annotated[float, Field(gt=0, description="the ratio is clipped above 1 + epsilon_high")] = 0.28,
    scale_rewards: Annotated[
        Literal["group", "batch", "none"], Field(description="whose standard deviation divides advantages")
    ] = "group",
    importance_sampling_cap: Annotated[
        float, Field(ge=0, description="truncates the engine-to-trainer importance weight; 0: no correction")
    ] = 2.0,
    max_staleness: Annotated[int, Field(ge=0, description="versions that rollouts may be older than the policy")] = 0,
    packing: Annotated[
        Literal["auto", "packed", "padded"], Field(description="auto: packed on CUDA, padded on CPU")
    ] = "auto",
    dtype: Annotated[
        Literal["float32", "bfloat16"], Field(description="of the computation; parameters stay float32")
    ] = "float32",
    save_dtype: Annotated[Literal["bfloat16", "float16", "float32"], Field(description="of model/")] = "bfloat16",
    attn_implementation: Annotated[
        str, Field(description="transformers' name; auto: FlashAttention 2 where it is installed, else sdpa")
    ] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], Field(description="auto: CUDA where there is some")] = "auto",
    expected_world_size: Annotated[int | None, Field(ge=1, description="refuse to train with another")] = None,
    reset_optimizer: Annotated[bool, Field(description="forget moments and step count")] = False,
    seed: int = 0,
) -> Results:
    """Take policy gradient steps on scored rollouts; the loss is the mean over the target tokens of a mini-batch.

    Only rollouts with the outcome ``score`` count: in baselines, in the loss and in its token count. Where no reward of
    a group differs there is nothing to learn; its tokens count, but do not go through the model (unless `beta` is set).
    If that is so everywhere, no step is taken and the next version has the same parameters (``facts.skipped``).

    The optimizer goes on from the checkpoint's state if `policy_update` wrote that with the same betas;
    after `sft` or `base_model` it starts fresh, and so does the warm-up.

    Raises:
        UserError: rollouts of another policy than `policy`, older ones than `max_staleness` allows, or ones sampled
            at temperature 0; a missing column; no reference where `beta` is set.
        Interrupted: on SIGTERM. Nothing is kept: a retry begins anew.
    """
    from tuneloop.trainers.fsdp import Optimization, Trainer

    model = checkpoint.model_dir(policy)
    plugin = plugins.load("algorithms", algorithm)
    if beta and reference is None:
        raise UserError("--beta", beta, "a KL term needs --reference, a checkpoint; or set beta to 0")
    if lr_scheduler_type != "constant" and not max_steps:
        raise UserError("--max-steps", max_steps, f"the schedule {lr_scheduler_type} must know where it ends")
    temperature = check_sampling(policy, rewards, max_staleness)
    samples = read_samples(rewards, int(policy.manifest.facts["version"]), max_staleness)
    give_advantages(plugin, samples, scale_rewards)
    ranks = checkpoint.open_ranks(stage, device, expected_world_size)
    about: dict[str, Any] = {"dtype": dtype, "attn_implementation": attn_implementation, "packing": packing}
    about["max_length"] = max(len(sample.document.ids) for sample in samples)
    with stage.timed("load"):
        trainer = Trainer(
            model,
            ranks,
            Optimization(
                learning_rate,
                lr_scheduler_type,
                warmup_steps,
                max_steps,
                weight_decay,
                adam_beta1,
                adam_beta2,
                max_grad_norm,
            ),
            **about,
        )
        stage.facts.update(trainer.chosen(), optimizer=_load_state(trainer, policy, reset_optimizer))
    for sample in samples:
        sample.used = bool(sample.score is not None and sample.document.target_count and (beta or sample.advantage))
    used = [sample for sample in samples if sample.used]
    terms: dict[str, Any] = {"epsilon": epsilon, "epsilon_high": epsilon_high, "beta": beta}
    terms |= {"importance_sampling_cap": importance_sampling_cap, "use_bias_correction_kl": use_bias_correction_kl}
    objective = Objective(stage, plugin.loss, terms, temperature, per_device_train_batch_size)
    if beta and reference is not None:
        with stage.timed("reference"):
            other = _open_reference(reference, trainer, about)
            objective.score(other, used, "reference")
    if updates_per_batch > 1:
        with stage.timed("old_logprobs"):
            objective.score(trainer, used, "old")
    losses = []
    with stage.timed("train"):
        for batch in mini_batches(stage, samples, updates_per_batch):
            if any(sample.used for sample in batch):
                losses.append(objective.step(trainer, batch))
    _report(stage, samples, iteration, len(losses))
    version = checkpoint.write(stage, trainer, policy, save_dtype)
    return {"loss": sum(losses) / len(losses) if losses else 0.0, "version": version}


def check_sampling(policy: Artifact, rewards: Artifact, max_staleness: int) -> float:
    """The temperature of the rollouts, once it is sure that they can teach this policy.

    Raises:
        UserError: another policy, or one that is too old, sampled them, or it did so greedily.
    """
    facts, version = rewards.manifest.facts, policy.manifest.facts["version"]
    for name in ("version", "digest", "sampling"):
        if name not in facts:
            raise UserError("--rewards", rewards.url, f"does not say its {name}; give it what the stage reward commits")
    age = version - facts["version"]
    if facts["digest"] != policy.manifest.digest and not 0 < age <= max_staleness:
        raise UserError(
            "--rewards",
            f"{rewards.url}, sampled by version {facts['version']} ({facts['digest']})",
            f"--policy is version {version} ({policy.manifest.digest}); sample with it, or raise max_staleness",
        )
    temperature = float(facts["sampling"]["temperature"])
    if temperature <= 0:
        raise UserError(
            "sampling.temperature", temperature, "greedy rollouts have no distribution to learn from; use 1.0"
        )
    return temperature


def read_samples(rewards: Artifact, version: int, max_staleness: int) -> list[Sample]:
    """The rollouts with their scores.

    Raises:
        UserError: none, a missing column, a token of a version that is too old or newer than `version`, or values
            that can not be.
    """
    if "rewards.parquet" not in rewards.manifest.files:
        raise UserError("--rewards", rewards.url, "holds no rewards.parquet; give it what the stage reward commits")
    table = pq.ParquetFile(rewards.path / "rewards.parquet")
    for column in COLUMNS:
        if column not in table.schema_arrow.names:
            raise UserError("--rewards", column, f"is no column of {rewards.url}/rewards.parquet; run reward again")
    rows = table.read(list(COLUMNS)).to_pylist()
    if not rows:
        raise UserError("--rewards", rewards.url, "holds no rollouts; run the stage that makes them again")
    groups: dict[str, int] = {}
    return [_sample(row, groups.setdefault(row["group"], len(groups)), version, max_staleness) for row in rows]


def _sample(row: dict[str, Any], group: int, version: int, max_staleness: int) -> Sample:
    from tuneloop.trainers._batch import Document

    name, mask = row["request_id"], row["loss_mask"]
    for column in ("logprobs", "loss_mask", "policy_versions"):
        if len(row[column]) != len(row["completion_ids"]):
            raise UserError(
                f"{column} of {name}", len(row[column]), f"must be {len(row['completion_ids'])}, one a token"
            )
    engine = [value for value, wanted in zip(row["logprobs"], mask) if wanted]
    if not all(math.isfinite(value) for value in engine):
        raise UserError(f"logprobs of {name}", min(engine), "must be finite; sample with an engine that returns them")
    for token_version in row["policy_versions"]:
        if not version - max_staleness <= token_version <= version:
            remedy = f"the policy is version {version} and max_staleness {max_staleness}; sample again"
            raise UserError(f"policy_versions of {name}", token_version, remedy)
    score = row["score"] if row["outcome"] == "score" else None
    if row["outcome"] == "score" and (score is None or not math.isfinite(score)):
        raise UserError(f"score of {name}", score, "must be a finite number where outcome is score; run reward again")
    ids = row["prompt_ids"] + row["completion_ids"]
    return Sample(name, Document(ids, [False] * len(row["prompt_ids"]) + mask), group, score, engine)


def give_advantages(plugin: Any, samples: Sequence[Sample], scale_rewards: str) -> None:
    """Set every sample's advantage."""
    import torch

    values = plugin.advantages(
        torch.tensor([0.0 if s.score is None else s.score for s in samples]),
        torch.tensor([s.group for s in samples]),
        torch.tensor([s.score is not None for s in samples]),
        scale_rewards=scale_rewards,
    )
    for sample, value in zip(samples, values.tolist()):
        sample.advantage = value


def mini_batches(stage: Stage, samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """Split the scored samples into `count` parts of whole groups, dealt in random order.

    Raises:
        UserError: there are fewer groups.
    """
    import torch

    groups = sorted({sample.group for sample in samples})
    if count > len(groups):
        raise UserError("--updates-per-batch", count, f"there are {len(groups)} groups of rollouts; take that at most")
    shuffle = torch.randperm(len(groups), generator=torch.Generator().manual_seed(stage.seed("mini_batches"))).tolist()
    part = {groups[place]: k % count for k, place in enumerate(shuffle)}
    return [[s for s in samples if part[s.group] == k and s.score is not None] for k in range(count)]


@dataclass(frozen=True)
class Objective:
    """What is minimised: an algorithm's loss with its settings, over at most `limit` rollouts at once."""

    stage: Stage
    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    terms: dict[str, Any]
    temperature: float
    limit: int

    def score(self, policy: Policy, samples: Sequence[Sample], name: Literal["old", "reference"]) -> None:
        """Set `name` of all samples to the log-probabilities under `policy`, on every rank."""
        found: dict[int, list[float]] = {}
        with policy.frozen():
            for micro in policy.plan([s.document for s in samples], self.limit):
                self._check_stop(policy)
                values, _ = policy.logprobs([samples[i].document for i in micro], self.temperature)
                parts = values.split([samples[i].document.target_count for i in micro])
                found |= {i: part.tolist() for i, part in zip(micro, parts)}
        for i, logprobs in policy.ranks.merge(found).items():
            setattr(samples[i], name, logprobs)

    def step(self, trainer: Trainer, batch: Sequence[Sample]) -> float:
        """One optimizer step on a mini-batch; its loss. Measures go to the stage's metrics."""
        import torch

        tokens = sum(sample.document.target_count for sample in batch)
        used = [sample for sample in batch if sample.used]
        torch.manual_seed(self.stage.seed("dropout", trainer.step, self.stage.rank))
        tally = Tally(trainer.ranks)
        for micro in trainer.plan([s.document for s in used], self.limit):
            self._check_stop(trainer)
            loss, measures = self._forward(trainer, [used[i] for i in micro])
            (loss.sum() / tokens).backward()
            tally.add(loss=loss.detach(), **measures)
        norm, rate = trainer.update()
        measured = tally.result()
        loss = measured.pop("loss") * tally.count / tokens
        self.stage.metric(
            trainer.step,
            loss=loss,
            grad_norm=norm,
            learning_rate=rate,
            tokens=tokens,
            used=len(used) / len(batch),
            mean_reward=sum(s.score or 0.0 for s in batch) / len(batch),
            **measured,
        )
        return loss

    def _forward(self, trainer: Trainer, samples: Sequence[Sample]) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        def column(name: str) -> Tensor:
            values = [value for sample in samples for value in getattr(sample, name)]
            return torch.tensor(values, dtype=torch.float32, device=trainer.ranks.device)

        logprobs, entropy = trainer.logprobs([s.document for s in samples], self.temperature)
        several = any(sample.old for sample in samples)
        each = [value for s in samples for value in [s.advantage] * s.document.target_count]
        loss, measures = self.loss(
            logprobs,
            column("old") if several else logprobs.detach(),
            torch.tensor(each, dtype=torch.float32, device=trainer.ranks.device),
            engine_logprobs=column("engine"),
            reference_logprobs=column("reference") if self.terms["beta"] else None,
            **self.terms,
        )
        return loss, {**measures, "entropy": entropy}

    def _check_stop(self, policy: Policy) -> None:
        """Stop together: a rank that left alone would leave the others waiting."""
        self.stage.stopping = bool(policy.ranks.max([float(self.stage.stopping)])[0])
        self.stage.check_stop()


class Tally:
    """Gathers measures of tokens over micro-batches and ranks.

    Attributes:
        count: tokens, once `result` was called.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.count = ranks, 0
        self.parts: dict[str, list[Tensor]] = {}

    def add(self, **measures: Tensor) -> None:
        """One value a token."""
        for name, values in measures.items():
            self.parts.setdefault(name, []).append(values.double().cpu())

    def result(self) -> dict[str, float]:
        """The mean of each, ``logprob_gap_max``, and ``importance_ess``: effective sample size over token count.

        That is ``(Σw)² / (n Σw²)`` (Kish).
        """
        import torch

        whole = {name: torch.cat(parts) for name, parts in self.parts.items()}
        count, *sums = self.ranks.sum([float(len(whole["loss"])), *(float(values.sum()) for values in whole.values())])
        self.count = round(count)
        result = {name: total / count for name, total in zip(whole, sums)}
        if "logprob_gap" in whole:
            gap, weight = whole["logprob_gap"], whole["importance_weight"]
            (result["logprob_gap_max"],) = self.ranks.max([float(gap.max()) if len(gap) else 0.0])
            (squares,) = self.ranks.sum([float(weight.square().sum())])
            result["importance_ess"] = (result["importance_weight"] * count) ** 2 / (count * squares)
        return result


def _load_state(trainer: Trainer, policy: Artifact, reset: bool) -> str:
    """Put the masters in place, and the optimizer's state if it fits; says which."""
    state = checkpoint.trainer_state(policy)
    betas = [trainer.optimization.adam_beta1, trainer.optimization.adam_beta2]
    if state is None:
        return "fresh: the checkpoint has no trainer state"
    if reset or state["stage"] != "policy_update" or state["betas"] != betas:
        checkpoint.load_masters(trainer, policy)
        return "fresh: reset_optimizer" if reset else f"fresh: {state['stage']} wrote it with betas {state['betas']}"
    trainer.load(policy.path / "trainer", state["step"])
    return f"carried on from step {state['step']}"


def _open_reference(reference: Artifact, trainer: Trainer, about: dict[str, Any]) -> Policy:
    from tuneloop.trainers.fsdp import Policy

    policy = Policy(checkpoint.model_dir(reference), trainer.ranks, **about)
    checkpoint.load_masters(policy, reference)
    return policy


def _report(stage: Stage, samples: Sequence[Sample], iteration: int, steps: int) -> None:
    scored = [sample for sample in samples if sample.score is not None]
    used = [sample for sample in samples if sample.used]
    about = {
        "rollouts": len(samples),
        "scored": len(scored),
        "used": len(used),
        "updates": steps,
        "iteration": iteration,
    }
    stage.facts.update(about)
    if not steps:
        why = "no rollout has a score" if not scored else "in every group all rewards are equal"
        stage.facts["skipped"] = f"{why}: no step taken, same parameters"
    stage.log(stage.facts.get("skipped") or f"{steps} steps on {len(used)} of {len(samples)} rollouts")


if __name__ == "__main__":
    policy_update.main()
