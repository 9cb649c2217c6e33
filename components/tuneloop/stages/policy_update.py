"""Improve the policy on a batch of scored rollouts.

The stage only orders the parts: where the state comes from (`training/state_sources.py`), which
samples count (`training/mini_batches.py`), steps (`training/policy_gradient.py`), and what is
written (`training/checkpoint.py`). Every function here is called by all ranks.

Tests: `tests/unit/stages/test_policy_update.py`, `test_replay.py`, `test_parts.py`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import AfterValidator, Field, ValidationInfo

from tuneloop.algorithms._objective import PolicyGradient
from tuneloop.core.artifacts import Artifact
from tuneloop.core.component import UNTRACKED, Input, OptionalInput, Params, Results, Stage
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.provenance import collect_provenance
from tuneloop.core.wording import format_count
from tuneloop.formats.carried import pass_carried
from tuneloop.formats.facts import CheckpointFacts
from tuneloop.training import algorithm_lookup, checkpoint, epochs
from tuneloop.training.checkpoint import Resident
from tuneloop.training.lora import disable_adapters
from tuneloop.training.mini_batches import keep_groups, set_advantages, split_mini_batches
from tuneloop.training.old_checkpoints import KEEP_EVERY, delete_old_checkpoints
from tuneloop.training.options import LEARNING_RATE_TEXT, TrainerOptions
from tuneloop.training.policy_gradient import Objective
from tuneloop.training.samples import Sample, check_ids, check_sampling, read_samples
from tuneloop.training.state_sources import (
    Committed,
    Fresh,
    Missing,
    find_state_source,
    load_committed_state,
)
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
    """Options of a trainer on rollouts.

    Attributes:
        flags: the options that this stage has; a field of this or the base class that is not named
            here is no parameter. The order is that in which values are checked: `max_steps` needs
            `lr_scheduler_type` before it.
    """

    flags: ClassVar[tuple[str, ...]] = (
        "learning_rate",
        "warmup_steps",
        "lr_scheduler_type",
        "max_steps",
        "adam_beta1",
        "adam_beta2",
        "weight_decay",
        "max_grad_norm",
        "updates_per_batch",
        "per_device_train_batch_size",
        "max_staleness",
        "packing",
        "gradient_checkpointing",
        "lora",
        "cpu_offload",
        "torch_compile",
        "use_liger_kernel",
        "dtype",
        "save_dtype",
        "attn_implementation",
        "device",
        "state_every",
        "save_total_limit",
        "keep_every",
        "expected_world_size",
    )

    learning_rate: float = Field(5e-4, gt=0, description=LEARNING_RATE_TEXT)
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
        description="optimizer steps: the groups are split into so many mini-batches, each used "
        "once",
    )
    per_device_train_batch_size: int = Field(128, ge=1, description="rollouts in a micro-batch")
    max_staleness: int = Field(
        0, ge=0, description="versions that rollouts may be older than the policy"
    )
    # `training/old_checkpoints.py` deletes by the last two; `planning/disk.py` and
    # `planning/checkpoint_size.py` compute sizes from all three.
    state_every: int = Field(
        1,
        ge=1,
        description="iterations between writes of the trainer's state, which else is kept in "
        "memory, or replayed",
        json_schema_extra=UNTRACKED,
    )
    save_total_limit: int | None = Field(
        None,
        ge=2,
        description="newest checkpoints of the loop to keep, with all that continuing from them "
        "needs; none: all",
        json_schema_extra=UNTRACKED,
    )
    keep_every: int | None = Field(
        None,
        ge=2,
        description="iterations between models that stay, without the trainer's state, when "
        "save_total_limit passes on",
        json_schema_extra=UNTRACKED,
    )


@checkpoint.checkpoint_stage(delete_old_checkpoints, loss=float, version=int)
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
        algorithm_lookup.AlgorithmName,
        algorithm_lookup.validate_kind(PolicyGradient),
        Field(description="grpo, dr_grpo, dapo, gspo, cispo, rloo, …, or pkg.mod:attr"),
    ] = "grpo",
    algorithm_args: algorithm_lookup.AlgorithmArgs = {},  # noqa: B006
    options: PolicyUpdateOptions,
    reset_optimizer: Annotated[
        bool, Field(description="begin with a new optimizer and new adapters")
    ] = False,
    weights: Weights = None,
    seed: int = 0,
) -> Results:
    """Take policy gradient steps on scored rollouts; docs/training.md has the algorithms and their
    options.

    Only rollouts with the outcome ``score`` count: in baselines, in the loss and in its mean. A
    rollout without an advantage has no gradient: it counts in the mean, but does not go through the
    model (unless `beta` is set). If no rollout has an advantage, no step is taken and the next
    version has the same parameters (``facts.skipped``). If the rollouts have ``facts.groups``, only
    the first `wanted` groups whose scores differ are used, and the stage's own ``facts.groups`` and
    metrics count the others. If there are fewer such groups, all are used, with at most one step
    for each.

    The optimizer continues from the checkpoint's state if `policy_update` wrote that with the same
    betas; after `sft` or `base_model` it starts fresh, and so does the warm-up.

    That state is committed separately, after the checkpoint, while later stages of the same process
    run; the next update waits for it. With `state_every` above 1 it is written only in iterations
    that `state_every` divides. Between these it is kept in memory, and a process that does not have
    it repeats the updates since the last write, from the committed rewards (`notes.replayed`). It
    is not written when a pod ends, or on SIGTERM: pods end after multiples of a number
    `loop.iterations_per_pod`, so give `state_every` the same number; if a pod ends at another time,
    the updates are replayed.

    Raises:
        UserError: the rollouts are of another policy, older than `max_staleness` allows, or sampled
            at temperature 0; a column is missing; `beta` is set without a reference; updates cannot
            be repeated to the same bits.
        Interrupted: on SIGTERM. Nothing is kept: a retry begins anew.
    """
    ranks = checkpoint.open_ranks(stage, options)
    trainer, losses = train_policy(
        stage,
        ranks,
        policy,
        rewards,
        reference,
        iteration=iteration,
        algorithm=algorithm,
        algorithm_args=algorithm_args,
        options=options,
        reset_optimizer=reset_optimizer,
    )
    checkpoint.release_device(stage, trainer)
    version = checkpoint.write_checkpoint(
        stage, trainer, policy, options.save_dtype, state_as="facts"
    )
    if stage.leader:
        pass_carried(rewards, stage.out)
    is_due = iteration % options.state_every == 0
    stage.notes["state"] = "due" if is_due else "not due"
    if options.keep_every:
        stage.notes[KEEP_EVERY] = options.keep_every
    if is_due:
        commit_state_later(stage, trainer)
    checkpoint.RESIDENT.keep(trainer, stage.attempt, options)
    return {"loss": sum(losses) / len(losses) if losses else 0.0, "version": version}


def commit_state_later(stage: Stage, trainer: Trainer) -> None:
    """Commit the trainer's state below the checkpoint, once that is committed."""
    # The next rollout, which needs only the model, samples meanwhile.
    stage.commit_later(
        checkpoint.STATE,
        lambda path: trainer.save(path / "trainer"),
        kind="trainer-state",
        facts=stage.facts[checkpoint.STATE_FACT],
    )


def train_policy(
    stage: Stage,
    ranks: Ranks,
    policy: Artifact,
    rewards: Artifact,
    reference: Artifact | None,
    *,
    iteration: int,
    algorithm: str,
    algorithm_args: JsonObject,
    options: PolicyUpdateOptions,
    reset_optimizer: bool,
) -> tuple[Trainer, list[float]]:
    """Train on the rewards with the parameters of `policy_update`; called by all ranks.

    Returns:
        The trainer, and the loss of each optimizer step.

    Raises:
        UserError, Interrupted: as `policy_update`.
    """
    objective = algorithm_lookup.open_algorithm(algorithm, algorithm_args, PolicyGradient)
    if objective.beta and reference is None:
        raise UserError(
            "algorithm_args.beta", objective.beta, "needs --reference, a checkpoint; or set it to 0"
        )
    # All checks of the rollouts come before the model is loaded.
    temperature = check_sampling(policy, rewards, options.max_staleness)
    version = CheckpointFacts.read(policy, "--policy").version
    samples = read_samples(rewards, version, options.max_staleness)
    with stage.timed("load"):
        trainer, origin = open_trainer(stage, policy, ranks, options, reset=reset_optimizer)
        samples, updates = keep_groups(
            stage, rewards, samples, options.updates_per_batch, trainer.step
        )
        check_ids(samples, trainer.vocab_size)
        # Packed rows are as long as the longest sample, which is known only now.
        trainer.max_length = max((len(sample.document.ids) for sample in samples), default=1)
        stage.facts.update(trainer.chosen(), optimizer=origin)
        stage.facts["objective"] = {"algorithm": algorithm} | objective.model_dump()
    learner = Objective(stage, objective, temperature, options.per_device_train_batch_size)
    score_samples(stage, trainer, learner, samples, reference, options, updates)
    losses = take_steps(stage, trainer, learner, samples, updates, watch=iteration <= 1)
    _report(stage, samples, iteration, len(losses))
    return trainer, losses


def score_samples(
    stage: Stage,
    trainer: Trainer,
    learner: Objective,
    samples: list[Sample],
    reference: Artifact | None,
    options: PolicyUpdateOptions,
    updates: int,
) -> None:
    """Set what the algorithm needs of all samples: log-probabilities by other policies, advantages."""
    algorithm = learner.algorithm
    scored = [
        sample for sample in samples if sample.score is not None and sample.document.target_count
    ]
    if algorithm.beta and reference is not None:
        with stage.timed("reference"), open_reference_policy(reference, trainer, options) as frozen:
            learner.score(frozen, scored, "reference")
    # A KL term in the reward is part of the advantages, so that it is needed before these.
    has_kl_in_reward = bool(algorithm.beta) and algorithm.kl_in == "reward"
    if has_kl_in_reward:
        with stage.timed("old_logprobs"):
            learner.score(trainer, scored, "old")
    if samples:
        set_advantages(algorithm, samples)
    # Before the first of several steps only: the log-probabilities of a single step are its own.
    if updates > 1 and not has_kl_in_reward:
        with stage.timed("old_logprobs"):
            learner.score(trainer, [sample for sample in samples if sample.used], "old")


def open_trainer(
    stage: Stage, policy: Artifact, ranks: Ranks, options: PolicyUpdateOptions, *, reset: bool
) -> tuple[Trainer, str]:
    """Open the trainer of `policy`, and say where the optimizer's state comes from.

    Adapters continue with that state; if it is fresh, new ones begin, over the model with the old
    ones merged. If this process wrote `policy`, its trainer is used again (`checkpoint.RESIDENT`).
    If it did not, and the state was not written, the updates since the last written state are
    repeated.
    """
    source = find_state_source(policy, options, ranks, stage.name, reset=reset)
    match source:
        case Fresh(reason):
            trainer = new_trainer(stage, policy, ranks, options)
            checkpoint.load_masters(trainer, policy)
            trainer.since = policy.ref
            return trainer, f"fresh: {reason}"
        case Resident() if source.has_same_options:
            trainer = source.trainer
        case Resident():
            # The user has changed the options: a new trainer takes over the state.
            trainer = continue_trainer(stage, policy, ranks, options)
            trainer.copy_state(source.trainer)
            trainer.since = source.trainer.since
        case Committed():
            trainer = continue_trainer(stage, policy, ranks, options)
            load_committed_state(trainer, source, policy, ranks)
            trainer.since = policy.ref
        case Missing():
            replay_updates(stage, policy, ranks)
            # The replay leaves its trainer in `RESIDENT`.
            return open_trainer(stage, policy, ranks, options, reset=reset)
    return trainer, f"carried on from step {trainer.step}"


def new_trainer(
    stage: Stage, base: Artifact, ranks: Ranks, options: PolicyUpdateOptions
) -> Trainer:
    """Make a trainer of the model in `base`; its masters and the optimizer's state are still to be
    set.
    """
    from tuneloop.training.fsdp.trainer import Trainer

    return epochs.new_trainer(stage, Trainer, base, ranks, options)


def continue_trainer(
    stage: Stage, policy: Artifact, ranks: Ranks, options: PolicyUpdateOptions
) -> Trainer:
    """Make a trainer whose parameters are going to be those of a state of `policy`.

    With adapters the state has only these, and the frozen parameters are those of their base.
    """
    if not options.lora:
        return new_trainer(stage, policy, ranks, options)
    base = checkpoint.lora_base(policy)
    trainer = new_trainer(stage, base, ranks, options)
    checkpoint.load_masters(trainer, base)
    return trainer


def replay_updates(stage: Stage, policy: Artifact, ranks: Ranks) -> None:
    """Repeat the updates since the last checkpoint with the trainer's state.

    Each has the inputs and parameters that its manifest names, and is verified by the digest of the
    state. At the end `RESIDENT` holds the trainer of `policy`. `runs/replay.py` repeats a whole
    stage of any kind, to prove it: a second way, with which this has no code in common.

    Raises:
        UserError: an input is missing or has changed, or the result has other bits.
    """
    version = CheckpointFacts.read(policy).version
    repeated = policy
    try:
        chain = [policy]
        # Back to the checkpoint whose state was read last, then forwards.
        while chain[0].manifest.inputs["policy"] != policy.manifest.notes[checkpoint.SINCE]:
            chain.insert(0, Artifact(chain[0].manifest.inputs["policy"]))
        summary = {"from_version": version - len(chain), "updates": len(chain)}
        stage.log(f"the trainer's state is replayed: {summary}")
        with stage.timed("replay"):
            for repeated in chain:
                repeat_update(stage, repeated, ranks)
    except UserError as error:
        iteration = CheckpointFacts.read(repeated).iteration
        remedy = f"has no trainer's state, and iteration {iteration} cannot be replayed: {error}"
        raise UserError("--policy", policy.url, remedy) from error
    stage.notes["replayed"] = summary


def repeat_update(stage: Stage, repeated: Artifact, ranks: Ranks) -> None:
    """Repeat the update that made a checkpoint, and verify that the result has the same bits.

    Raises:
        UserError: the number of processes is another one, or the result has other bits.
    """
    remedy = (
        f"({describe_machines(repeated, ranks)}); continue where it was made, or begin another run "
        "at a checkpoint that has its state"
    )
    world_size = repeated.manifest.provenance["world_size"]
    if world_size != ranks.world:
        processes = format_count(world_size, "process", "processes")
        problem = f"the update was made by {processes}, and another number gives other bits"
        raise UserError("--expected-world-size", ranks.world, f"{problem} {remedy}")
    # A checkpoint of an earlier release may state parameters that the stage no longer has. Whether
    # the update is the same without them, the digest below tells.
    names = policy_update.Params.model_fields.keys()
    committed = repeated.manifest.params
    params = policy_update.validate({name: committed[name] for name in names & committed.keys()})
    inputs = {name: Artifact(ref) for name, ref in repeated.manifest.inputs.items()}
    arguments = policy_update.build_arguments(params, inputs)
    # The scratch stage has the seed among its parameters; where the user publishes has no
    # influence on the update. Any other parameter of `policy_update` is one of `train_policy`.
    unused = {"weights", "seed"}
    used = {name: value for name, value in arguments.items() if name not in unused}
    with tempfile.TemporaryDirectory() as scratch, _scratch_stage(stage, params, Path(scratch)):
        trainer, _ = train_policy(stage, ranks, **used)
    state = CheckpointFacts.read(repeated).trainer_state
    committed_digest = state.digest if state else None
    digest = trainer.compute_state_digest()
    if digest != committed_digest:
        raise UserError("trainer's state", digest, f"{committed_digest} was committed {remedy}")
    checkpoint.RESIDENT.keep(trainer, repeated.manifest.root, arguments["options"])


def describe_machines(repeated: Artifact, ranks: Ranks) -> str:
    """Describe what decides an update's bits, where a checkpoint was made and here."""
    theirs = repeated.manifest.provenance
    ours = collect_provenance(0.0, ranks.world)
    pairs = {
        name: (theirs.get(name), ours[name]) for name in ("world_size", "device", "threads", "code")
    }
    pairs["torch"] = (theirs["packages"]["torch"], ours["packages"]["torch"])
    return ", ".join(
        f"{name} {former} then, {current} now" for name, (former, current) in pairs.items()
    )


@contextmanager
def _scratch_stage(stage: Stage, params: Params, out: Path) -> Iterator[None]:
    """Give `stage` the parameters of another update while the block runs.

    That update's files, facts, notes and timings are dropped. It is the same object, since a signal
    sets its `stopping`: another field of `Stage` that a stage fills has to be saved here, too.
    """
    saved = replace(stage)
    stage.params = params
    stage.out = out
    stage.facts = {}
    stage.notes = {}
    stage.timings = {}
    try:
        yield
    finally:
        stage.params = saved.params
        stage.out = saved.out
        stage.facts = saved.facts
        stage.notes = saved.notes
        stage.timings = saved.timings


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
        watch: measure the communication of the last step; done once in a loop, as profiling is
            slow.
    """
    losses: list[float] = []
    with stage.timed("train"):
        # A mini-batch without a gradient would only move the moments and the schedule.
        batches = [
            batch
            for batch in split_mini_batches(stage, samples, updates)
            if any(sample.used for sample in batch)
        ]
        for number, batch in enumerate(batches, start=1):
            is_watched = watch and number == len(batches)
            with trainer.watched() if is_watched else nullcontext():
                losses.append(learner.step(trainer, batch))
    tokens = sum(len(sample.document.ids) for sample in samples if sample.used)
    stage.timings["tokens_per_s"] = tokens / stage.timings["train"]
    stage.notes["efficiency"] = trainer.efficiency(stage.timings["tokens_per_s"])
    return losses


@contextmanager
def open_reference_policy(
    reference: Artifact, trainer: Trainer, options: PolicyUpdateOptions
) -> Iterator[Policy]:
    """Open the reference for scoring: another model, or the trainer's own without adapters, if only
    these differ.
    """
    from tuneloop.training.fsdp.policy import Policy

    if trainer.lora and trainer.base.manifest.digest == reference.manifest.digest:
        with disable_adapters(trainer.model):
            yield trainer
        return
    # A reference is scored as a whole model: its adapters, if any, are merged into model/.
    model_options = options.model_options | {"lora": None}
    policy = Policy(checkpoint.model_dir(reference), trainer.ranks, **model_options)
    policy.max_length = trainer.max_length
    checkpoint.load_masters(policy, reference)
    yield policy


def _report(stage: Stage, samples: Sequence[Sample], iteration: int, steps: int) -> None:
    """Record how many rollouts counted, and say why no step was taken, if none was."""
    scored = [sample for sample in samples if sample.score is not None]
    used = [sample for sample in samples if sample.used]
    stage.facts.update(
        rollouts=len(samples),
        scored=len(scored),
        used=len(used),
        updates=steps,
        iteration=iteration,
    )
    if steps:
        stage.log(
            f"{format_count(steps, 'step')} on {len(used)} of {format_count(len(samples), 'rollout')}"
        )
        return
    reason = "in every group all rewards are equal"
    if samples and not scored:
        reason = "no rollout has a score"
    stage.facts["skipped"] = f"{reason}: no step taken, same parameters"
    stage.log(stage.facts["skipped"])


if __name__ == "__main__":
    policy_update.main()
