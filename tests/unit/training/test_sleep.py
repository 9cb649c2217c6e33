"""A trainer that slept goes on as if it had not."""

from pathlib import Path

import pytest
import torch
import xxhash

from tuneloop.formats.token_files import Document
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.fsdp.trainer import Trainer
from tuneloop.training.options import Optimization

ADAM = Optimization(1e-2, "constant", 0, 0, 0.01, 0.9, 0.95, 1.0)
DOCUMENTS = [Document(list(range(start, start + 9)), [False, *[True] * 8]) for start in (1, 7, 20)]


def state(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Every tensor that the next step depends on, gradients included."""
    gradients = {
        f"grad.{n}": p.grad for n, p in trainer.model.named_parameters() if p.grad is not None
    }
    steps = {f"step.{n}": trainer.optimizer.state[p]["step"] for n, p in trainer.trainable.items()}
    return {**trainer._state(), **gradients, **steps}


def digest(trainer: Trainer) -> dict[str, str]:
    return {
        name: xxhash.xxh3_128_hexdigest(t.detach().numpy().tobytes())
        for name, t in state(trainer).items()
    }


def learn(trainer: Trainer) -> None:
    values, _ = trainer.logprobs(DOCUMENTS)
    (-values.mean()).backward()


def test_the_next_step_is_the_same(model: Path) -> None:
    """Put to sleep between backward pass and step, after one whole step: bit for bit what one does that never slept."""
    trainers = [Trainer(model, Ranks("cpu"), ADAM) for _ in range(2)]
    for trainer in trainers:
        learn(trainer)
        trainer.update()
        learn(trainer)
    slept, other = trainers
    before, places = digest(slept), {name: t.data_ptr() for name, t in state(slept).items()}
    slept.sleep()
    assert digest(slept) == before
    assert all(
        t.data_ptr() != places[name] for name, t in state(slept).items()
    )  # all of it has moved
    for use in (lambda: learn(slept), slept.update, slept.sleep):
        with pytest.raises(RuntimeError, match="sleeps"):
            use()
    slept.wake()
    assert digest(slept) == before
    for trainer in trainers:
        trainer.update()
    assert digest(slept) == digest(other) != before
