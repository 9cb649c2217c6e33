"""What is stored of each checkpoint of a run: its model, and the trainer's state to go on from.

A stage outside the loop has the state among its own files. A checkpoint of the loop has it in an
artifact below it, where one was written, and retention deletes the files of old checkpoints."""

from collections.abc import Collection
from dataclasses import dataclass

from tuneloop.core.artifacts import Manifest, find_manifest
from tuneloop.core.store import Store
from tuneloop.runs.run_record import Run
from tuneloop.training.old_checkpoints import STATE

MODEL = "model"
TRAINER = "trainer"


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes that are stored of a checkpoint.

    Attributes:
        model: of the weights and the tokenizer; 0 if there are none any more.
        trainer_state: of the optimizer's state and float32 parameters; 0 if there is none.
        is_pruned: whether the checkpoint had a model, and retention has deleted it.
    """

    model: int
    trainer_state: int
    is_pruned: bool


def measure_checkpoints(run: Run) -> dict[str, CheckpointSize]:
    """Measure what is stored of a run's checkpoints, by one listing of its files: key → size.

    The bytes of a file are those that its manifest states: `audit` says whether they are there.

    Raises:
        Corrupt: a manifest was changed since it was committed.
    """
    stored = Store(run.url).stat().keys()
    sizes: dict[str, CheckpointSize] = {}
    for entry in run.checkpoints:
        model_bytes = _sum_stored(entry.manifest, entry.path, MODEL, stored)
        state_bytes = _sum_stored(entry.manifest, entry.path, TRAINER, stored)
        state = find_manifest(f"{run.url}/{entry.key}/{STATE}")
        if state:
            folder = f"{entry.key}/{STATE}/{state.root}"
            state_bytes += _sum_stored(state, folder, TRAINER, stored)
        sizes[entry.key] = CheckpointSize(
            model=model_bytes,
            trainer_state=state_bytes,
            is_pruned=bool(entry.model_bytes) and not model_bytes,
        )
    return sizes


def _sum_stored(manifest: Manifest, folder: str, part: str, stored: Collection[str]) -> int:
    """Sum the bytes of those files of a part that are stored below `folder`, a key."""
    return sum(
        file.size
        for name, file in manifest.files.items()
        if name.startswith(f"{part}/") and f"{folder}/{name}" in stored
    )
