"""The warm-up of a run in epochs leaves most of its steps."""

import pytest

from tuneloop.stages.sft import SftOptions
from tuneloop.training.delegation import BackendOptions


@pytest.mark.parametrize(
    ("examples", "steps", "warmup"), [(50, 5, 0), (320, 30, 3), (5000, 469, 5)]
)
def test_a_short_file_reaches_its_learning_rate(examples: int, steps: int, warmup: int) -> None:
    """The first run of the README had five steps, all of them of the warm-up."""
    options = SftOptions(epochs=3.0, warmup_steps=5, per_device_train_batch_size=32)
    resolved = options.resolve_steps(examples, 1)
    assert (resolved.max_steps, resolved.warmup_steps) == (steps, warmup)


def test_steps_that_are_set_keep_their_warm_up() -> None:
    options = BackendOptions(max_steps=20, warmup_steps=10)
    assert options.resolve_steps(1000, 1).warmup_steps == 10
