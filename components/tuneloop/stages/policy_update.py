"""Improve the policy on a batch of scored rollouts."""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import AfterValidator, Field, ValidationInfo

from tuneloop.algorithms._objective import Completions, PolicyGradient
from tuneloop.algorithms._terms import estimate_kl
from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import UNTRACKED, Input, OptionalInput, Params, Results, Stage
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.provenance import collect_provenance
from tuneloop.formats.carried import pass_carried
from tuneloop.training import checkpoint, epochs
from tuneloop.training.lora import disable_adapters
from tuneloop.training.options import Optimization, TrainerOptions
from tuneloop.training.policy_gradient import Objective
from tuneloop.training.samples import Sample, check_ids, check_sampling, read_samples, select_groups
from tuneloop.weights.publication import Weights

if TYPE_CHECKING:
    from tuneloop.training.fsdp.policy import Policy
    from tuneloop.training.fsdp.ranks import Ranks
    from tuneloop.training.fsdp.trainer import Trainer


def _check_schedule(max_steps: int, info: ValidationInfo) -> int:
    if info.data.get("lr_scheduler_type", "constant") != "constant" and not max_steps:
        raise ValueError(f"the schedule {info.data['lr_scheduler_type']} must know where it ends")
    return max_steps


class PolicyUpdateOptions(TrainerOptions):
    """Options of a trainer on rollouts."""

    flags: ClassVar[tuple[str, ...]] = (
        *(
            "learning_rate",
            "warmup_steps",
            "lr_scheduler_type",
            "max_steps",
            "adam_beta1",
            "adam_beta2",
        ),
        *(
            "weight_decay",
            "max_grad_norm",
            "updates_per_batch",
            "per_device_train_batch_size",
            "max_staleness",
        ),
        *(
            "packing",
            "gradient_checkpointing",
            "lora",
            "cpu_offload",
            "torch_compile",
            "use_liger_kernel",
        ),
        *(
            "dtype",
            "save_dtype",
            "attn_implementation",
            "device",
            "state_every",
            "save_total_limit",
            "keep_every",
        ),
        "expected_world_size",
    )

    learning_rate: float = Field(5e-4, gt=0)
    warmup_steps: int = Field(5, ge=0, description="counted over all iterations")
    max_steps: Annotated[int, AfterValidator(_check_schedule)] = Field(
        0,
        ge=0,
        description="of all iterations: where linear and cosine schedules reach 0",
        validate_default=True,
    )
    updates_per_batch: int = Field(
        1,
        ge=1,
        description="optimizer steps: the groups are split into so many mini-batches, each used once",
    )
    per_device_train_batch_size: int = Field(128, ge=1, description="rollouts in a micro-batch")
    max_staleness: int = Field(
        0, ge=0, description="versions that rollouts may be older than the policy"
    )
    state_every: int = Field(
        1,
        ge=1,
        description="iterations between writes of the trainer's state, which else is kept in memory, or replayed",
        json_schema_extra=UNTRACKED,
    )
    save_total_limit: int | None = Field(
        None,
        ge=2,
        description="newest checkpoints of the loop to keep, with all that continuing from them needs; none: all",
        json_schema_extra=UNTRACKED,
    )
    keep_every: int | None = Field(
        None,
        ge=2,
        description="iterations between models that stay, without the trainer's state, when save_total_limit passes on",
        json_schema_extra=UNTRACKED,
    )


@checkpoint.checkpoint_stage(loss=float, version=int)
def policy_update(
    stage: Stage,
    policy: Input,
    rewards: Input,
    reference: OptionalInput,
    *,
    iteration: Annotated[
        int, Field(ge=0, description="of the loop, and part of each random stream's name")
    ] = 0,
    algorithm: Annotated[
        epochs.AlgorithmName,
        epochs.validate_kind(PolicyGradient),
        Field(description="grpo, dr_grpo, dapo, gspo, cispo, rloo, …, or pkg.mod:attr"),
    ] = "grpo",
    algorithm_args: epochs.AlgorithmArgs = {},  # noqa: B006
    options: PolicyUpdateOptions,
    reset_optimizer: Annotated[
        bool, Field(description="begin with a new optimizer and new adapters")
    ] = False,
    weights: Weights = None,
    seed: int = 0,
) -> Results:
    """Take policy gradient steps on scored rollouts; docs/training.md has the algorithms and their options.

    Only rollouts with the outcome ``score`` count: in baselines, in the loss and in its mean. A rollout without an
    advantage has no gradient: it counts in the mean, but does not go through the model (unless `beta` is set).
    If no rollout has an advantage, no step is taken and the next version has the same parameters (``facts.skipped``).
    If the rollouts have ``facts.groups``, only the first `wanted` groups whose scores differ are used, and the stage's
    own ``facts.groups`` and metrics count the others. If there are fewer such groups, all are used, with at most one
    step for each.

    The optimizer continues from the checkpoint's state if `policy_update` wrote that with the same betas;
    after `sft` or `base_model` it starts fresh, and so does the warm-up.

    That state is committed separately, after the checkpoint, while later stages of the same process run; the next
    update waits for it. With `state_every` above 1 it is written only in iterations that `state_every` divides. Between
    these it is kept in memory, and a process that does not have it repeats the updates since the last write, from the
    committed rewards (`notes.replayed`). It is not written when a pod ends, or on SIGTERM: pods end after multiples of
    a number `loop.iterations_per_pod`, so give `state_every` the same number; if a pod ends at another time, the
    updates are replayed.

    Raises:
        UserError: the rollouts are of another policy, older than `max_staleness` allows, or sampled at temperature 0;
            a column is missing; `beta` is set without a reference; updates cannot be repeated to the same bits.
        Interrupted: on SIGTERM. Nothing is kept: a retry begins anew.
    """
    ranks = checkpoint.open_ranks(stage, options)
    about: dict[str, Any] = {
        "iteration": iteration,
        "reset_optimizer": reset_optimizer,
        "options": options,
    }
    about |= {"algorithm": algorithm, "algorithm_args": algorithm_args}
    trainer, losses = train_policy(stage, ranks, policy, rewards, reference, **about)
    checkpoint.release_device(stage, trainer)
    version = checkpoint.write_checkpoint(
        stage, trainer, policy, options.save_dtype, state_as="facts"
    )
    if stage.leader:
        pass_carried(rewards, stage.out)
    due = iteration % options.state_every == 0
    stage.notes["state"] = "due" if due else "not due"
    if due:
        about = {"kind": "trainer-state", "facts": stage.facts[checkpoint.STATE_FACT]}
        stage.commit_later(checkpoint.STATE, lambda path: trainer.save(path / "trainer"), **about)
    checkpoint.RESIDENT.keep(trainer, stage.attempt, options)
    return {"loss": sum(losses) / len(losses) if losses else 0.0, "version": version}


def train_policy(
    stage: Stage,
    ranks: Ranks,
    policy: Artifact,
    rewards: Artifact,
    reference: Artifact | None,
    *,
    iteration: int,
    algorithm: str,
    algorithm_args: dict[str, Any],
    options: PolicyUpdateOptions,
    reset_optimizer: bool,
    **_: Any,
) -> tuple[Trainer, list[float]]:
    """Train on the rewards with the parameters of `policy_update`, and return the trainer and each step's loss."""
    objective = epochs.open_algorithm(algorithm, algorithm_args, PolicyGradient)
    if objective.beta and reference is None:
        raise UserError(
            "algorithm_args.beta", objective.beta, "needs --reference, a checkpoint; or set it to 0"
        )
    temperature = check_sampling(policy, rewards, options.max_staleness)
    samples = read_samples(rewards, int(policy.manifest.facts["version"]), options.max_staleness)
    with stage.timed("load"):
        trainer, optimizer = open_trainer(stage, policy, ranks, options, reset_optimizer)
        samples, updates = keep_groups(
            stage, rewards, samples, options.updates_per_batch, trainer.step
        )
        check_ids(samples, trainer.vocab_size)
        trainer.max_length = max((len(sample.document.ids) for sample in samples), default=1)
        stage.facts.update(trainer.chosen(), optimizer=optimizer)
        stage.facts["objective"] = {"algorithm": algorithm, **objective.model_dump()}
    learner = Objective(stage, objective, temperature, options.per_device_train_batch_size)
    scored = [
        sample for sample in samples if sample.score is not None and sample.document.target_count
    ]
    if objective.beta and reference is not None:
        with stage.timed("reference"), open_reference_policy(reference, trainer, options) as frozen:
            learner.score(frozen, scored, "reference")
    in_reward = bool(objective.beta) and objective.kl_in == "reward"
    if in_reward:
        with stage.timed("old_logprobs"):
            learner.score(trainer, scored, "old")
    if samples:
        set_advantages(objective, samples)
    if updates > 1 and not in_reward:
        with stage.timed("old_logprobs"):
            learner.score(trainer, [sample for sample in samples if sample.used], "old")
    losses = take_steps(stage, trainer, learner, samples, updates, watch=iteration <= 1)
    _report(stage, samples, iteration, len(losses))
    return trainer, losses


def keep_groups(
    stage: Stage, rewards: Artifact, samples: list[Sample], updates: int, step: int
) -> tuple[list[Sample], int]:
    """Keep the groups that the update uses, if more were sampled, and at most one of the `updates` for each group;
    record how many groups were kept, and how many were not."""
    sampled = rewards.manifest.facts.get("groups")
    if sampled is None:
        return samples, updates
    samples, counts = select_groups(samples, sampled["wanted"])
    stage.facts["groups"] = counts
    stage.log("groups: " + ", ".join(f"{count} {name}" for name, count in counts.items()))
    stage.metric(step, **{f"groups_{name}": count for name, count in counts.items()})
    return samples, min(updates, counts["kept"])


def open_trainer(
    stage: Stage, policy: Artifact, ranks: Ranks, options: PolicyUpdateOptions, reset: bool
) -> tuple[Trainer, str]:
    """Open the trainer of `policy`, and say where the optimizer's state comes from.

    Adapters continue with that state; if it is fresh, new ones begin, over the model with the old ones merged. If this
    process wrote `policy`, its trainer is used again (`checkpoint.RESIDENT`). If it did not, and the state was not
    written, the updates since the last written state are repeated.
    """
    from tuneloop.training.fsdp.trainer import Trainer

    optimization, about = options.optimization, options.model_options
    kept, same = checkpoint.RESIDENT.take(policy, options)
    state, written = checkpoint.trainer_state(policy), checkpoint.find_state(policy)
    (missed,) = ranks.max([float(written is None)])
    written = (
        None if missed else written
    )  # the same for all ranks, also where it is committed just now
    fresh = explain_fresh_state(state, optimization, about, reset)
    if not (fresh or written or kept):
        replay_updates(stage, policy, ranks)
        kept, same = checkpoint.RESIDENT.take(policy, options)
    if kept and same and not reset:
        kept.since = policy.ref if written else kept.since
        return kept, f"carried on from step {kept.step}"
    kept = None if fresh or written else kept  # two trainers at once may not fit into memory
    base = checkpoint.lora_base(policy) if not fresh and about["lora"] else policy
    trainer: Trainer = epochs.new_trainer(stage, Trainer, base, ranks, optimization, about)
    trainer.since = kept.since if kept else policy.ref
    if fresh or trainer.lora:
        checkpoint.load_masters(trainer, base)
    if fresh or state is None:
        return trainer, f"fresh: {fresh}"
    if kept:
        trainer.copy_state(kept)
    elif written:
        trainer.load(written.part("trainer"), state["step"])
        same = (
            policy.manifest.notes.get("world_size") == ranks.world
        )  # else it is sharded differently
        if (
            same
            and "digest" in state
            and (found := trainer.compute_state_digest()) != state["digest"]
        ):
            raise Corrupt(
                "artifact", written.url, f"holds the state {found}, {state['digest']} was committed"
            )
    return trainer, f"carried on from step {state['step']}"


def replay_updates(stage: Stage, policy: Artifact, ranks: Ranks) -> None:
    """Repeat the updates since the last checkpoint with the trainer's state, until `RESIDENT` holds that of `policy`.

    Each has the inputs and parameters that its manifest names, and is verified by the digest of the state. Raises
    UserError if one of these is missing or has changed, or the result has other bits."""
    made = policy
    try:
        chain = [policy]
        while (before := chain[0].manifest.inputs["policy"]) != policy.manifest.notes[
            checkpoint.SINCE
        ]:
            chain.insert(0, Artifact(before))
        told = {"from_version": chain[0].manifest.facts["version"] - 1, "updates": len(chain)}
        stage.log(f"the trainer's state is replayed: {told}")
        with stage.timed("replay"):
            for made in chain:
                repeat_update(stage, made, ranks)
    except UserError as error:
        remedy = f"has no trainer's state, and iteration {made.manifest.facts['iteration']} cannot be replayed: {error}"
        raise UserError("--policy", policy.url, remedy) from error
    stage.notes["replayed"] = told


def repeat_update(stage: Stage, made: Artifact, ranks: Ranks) -> None:
    """Repeat the update that made a checkpoint, and verify that the result has the same bits."""
    theirs, ours = made.manifest.provenance, collect_provenance(0.0, ranks.world)
    differ = {
        name: (theirs.get(name), ours[name]) for name in ("world_size", "device", "threads", "code")
    }
    differ["torch"] = (theirs["packages"]["torch"], ours["packages"]["torch"])
    told = ", ".join(f"{name} {then} then, {now} now" for name, (then, now) in differ.items())
    remedy = f"({told}); continue where it was made, or begin another run at a checkpoint that has its state"
    if theirs["world_size"] != ranks.world:
        found = f"the update was made by {theirs['world_size']} processes, and another number gives other bits"
        raise UserError("--expected-world-size", ranks.world, f"{found} {remedy}")
    params = policy_update.validate(made.manifest.params)
    arguments = policy_update.build_arguments(
        params, {k: Artifact(ref) for k, ref in made.manifest.inputs.items()}
    )
    with tempfile.TemporaryDirectory() as scratch, _as_before(stage, params, Path(scratch)):
        trainer, _ = train_policy(stage, ranks, **arguments)
    wanted = made.manifest.facts[checkpoint.STATE_FACT]["digest"]
    if (found := trainer.compute_state_digest()) != wanted:
        raise UserError("trainer's state", found, f"{wanted} was committed {remedy}")
    checkpoint.RESIDENT.keep(trainer, made.manifest.root, arguments["options"])


@contextmanager
def _as_before(stage: Stage, params: Params, out: Path) -> Iterator[None]:
    """Give `stage` the parameters of another update while the block runs; that update's files and facts are dropped."""
    own = {name: getattr(stage, name) for name in ("params", "out", "facts", "notes", "timings")}
    vars(stage).update(params=params, out=out, facts={}, notes={}, timings={})
    try:
        yield
    finally:
        vars(stage).update(own)


def explain_fresh_state(
    state: Mapping[str, Any] | None,
    optimization: Optimization,
    about: Mapping[str, Any],
    reset: bool,
) -> str | None:
    """Say why the optimizer cannot continue from ``trainer/state.json``; None if it can."""
    if state is None:
        return "the checkpoint has no trainer state"
    if reset:
        return "reset_optimizer"
    lora = about["lora"] and about["lora"].model_dump(mode="json")
    if state["stage"] != policy_update.name or state["betas"] != [
        optimization.adam_beta1,
        optimization.adam_beta2,
    ]:
        return f"{state['stage']} wrote it with betas {state['betas']}"
    return None if state.get("lora") == lora else f"it was written with lora {state.get('lora')}"


def take_steps(
    stage: Stage,
    trainer: Trainer,
    learner: Objective,
    samples: Sequence[Sample],
    updates: int,
    *,
    watch: bool,
) -> list[float]:
    """Take an optimizer step on each mini-batch that has a gradient; return the losses.

    Args:
        updates: mini-batches.
        watch: measure the communication of the last step; done once in a loop, as profiling is slow.
    """
    losses = []
    with stage.timed("train"):
        batches = [
            part
            for part in split_mini_batches(stage, samples, updates)
            if any(sample.used for sample in part)
        ]
        for number, batch in enumerate(batches, start=1):
            with trainer.watched() if watch and number == len(batches) else nullcontext():
                losses.append(learner.step(trainer, batch))
    tokens = sum(len(sample.document.ids) for sample in samples if sample.used)
    stage.timings["tokens_per_s"] = tokens / stage.timings["train"]
    stage.notes["efficiency"] = trainer.efficiency(stage.timings["tokens_per_s"])
    return losses


def set_advantages(algorithm: PolicyGradient, samples: Sequence[Sample]) -> None:
    """Set the advantages of all samples, and with them which of them count and which are used."""
    import torch

    targets = torch.tensor([s.document.target_count for s in samples])
    kl = None
    if algorithm.beta and algorithm.kl_in == "reward":
        nothing = [[0.0] * s.document.target_count for s in samples]
        old, reference = (
            torch.tensor(
                [v for s, zeros in zip(samples, nothing) for v in getattr(s, name) or zeros]
            )
            for name in ("old", "reference")
        )
        kl = estimate_kl(old, reference, algorithm.kl_estimator)
    values = algorithm.advantages(
        Completions(
            rewards=torch.tensor([0.0 if s.score is None else s.score for s in samples]),
            groups=torch.tensor([s.group for s in samples]),
            valid=torch.tensor([s.score is not None for s in samples]),
            lengths=torch.tensor([s.length for s in samples]),
            targets=targets,
            kl=kl,
        )
    )
    for sample, part in zip(samples, values.split(targets.tolist())):
        sample.advantages = array("f", part.tolist())
        teaches = bool(part.any()) or bool(algorithm.beta and algorithm.kl_in == "loss")
        taken = sample.score is not None and not (
            algorithm.mask_truncated_completions and sample.truncated
        )
        sample.counted = taken and (teaches or not algorithm.dynamic_sampling)
        sample.used = taken and teaches and bool(sample.document.target_count)


def split_mini_batches(stage: Stage, samples: Sequence[Sample], count: int) -> list[list[Sample]]:
    """Split scored samples into `count` parts of whole groups, in random order. Raises UserError: too few groups."""
    import torch

    groups = sorted({sample.group for sample in samples})
    if count > len(groups):
        raise UserError(
            "--updates-per-batch",
            count,
            f"is more than the {len(groups)} groups of rollouts; lower it",
        )
    shuffle = torch.randperm(
        len(groups), generator=torch.Generator().manual_seed(stage.seed("mini_batches"))
    ).tolist()
    part = {groups[place]: k % count for k, place in enumerate(shuffle)}
    return [
        [s for s in samples if part[s.group] == k and s.score is not None] for k in range(count)
    ]


@contextmanager
def open_reference_policy(
    reference: Artifact, trainer: Trainer, options: PolicyUpdateOptions
) -> Iterator[Policy]:
    """Open the reference for scoring: another model, or the trainer's own without adapters, if only these differ."""
    from tuneloop.training.fsdp.policy import Policy

    if trainer.lora and trainer.base.manifest.digest == reference.manifest.digest:
        with disable_adapters(trainer.model):
            yield trainer
        return
    policy = Policy(
        checkpoint.model_dir(reference), trainer.ranks, **{**options.model_options, "lora": None}
    )
    policy.max_length = trainer.max_length
    checkpoint.load_masters(policy, reference)
    yield policy


def _report(stage: Stage, samples: Sequence[Sample], iteration: int, steps: int) -> None:
    scored = [sample for sample in samples if sample.score is not None]
    used = [sample for sample in samples if sample.used]
    counts = {"rollouts": len(samples), "scored": len(scored), "used": len(used), "updates": steps}
    stage.facts.update(counts, iteration=iteration)
    if not steps:
        why = (
            "no rollout has a score"
            if samples and not scored
            else "in every group all rewards are equal"
        )
        stage.facts["skipped"] = f"{why}: no step taken, same parameters"
    stage.log(
        stage.facts.get("skipped") or f"{steps} steps on {len(used)} of {len(samples)} rollouts"
    )


if __name__ == "__main__":
    policy_update.main()
