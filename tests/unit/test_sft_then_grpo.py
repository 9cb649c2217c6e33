"""What the pipeline `sft_then_grpo` decides by itself."""

import pytest

from tuneloop.config import find
from tuneloop.errors import UserError


@pytest.mark.parametrize(
    ("sets", "steps"),
    [
        ([], 32),
        (["loop.iterations=2"], 32),
        (["loop.iterations=1000"], 1000),
        (["loop.iterations=20", "update.updates_per_batch=4"], 80),
        (["loop.iterations=100", "update.max_steps=50"], 50),
    ],
)
def test_the_learning_rate_falls_until_the_loop_is_over(sets: list[str], steps: int) -> None:
    assert find("sft_then_grpo").configure(sets=sets).update.max_steps == steps


@pytest.mark.parametrize(("given", "field"), [("loop.iterations=many", "loop.iterations"), ("update=3", "update")])
def test_what_is_no_number_or_section_is_refused_as_that(given: str, field: str) -> None:
    with pytest.raises(UserError, match=field):
        find("sft_then_grpo").configure(sets=[given])
