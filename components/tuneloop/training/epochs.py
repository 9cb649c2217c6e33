"""Training on examples in epochs, for `sft`, `preference` and `reward_model`.

`policy_update` uses `new_trainer` alone: it has a loop of its own, and no resume points. Tests:
`tests/unit/stages/test_sft.py`, `test_preference.py`, and `tests/local/test_resume.py` with kills.
"""

import json
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from tuneloop.core.artifacts import Artifact, dump_canonical_json
from tuneloop.core.component import Stage
from tuneloop.core.context import METRICS
from tuneloop.core.seeds import draw_indices
from tuneloop.core.threads import map_ahead
from tuneloop.core.wording import format_count
from tuneloop.formats.token_files import Document
from tuneloop.training import checkpoint
from tuneloop.training.options import TrainerOptions
from tuneloop.training.protocols import EpochTrainer

if TYPE_CHECKING:
    from tuneloop.training.batching import Batch
    from tuneloop.training.fsdp.ranks import Ranks
    from tuneloop.training.fsdp.trainer import Trainer
    from tuneloop.training.held_out import HeldOutLoss

STATE_FILE = "trainer/state.json"
"""The file of a resume point that says where training stood: step, batch size, processes. In a
checkpoint the file of this name says other things (`checkpoint.STATE_FILE`). `_write_resume` writes
it and `_resume` reads it, perhaps that of an earlier release: a new key may be missing."""
TrainerKind = TypeVar("TrainerKind", bound="Trainer")


def open_trainer(
    stage: Stage,
    kind: type[TrainerKind],
    policy: Artifact,
    ranks: "Ranks",
    options: TrainerOptions,
) -> TrainerKind:
    """Open a trainer of class `kind` on the model of `policy`, from its float32 masters where it
    has some.
    """
    trainer = new_trainer(stage, kind, policy, ranks, options)
    checkpoint.load_masters(trainer, policy)
    stage.facts.update(trainer.chosen(), optimizer="fresh")
    return trainer


def new_trainer(
    stage: Stage,
    kind: type[TrainerKind],
    policy: Artifact,
    ranks: "Ranks",
    options: TrainerOptions,
) -> TrainerKind:
    """Make a trainer of the model in `policy`, before its masters are read; adapters begin the same
    on all ranks.
    """
    import torch

    # peft draws the adapters' first values from torch's own stream.
    torch.manual_seed(stage.seed("adapters"))
    model = checkpoint.model_dir(policy)
    trainer = kind(model, ranks, options.optimization, **options.model_options)
    trainer.base = policy
    return trainer


@dataclass(frozen=True)
class Prepared:
    """The examples of an optimizer step: their indices; this rank's micro-batches, each with the
    places of its examples in `indices`; and how many tokens and targets all ranks have together.
    """

    indices: Sequence[int]
    batches: "list[tuple[list[int], Batch]]"
    tokens: int
    targets: int


def prepare_step(
    trainer: EpochTrainer,
    read: Callable[[int], Sequence[Document]],
    indices: Sequence[int],
    limit: int,
) -> Prepared:
    """Lay out the examples of these indices, at most `limit` of them in a micro-batch; `read` gives
    their documents.
    """
    examples = [read(index) for index in indices]
    lengths = [sum(len(document.ids) for document in example) for example in examples]
    batches: list[tuple[list[int], Batch]] = []
    for positions in trainer.plan(lengths, limit):
        documents = [document for position in positions for document in examples[position]]
        batches.append((positions, trainer.collate(documents)))
    return Prepared(
        indices,
        batches,
        tokens=sum(lengths),
        targets=sum(document.target_count for example in examples for document in example),
    )


def train_epochs(
    stage: Stage,
    trainer: EpochTrainer,
    count: int,
    options: TrainerOptions,
    read: Callable[[int], Sequence[Document]],
    step: Callable[[Prepared], dict[str, float]],
    held_out: "HeldOutLoss | None" = None,
) -> float:
    """Train up to ``options.max_steps``, from where an earlier attempt stopped.

    Examples come in epochs, each in a random order that is a function of (seed, epoch): to resume,
    only the step and the batch size are needed. A resumed run keeps its batch size, whatever its
    number of processes: steps are equal to float tolerance, and bit for bit with as many processes
    as before. Metrics, resume points and ``timings.tokens_per_s`` go to `stage`.

    Args:
        count: the number of examples.
        read: gives the documents of an example. It is called on another thread, which prepares
            the next step.
        step: takes one optimizer step and returns its metrics, of all ranks together; ``loss`` must
            be one of them. All are recorded, and drawn as curves.
        held_out: is measured before the first step, and when it is due.

    Returns:
        The last loss.

    Raises:
        Interrupted: after SIGTERM, once a resume point is committed.
    """
    max_steps = options.max_steps
    examples = options.per_device_train_batch_size * options.gradient_accumulation_steps
    batch = _resume(stage, trainer, examples * trainer.ranks.world)
    if held_out:
        held_out.record_first()
    # The first step after the start warms up; the one after it is measured.
    measured_step = min(trainer.step + 1, max_steps - 1)
    loss = float("nan")
    tokens_seen = 0
    bar = stage.progress(max_steps, "steps", trainer.step)
    # The time that measurements of the held-out loss take does not count as training.
    started = time.perf_counter()
    evaluated_s = stage.timings.get("evaluate", 0.0)

    def prepare(number: int) -> Prepared:
        indices = draw_indices(count, number * batch, batch, partial(stage.seed, "order"))
        return prepare_step(trainer, read, indices, options.per_device_train_batch_size)

    with stage.timed("train"):
        for prepared in map_ahead(prepare, range(trainer.step, max_steps)):
            with trainer.watched() if trainer.step == measured_step else nullcontext():
                metrics = step(prepared)
            # All ranks decide together: if one left alone, the others would wait for it for ever.
            (stop,) = trainer.ranks.max([float(stage.stopping)])
            if held_out and held_out.is_due(trainer.step, max_steps):
                metrics |= held_out.measure()
            # No times among them: metrics.jsonl is part of the digest.
            stage.metric(trainer.step, **metrics)
            loss = metrics["loss"]
            tokens_seen += prepared.tokens
            bar.update(trainer.step, loss=loss)
            is_due = options.save_steps and trainer.step % options.save_steps == 0
            if (stop or is_due) and trainer.step < max_steps:
                stage.save_resume(
                    trainer.step,
                    lambda path: _write_resume(stage, trainer, batch, path),
                )
                if stop:
                    # A signal during the save counts for the next step, so that all ranks leave
                    # together.
                    stage.stopping = True
                    stage.check_stop()
    evaluated_s = stage.timings.get("evaluate", 0.0) - evaluated_s
    stage.timings["tokens_per_s"] = tokens_seen / (time.perf_counter() - started - evaluated_s)
    stage.notes["efficiency"] = trainer.efficiency(stage.timings["tokens_per_s"])
    return loss


def _resume(stage: Stage, trainer: EpochTrainer, batch: int) -> int:
    """Continue where an earlier attempt was interrupted, and return its batch size."""
    point = stage.latest_resume()
    if point is None:
        return batch
    state = json.loads(point.part(STATE_FILE).read_text())
    trainer.load(point.part("trainer"), state["step"])
    if stage.leader:
        (stage.out / METRICS).write_bytes(point.part(METRICS).read_bytes())
    step = state["step"]
    world_size = state["world_size"]
    stage.notes["resumed_from"] = step
    if world_size != trainer.ranks.world:
        stage.notes["resumed_world_size"] = world_size
    stage.log(
        f"resumed after step {step}, {world_size} → {format_count(trainer.ranks.world, 'process', 'processes')}"
    )
    return int(state["batch"])


def _write_resume(stage: Stage, trainer: EpochTrainer, batch: int, path: Path) -> None:
    """Write a resume point: the trainer's state, where it stands, and the metrics so far."""
    trainer.save(path / "trainer")
    if stage.leader:
        state = {"step": trainer.step, "world_size": trainer.ranks.world, "batch": batch}
        (path / STATE_FILE).write_text(dump_canonical_json(state))
        (path / METRICS).write_bytes((stage.out / METRICS).read_bytes())
