"""Small functions to write, described in words: ``x times 3 minus 7`` is ``f(x) = x * 3 - 7``.

The reward ``code`` tests the programs that a policy writes for them: the metadata ``tests`` is in
the form that `rewards/programs/tests.py` reads. `tests/unit/rewards/test_code.py` proves the
source.
"""

import random
from typing import Annotated

from pydantic import Field

from tuneloop.data import Example, Splits

WORDS = {"+": "plus", "-": "minus", "*": "times"}
"""Operator of Python → the word for it in a prompt. Operations are applied from left to right, in
brackets, so precedence does not matter."""
INPUTS = range(-20, 20)
"""Numbers that tests call a function with; as many as there are limit the argument `tests`."""


def load_splits(
    n: int,
    seed: int,
    *,
    steps: Annotated[int, Field(ge=1, le=8)] = 2,
    tests: Annotated[int, Field(ge=1)] = 3,
) -> Splits:
    """Make tasks in random order.

    Args:
        steps: operations of a function, each on the result of the one before.
        tests: calls that test a program, at most 40.
    """
    generator = random.Random(seed)
    # Small tasks repeat, and `data_prep` drops repeats: more are offered than are wanted.
    count = 4 * n + 64
    return Splits.of(_make_example(generator, steps, tests) for _ in range(count))


def _make_example(generator: random.Random, steps: int, tests: int) -> Example:
    description = "x"
    expression = "x"
    # The order of these draws decides which tasks a seed gives.
    for _ in range(steps):
        sign = generator.choice(list(WORDS))
        number = generator.randint(2, 9)
        description += f" {WORDS[sign]} {number}"
        expression = f"({expression} {sign} {number})"
    inputs = generator.sample(INPUTS, min(tests, len(INPUTS)))
    calls = [f"f({x})" for x in inputs]
    names = {"f": eval(f"lambda x: {expression}", {})}
    return Example(
        f"Write f(x), step by step: {description}.\n",
        f"def f(x): return {expression}",
        metadata={"tests": [{"call": call, "returns": eval(call, names)} for call in calls]},
        rewards={"code": 1.0},
    )
