"""Where the trainer of `policy_update` takes the optimizer's state from: there are four places.

`stages/policy_update.py: open_trainer` matches on the result. The order is: reset or another
optimizer, the trainer in memory, the committed state, and last the replay of updates. A class that
is added to `StateSource` needs a case there. Tests: `tests/unit/stages/test_replay.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Corrupt
from tuneloop.formats.facts import TrainerState
from tuneloop.training import checkpoint
from tuneloop.training.checkpoint import Resident
from tuneloop.training.options import TrainerOptions

if TYPE_CHECKING:
    from tuneloop.training.fsdp.ranks import Ranks
    from tuneloop.training.fsdp.trainer import Trainer


@dataclass(frozen=True)
class Fresh:
    """The optimizer begins anew, and so do adapters. The `reason` becomes a fact, for people."""

    reason: str


@dataclass(frozen=True)
class Committed:
    """The state was written: `artifact` has its tensors."""

    state: TrainerState
    artifact: Artifact


@dataclass(frozen=True)
class Missing:
    """The state is neither in memory nor written: the updates since the last one have to be
    repeated.
    """


StateSource = Fresh | Resident | Committed | Missing


def find_state_source(
    policy: Artifact,
    options: TrainerOptions,
    ranks: Ranks,
    stage_name: str,
    *,
    reset: bool,
) -> StateSource:
    """Find where the state of the trainer that made `policy` is; called by all ranks.

    The trainer that this process holds is taken from `checkpoint.RESIDENT`, and is dropped if
    something else is the source: two trainers at once may not fit into memory.

    Args:
        policy: the checkpoint to continue from.
        stage_name: the stage that must have written the state; another one has other optimizers.
        reset: begin anew in any case.

    Raises:
        Corrupt: the artifact with the state belongs to another checkpoint.
    """
    resident = checkpoint.RESIDENT.take(policy, options)
    artifact = checkpoint.find_state(policy)
    # It may be committed at this moment, and all ranks must come to the same answer.
    (is_missing_somewhere,) = ranks.max([float(artifact is None)])
    if is_missing_somewhere:
        artifact = None
    state = checkpoint.trainer_state(policy)
    if state is None:
        return Fresh("the checkpoint has no trainer state")
    reason = explain_fresh_state(state, options, stage_name, reset=reset)
    if reason:
        return Fresh(reason)
    if resident and resident.has_same_options:
        if artifact:
            resident.trainer.since = policy.ref
        return resident
    if artifact:
        return Committed(state, artifact)
    return resident or Missing()


def explain_fresh_state(
    state: TrainerState,
    options: TrainerOptions,
    stage_name: str,
    *,
    reset: bool,
) -> str:
    """Say why the optimizer cannot continue from this state; empty if it can.

    Only what `formats/facts.py: TrainerState` has can be compared. The reason becomes
    ``facts.optimizer``; a run goes on with a fresh optimizer, and does not stop.
    """
    if reset:
        return "reset_optimizer"
    # Moments are means over past gradients, by the betas.
    betas = [options.adam_beta1, options.adam_beta2]
    if state.stage != stage_name or state.betas != betas:
        return f"{state.stage} wrote it with betas {state.betas}"
    lora = options.lora.model_dump(mode="json") if options.lora else None
    if state.lora != lora:
        return f"it was written with lora {state.lora}"
    return ""


def load_committed_state(
    trainer: Trainer,
    source: Committed,
    policy: Artifact,
    ranks: Ranks,
) -> None:
    """Load the state that was written behind `policy`, and verify its digest; called by all ranks.

    Raises:
        Corrupt: the tensors are not those that `policy` states.
    """
    state = source.state
    trainer.load(source.artifact.part("trainer"), state.step)
    # The digest is over the shards of each rank: another number of ranks has another digest.
    if state.digest is None or policy.manifest.notes.get("world_size") != ranks.world:
        return
    digest = trainer.compute_state_digest()
    if digest != state.digest:
        raise Corrupt(
            "artifact",
            source.artifact.url,
            f"holds the state {digest}, {state.digest} was committed",
        )
