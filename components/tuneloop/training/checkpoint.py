"""Checkpoints: open one to train it, write the next version.

``model/`` is served: Hugging Face layout, in `save_dtype`. ``trainer/`` is the state from which
training continues: float32 parameters and AdamW's moments in DCP, and ``state.json`` with the stage
that wrote it, the optimizer's steps and betas. With LoRA ``model/`` has the adapters merged in,
``trainer/`` holds only them and their moments, and the frozen parameters stay in the checkpoint
that ``facts.base`` names, whose digest is ``base`` in ``state.json``. ``canary.json`` has the token
ids of the input's canary, with this version's log-probabilities. Equal tensors give equal files.

A checkpoint of `policy_update` has no ``trainer/``: ``facts.trainer_state`` has the contents of
``state.json``, with the digest of the tensors, and ``notes.state_since`` names the checkpoint from
which updates must be repeated to restore them. If they are written (``state_every``), it is as an
artifact at ``state`` below the checkpoint, committed later.

Every stage that trains a policy ends with `release_device` and `write_checkpoint`, in this order,
on all ranks: the next holder of the devices does not wait for files. `stages/reward_model.py`
writes its model itself, and the gateway (`extensions/gateway/resident.py`) calls `write_checkpoint`
alone. `policy_update` alone uses `RESIDENT`.

`tests/unit/stages/test_stored_facts.py` compares the facts of checkpoints, in their order, with
those of an earlier release.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tuneloop.core import fencing
from tuneloop.core.artifacts import (
    Artifact,
    Manifest,
    dump_canonical_json,
    find_manifest,
    get_adapter,
    split_ref,
)
from tuneloop.core.component import Component, Results, Stage, component
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.threads import BACKGROUND
from tuneloop.core.wording import format_count
from tuneloop.formats.canary import FILE as CANARY
from tuneloop.formats.canary import derive_ids, make_canary, read_canary_file
from tuneloop.formats.facts import CheckpointFacts, LineageFacts, TrainerState
from tuneloop.formats.model_files import WEIGHTS, drop_sampling_settings, read_dtype
from tuneloop.training.old_checkpoints import SINCE, STATE, STATE_FACT
from tuneloop.training.options import TrainerOptions
from tuneloop.training.protocols import ScoringPolicy
from tuneloop.weights.publication import publish_checkpoint

if TYPE_CHECKING:
    from tuneloop.training.fsdp.policy import Policy
    from tuneloop.training.fsdp.ranks import Ranks
    from tuneloop.training.fsdp.trainer import Trainer


STATE_FILE = "trainer/state.json"
"""The file of a checkpoint with a `TrainerState` (`formats/facts.py`): what is added here is added
there, with a default for older checkpoints."""
DROPPED_SETTINGS = "dropped_generation_settings"
"""The fact with the base's settings of sampling that are not handed on; `stages/export.py` passes
it on, and `formats/facts.py: LineageFacts` reads it.
"""


def checkpoint_stage(
    after_publication: Callable[[Stage, Manifest], None] | None = None, /, **results: type
) -> Callable[[Callable[..., Results]], Component]:
    """Make a stage of a function that trains a policy.

    Its checkpoint is committed, then published, perhaps as a delta to the previous version. Only
    then is `after_publication` called, which may delete that version.
    """

    def finish(stage: Stage, manifest: Manifest) -> None:
        publish_checkpoint(stage, manifest)
        if after_publication:
            after_publication(stage, manifest)

    return component(
        "checkpoint",
        image="trainer",
        accelerator=True,
        role="trainer",
        results=results,
        after=finish,
    )


def model_dir(policy: Artifact) -> Path:
    """Return the directory ``model/`` of a checkpoint.

    Raises UserError where `policy` is not one.
    """
    if "model/config.json" not in policy.manifest.files or "version" not in policy.manifest.facts:
        remedy = "holds no model/config.json and version; give it a checkpoint"
        raise UserError("checkpoint", policy.url, remedy)
    return policy.part("model")


def choose_saved_dtype(policy: Artifact, dtype: str) -> str:
    """Choose the dtype of the next version's ``model/``; ``auto`` is that of `policy`, as the base
    model came in it.
    """
    if dtype != "auto":
        return dtype
    recorded = CheckpointFacts.read(policy).save_dtype
    return recorded or read_dtype(model_dir(policy))


def trainer_state(policy: Artifact) -> TrainerState | None:
    """Read ``trainer/state.json``, or the facts that replace it; None if the policy has not been
    trained yet.
    """
    if STATE_FILE not in policy.manifest.files:
        return LineageFacts.read(policy).trainer_state
    text = policy.part(STATE_FILE).read_bytes()
    state: TrainerState = get_adapter(TrainerState).validate_json(text, strict=True)
    return state


def find_state(policy: Artifact) -> Artifact | None:
    """Find the artifact with a checkpoint's ``trainer/``: its own, or one below it; None where it
    was not written.

    Raises Corrupt where the artifact below belongs to another checkpoint.
    """
    if STATE_FILE in policy.manifest.files:
        return policy
    url = f"{policy.url}/{STATE}"
    if find_manifest(url) is None:
        return None
    artifact = Artifact(url)
    if split_ref(artifact.manifest.inputs["checkpoint"])[1] != policy.manifest.digest:
        remedy = f"is not the state behind {policy.ref}; delete it, and it is computed again"
        raise Corrupt("artifact", url, remedy)
    return artifact


def open_ranks(stage: Stage, options: TrainerOptions) -> Ranks:
    """Join the processes that train; note their device and number. `state_sources.py` reads the
    note ``world_size`` again.

    Raises UserError if these are not as required.
    """
    from tuneloop.training.fsdp.ranks import Ranks

    ranks = Ranks(options.device, options.required_world_size)
    stage.barrier = ranks.barrier
    stage.notes.update(device=ranks.device.type, world_size=ranks.world)
    if options.device == "auto" and ranks.device.type == "cpu":
        stage.notes["device_fallback"] = "no CUDA device: the CPU is used"
        stage.log("no CUDA device here: training on the CPU")
    return ranks


def check_stop(stage: Stage, policy: ScoringPolicy) -> None:
    """Raise Interrupted on all ranks if SIGTERM has reached any: if one left alone, the others
    would wait for it.
    """
    (stop,) = policy.ranks.max([float(stage.stopping)])
    # A signal that arrives after this is seen by the next check.
    if stop:
        stage.stopping = True
        stage.check_stop()


def load_masters(target: Policy, policy: Artifact) -> None:
    """Load the float32 parameters of a checkpoint; before any training, and after LoRA, there are
    only those of ``model/``.

    Raises UserError if they were not written and ``model/`` is rounded.
    """
    state = trainer_state(policy)
    # The model was opened from model/, which is all that there is in these cases.
    if state is None or state.lora:
        return
    artifact = find_state(policy)
    if artifact:
        target.load_masters(artifact.part("trainer"))
        return
    dtype = CheckpointFacts.read(policy).save_dtype
    # model/ holds the very parameters if it was not rounded.
    if dtype != "float32":
        remedy = (
            f"has no float32 parameters: its trainer's state was not written, and its model/ is "
            f"{dtype}; take a checkpoint that has its state (--state-every), or have "
            "save_dtype=float32 from the start"
        )
        raise UserError("checkpoint", policy.url, remedy)


def lora_base(policy: Artifact) -> Artifact:
    """Open the checkpoint that the adapters in ``trainer/`` belong to.

    Raises UserError if it was deleted.
    """
    base = CheckpointFacts.read(policy).base
    if base is None:
        raise UserError(
            "checkpoint",
            policy.url,
            "has no adapters; give one that was trained with lora",
        )
    try:
        return Artifact(base)
    except UserError as error:
        remedy = (
            "the base checkpoint of the adapters is gone; restore it, or begin new ones: "
            "--reset-optimizer true"
        )
        raise UserError("lora", base, remedy) from error


def release_device(stage: Stage, trainer: Trainer) -> None:
    """Release the device lease before the result is written; called by all ranks.

    On a GPU the trainer moves to the host's memory first, and stays there. Nothing happens without
    a lease, or if other stages follow in this process, which use the device again. Raises as
    `fencing.release_lease`.
    """
    if BACKGROUND.is_concurrent or not os.environ.get(fencing.VARIABLE):
        return
    # The next holder of the lease needs the GPU's memory.
    if trainer.ranks.device.type == "cuda":
        trainer.sleep()
    stage.barrier()
    stage.notes["device_released"] = time.time()
    if stage.leader:
        fencing.release_lease()


def write_checkpoint(
    stage: Stage,
    trainer: Trainer,
    policy: Artifact,
    dtype: str,
    version: int | None = None,
    state_as: Literal["files", "facts", "none"] = "files",
) -> int:
    """Write all of a checkpoint but its metrics to ``stage.out``; called by all ranks; return the
    version.

    ``model/`` is written in `dtype`, or with ``auto`` in that of `policy`; see
    `choose_saved_dtype`. Files beside the weights, such as the tokenizer, are those of `policy`,
    the checkpoint that was trained. `version` defaults to the one after `policy`'s.

    `state_as` says what becomes of the optimizer's state: ``files`` writes it as ``trainer/``,
    ``facts`` only states its digest, by which the update can be repeated and verified
    (`policy_update`), and ``none`` leaves it out, for a checkpoint that is only sampled from (the
    gateway).
    """
    source = model_dir(policy)
    dtype = choose_saved_dtype(policy, dtype)
    version = CheckpointFacts.read(policy).version + 1 if version is None else version
    with stage.timed("save"):
        if stage.leader:
            weights = shutil.ignore_patterns(*WEIGHTS)
            shutil.copytree(source, stage.out / "model", ignore=weights, dirs_exist_ok=True)
        # Sharded: each rank writes its rows of the files.
        written = trainer.export(source, stage.out / "model", dtype)
        if stage.leader:
            note_dropped_settings(stage, policy, drop_sampling_settings(stage.out / "model"))
        # Moments by other betas would be of another optimizer
        # (`state_sources.explain_fresh_state`).
        betas = [trainer.optimization.adam_beta1, trainer.optimization.adam_beta2]
        state: JsonObject = {
            "format": 1,
            "stage": stage.name,
            "step": trainer.step,
            "betas": betas,
        }
        if trainer.lora:
            state |= {
                "lora": trainer.lora.model_dump(mode="json"),
                "base": trainer.base.manifest.digest,
            }
            stage.facts["base"] = trainer.base.ref
            warn_of_unchanged(stage, trainer)
        if state_as == "facts":
            stage.facts[STATE_FACT] = state | {"digest": trainer.compute_state_digest()}
            stage.notes[SINCE] = trainer.since
        elif state_as == "files":
            trainer.save(stage.out / "trainer")
            if stage.leader:
                (stage.out / STATE_FILE).write_text(dump_canonical_json(state))
    if stage.leader:
        with stage.timed("canary"):
            write_next_canary(stage, written, policy, version)
    stage.facts.update(version=version, step=trainer.step, save_dtype=dtype)
    # Training does not change what these say of the model. Any other fact of `base_model`, or of
    # the checkpoint before, is not passed on.
    for key in ("model", "architecture", "parameters", "vocab_size"):
        if key in policy.manifest.facts:
            stage.facts[key] = policy.manifest.facts[key]
    return version


def warn_of_unchanged(stage: Stage, trainer: Trainer) -> None:
    """Say and record that the adapters are all zero, so that the model is still its base. Called by
    all ranks."""
    # A client of the gateway may write adapters before it trains them.
    if trainer.step == 0 or not trainer.is_unchanged():
        return
    stage.facts["unchanged_adapters"] = True
    targets = trainer.lora.target_modules if trainer.lora else None
    stage.log(
        f"the adapters change nothing after {format_count(trainer.step, 'step')}: no gradient reached them. This "
        f"model is its base; check that lora.target_modules ({targets!r}) names layers that take "
        "part in what is trained, that rewards differ, and the learning rate"
    )


def note_dropped_settings(stage: Stage, policy: Artifact, dropped: JsonObject) -> None:
    """Record the base's settings of sampling that a trained policy no longer has, as it was not
    trained under them.

    A process that trained the version before may still drop them, another one finds none; both
    record the same.
    """
    dropped = CheckpointFacts.read(policy).dropped_generation_settings or dropped
    if dropped:
        stage.facts[DROPPED_SETTINGS] = dropped


def write_next_canary(stage: Stage, written: Any, policy: Artifact, version: int) -> None:
    """Write the canary of a model as written, with the tokens of the checkpoint that was trained:
    they are in its vocabulary, and the two versions can be compared."""
    previous = None
    if CANARY in policy.manifest.files:
        previous = read_canary_file(policy.part(CANARY))
    ids = previous.ids if previous else derive_ids(written.config.get_text_config().vocab_size)
    text = previous.text if previous else "derived"
    # It is computed with the model that was written and not with the trainer's: it is what engines
    # load.
    canary = make_canary(written, ids, text, version=version, previous=previous)
    canary.write(stage.out / CANARY)


@dataclass(frozen=True)
class Resident:
    """A trainer that this process holds, and whether it was made with the options that are wanted."""

    trainer: Trainer
    has_same_options: bool = False


@dataclass
class ResidentTrainer:
    """The trainer that stays in memory between two updates of one process, for pods that run
    several iterations.

    It saves reading the state just written, and with ``state_every`` above 1 also writing it; no
    result depends on it. There is at most one, as a second would take the same memory. It is only
    used for an update from the checkpoint of `attempt`, which this trainer wrote, or whose update
    it repeated. It was made with `options`: an option that a `Trainer` keeps, and that is neither
    of the optimizer nor of the model, would have to be compared in `take`, too.
    """

    trainer: Trainer | None = None
    attempt: str = ""
    options: TrainerOptions | None = None

    def keep(self, trainer: Trainer, attempt: str, options: TrainerOptions) -> None:
        """Keep the trainer that wrote the checkpoint of `attempt`."""
        self.trainer = trainer
        self.attempt = attempt
        self.options = options

    def take(self, policy: Artifact, options: TrainerOptions) -> Resident | None:
        """Take the trainer that made `policy` out; drop any other one.

        The caller changes the trainer. So this first waits until its state is written, and raises
        an error of that writing.
        """
        BACKGROUND.wait()
        trainer = self.trainer
        former = self.options
        self.trainer = None
        self.options = None
        if trainer is None or former is None or self.attempt != policy.manifest.root:
            return None
        has_same_options = (
            former.optimization == options.optimization
            and former.model_options == options.model_options
        )
        return Resident(trainer, has_same_options)


RESIDENT = ResidentTrainer()
"""The resident trainer of this process."""
