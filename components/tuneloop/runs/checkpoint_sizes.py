"""What is stored of each checkpoint of a run: its model, and the trainer's state to go on from.

A stage outside the loop has the state among its own files. A checkpoint of the loop has it in an
artifact below it, where one was written, and retention deletes the files of old checkpoints."""

from collections import Counter
from dataclasses import dataclass

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
    """Measure what is stored of a run's checkpoints, by one listing of its files: key → size."""
    bytes_by_folder: Counter[str] = Counter()
    for key, (size, _) in Store(run.url).stat().items():
        parts = key.split("/")
        # A file counts for all folders above it, as `sft`, `sft/data-1` and `sft/data-1/model`.
        for depth in range(1, len(parts)):
            bytes_by_folder["/".join(parts[:depth])] += size
    sizes: dict[str, CheckpointSize] = {}
    for entry in run.checkpoints:
        model_bytes = bytes_by_folder[f"{entry.path}/{MODEL}"]
        own_state = bytes_by_folder[f"{entry.path}/{TRAINER}"]
        sizes[entry.key] = CheckpointSize(
            model=model_bytes,
            trainer_state=own_state + bytes_by_folder[f"{entry.key}/{STATE}"],
            is_pruned=bool(entry.model_bytes) and not model_bytes,
        )
    return sizes
