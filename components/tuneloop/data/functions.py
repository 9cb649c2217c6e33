"""Small functions to write: ``f(x) = x * 3 - 7`` said in words, as programs for the reward ``code`` to test."""

import random
from typing import Annotated

from pydantic import Field

from tuneloop.data import Example, Splits

WORDS = {"+": "plus", "-": "minus", "*": "times"}


def load_splits(
    n: int,
    seed: int,
    *,
    steps: Annotated[int, Field(ge=1, le=8)] = 2,
    tests: Annotated[int, Field(ge=1)] = 3,
) -> Splits:
    """Make tasks in random order, four times the `n` that are wanted, since small ones repeat, and `data_prep` drops
    repeats. A function has `steps` operations, each on the result of the one before; `tests` calls test a program."""
    rng = random.Random(seed)
    return Splits.of(_example(rng, steps, tests) for _ in range(4 * n + 64))


def _example(rng: random.Random, steps: int, tests: int) -> Example:
    said, value = "x", "x"
    for _ in range(steps):
        sign, number = rng.choice(list(WORDS)), rng.randint(2, 9)
        said, value = f"{said} {WORDS[sign]} {number}", f"({value} {sign} {number})"
    calls = [f"f({x})" for x in rng.sample(range(-20, 20), min(tests, 40))]
    known = {"f": eval(f"lambda x: {value}", {})}
    cases = [{"call": call, "returns": eval(call, known)} for call in calls]
    return Example(
        f"Write f(x), step by step: {said}.\n",
        f"def f(x): return {value}",
        metadata={"tests": cases},
        rewards={"code": 1.0},
    )
