"""The checkpoints of a run by their version, and what is stored of each: its model, and the trainer's
state to go on from.

A stage outside the loop has the state among its own files. A checkpoint of the loop has it in an
artifact below it, where one was written, and retention deletes the files of old checkpoints.

`weights ls`, `weights verify`, `generate` and the commands of provenance name a version by it.
"""

from collections.abc import Collection
from dataclasses import dataclass

from tuneloop.core.artifacts import MANIFEST
from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.runs.committed import Entry
from tuneloop.runs.run_record import Run
from tuneloop.runs.verification import find_state_entry
from tuneloop.training.old_checkpoints import STATE

SHOWN_VERSIONS = 8
"""Versions that a line lists one by one."""
MODEL = "model"
TRAINER = "trainer"
"""The folders of a checkpoint, as `training/checkpoint.py: write_checkpoint` names them.
`runs/committed.py` and `runs/delivery.py` have ``model/`` as a text of their own."""


@dataclass(frozen=True)
class StoredCheckpoint:
    """Bytes that are stored of a checkpoint.

    Attributes:
        model: of the weights and the tokenizer; 0 if there are none any more.
        trainer_state: of the optimizer's state and float32 parameters; 0 if there is none.
    """

    model: int
    trainer_state: int

    @property
    def is_pruned(self) -> bool:
        """Whether retention has deleted the model, which every checkpoint is committed with."""
        return not self.model


def find_checkpoint(run: Run, version: int | None, setting: str = "--version") -> Entry:
    """Find the checkpoint of a policy version, by default the newest.

    Where several have the same version, as before and after a stage that trains nothing, it is the
    last one that was committed.

    Args:
        run: the run that made it.
        version: the version's number; None: the newest.
        setting: by which the user named it.

    Raises:
        UserError: the run has no such version, or none at all.
    """
    if not run.checkpoints:
        raise UserError("run", run.name, "has made no version yet; see `tuneloop status`")
    if version is None:
        return run.checkpoints[-1]
    for checkpoint in reversed(run.checkpoints):
        if checkpoint.version == version:
            return checkpoint
    remedy = f"is not in {run.name}, which has {describe_versions(run)}"
    raise UserError(setting, version, f"{remedy}; see `tuneloop weights ls {run.name}`")


def describe_versions(run: Run) -> str:
    """Name the versions of a run that has some in words, of a long loop the first and the last."""
    versions = sorted({checkpoint.version for checkpoint in run.checkpoints})
    names = [f"v{version}" for version in versions]
    if len(names) > SHOWN_VERSIONS:
        names = [*names[:2], "…", names[-1]]
    return f"the versions {', '.join(names)}"


def measure_checkpoints(run: Run) -> dict[str, StoredCheckpoint]:
    """Measure what is stored of a run's checkpoints, by one listing of its files: key → bytes.

    The bytes of a file are those that its manifest states: `audit` says whether they are there.

    Raises:
        Corrupt: a manifest was changed since it was committed.
    """
    stored = Store(run.url).stat().keys()
    checkpoints: dict[str, StoredCheckpoint] = {}
    for entry in run.checkpoints:
        trained = [entry]
        # Most checkpoints of a loop have no state: the listing says so without a request for each.
        if f"{entry.key}/{STATE}/{MANIFEST}" in stored:
            state = find_state_entry(run, entry)
            if state:
                trained.append(state)
        checkpoints[entry.key] = StoredCheckpoint(
            model=_sum_stored(entry, MODEL, stored),
            trainer_state=sum(_sum_stored(part, TRAINER, stored) for part in trained),
        )
    return checkpoints


def _sum_stored(entry: Entry, part: str, stored: Collection[str]) -> int:
    """Sum the bytes of those files of a part of an artifact that are among the stored keys."""
    return sum(
        file.size
        for name, file in entry.manifest.files.items()
        if name.startswith(f"{part}/") and f"{entry.path}/{name}" in stored
    )
