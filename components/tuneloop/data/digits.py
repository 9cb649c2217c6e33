"""Digits to reverse: ``reverse 2914 =`` → `` 4192``. Small enough to be learned from nothing in seconds.

A share of the SFT demonstrations copies the digits instead of reversing them. Reinforcement learning sharpens what
a policy does already: after SFT this one can do both and prefers the wrong one, so there is something to sharpen.
(Random wrong answers in their place teach it nothing to choose between, and no gain was seen.) A pair prefers the
reversed digits to the copied ones (to fewer digits, where both are the same)."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated

from pydantic import Field

from tuneloop.core.seeds import derive_seed
from tuneloop.data import Example, Splits


def load_splits(
    n: int,
    seed: int,
    *,
    digits: Annotated[int, Field(ge=1, le=18)] = 4,
    sft_wrong_share: Annotated[float, Field(ge=0, le=1)] = 0.6,
) -> Splits:
    """Make distinct numbers of `digits` digits, leading zeros included, in random order: ``10**digits`` in all."""
    numbers = random.Random(seed).sample(range(10**digits), min(n, 10**digits))
    stream = (_example(f"{number:0{digits}d}") for number in numbers)
    return replace(
        Splits.of(stream), sft=_demonstrations(stream, derive_seed(seed, "wrong"), sft_wrong_share)
    )


def _example(text: str) -> Example:
    wrong = text if text != text[::-1] else text[1:]
    return Example(
        f"reverse {text} =",
        text[::-1],
        f" {text[::-1]}",
        rejected=f" {wrong}" if wrong else None,
        metadata={"digits": text},
    )


def _demonstrations(stream: Iterator[Example], seed: int, wrong_share: float) -> Iterator[Example]:
    rng = random.Random(seed)
    for example in stream:
        wrong = rng.random() < wrong_share
        yield replace(example, demonstration=f" {example.metadata['digits']}") if wrong else example
