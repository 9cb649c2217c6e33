"""A trainer that leaves the GPU and comes back: seconds, and the bits of one that never slept."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from benchmarks.gpu_steps.records import Step, find_device, measure_seconds
from benchmarks.gpu_steps.training import choose_shape, make_documents, make_trainer, write_model


def measure_allocated() -> int:
    import torch

    return torch.cuda.memory_allocated() if find_device() == "cuda" else 0


def run(step: Step) -> None:
    from tuneloop.core.component import Stage
    from tuneloop.formats.token_files import Document
    from tuneloop.stages.sft import train_step
    from tuneloop.training.epochs import prepare_step

    model = write_model(step.work / "model", step.small)
    data = make_documents(16, choose_shape(step.small)["vocab_size"])
    documents = [Document(ids, [t >= prompt for t in range(len(ids))]) for ids, prompt in data]
    stage = Stage("sft", SimpleNamespace(seed=0), Path(os.devnull), "", "")
    sleeper = make_trainer(model)
    other = make_trainer(model)

    def train() -> bool:
        """Take one step with both trainers, and return whether they have the same bits."""
        for trainer in (sleeper, other):
            prepared = prepare_step(trainer, lambda i: [documents[i]], range(len(documents)), 16)
            train_step(stage, trainer, prepared)
        return bool(sleeper.compute_state_digest() == other.compute_state_digest())

    equal = [train()]
    for turn in range(2):
        allocated = measure_allocated()
        away_s, _ = measure_seconds(sleeper.sleep)
        moved = allocated - measure_allocated()
        back_s, _ = measure_seconds(sleeper.wake)
        step.record(turn=turn, bytes=moved, away_s=away_s, back_s=back_s)
    equal.append(train())
    save_s, _ = measure_seconds(lambda: sleeper.save(step.work / "state"))
    step.record(same_bits=equal, save_s=save_s)
    if not all(equal):
        raise SystemExit("the trainer that slept has other bits")
