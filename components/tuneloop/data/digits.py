"""Digits to reverse: ``reverse 2914 =`` → `` 4192``. A policy learns it from nothing in seconds.

It is the default of ``data.source``, so examples, notebooks and most tests of loops depend on its
rows: another text of prompt or answer changes the vocabulary that `stages/base_model.py` makes of
them. `pipelines/dpo.py: DEMO_SIZES` asks it for pairs, of which a source makes none by default.

A share of the SFT demonstrations copies the digits instead of reversing them. Reinforcement
learning sharpens what a policy does already: after SFT this one can do both and prefers the wrong
one, so there is something to sharpen. (Random wrong answers in their place teach it nothing to
choose between, and no gain was seen.) A pair prefers the reversed digits to the copied ones, or to
fewer digits where both are the same.
"""

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
    """Make distinct numbers in random order: ``10**digits`` are all that there are.

    Args:
        digits: of a number, leading zeros included. Each is a token of the answer: the pipelines'
            demo samples at most 8 tokens (`pipelines/grpo.py: max_tokens`), so that 8 digits and
            more are cut off. With fewer than 4 there are fewer numbers than `data/sizes.py` asks for.
        sft_wrong_share: the share of demonstrations that copy the digits.
    """
    count = 10**digits
    numbers = random.Random(seed).sample(range(count), min(n, count))
    # One iterator, from which all splits read, each further rows than the one before (`Splits.of`).
    # From a list each would read from its beginning, and demonstrations were also held out.
    stream = (_make_example(f"{number:0{digits}d}") for number in numbers)
    sft = _demonstrate(stream, derive_seed(seed, "wrong"), sft_wrong_share)
    return replace(Splits.of(stream), sft=sft)


def _make_example(text: str) -> Example:
    reversed_text = text[::-1]
    # The copy of a palindrome is right, so the wrong answer has one digit less. A single digit has
    # no wrong answer of this kind, and makes no pair.
    wrong = text[1:] if text == reversed_text else text
    return Example(
        prompt=f"reverse {text} =",
        answer=reversed_text,
        solution=f" {reversed_text}",
        rejected=f" {wrong}" if wrong else None,
        metadata={"digits": text},
    )


def _demonstrate(stream: Iterator[Example], seed: int, wrong_share: float) -> Iterator[Example]:
    """Yield examples, of which a share demonstrates the copied digits."""
    generator = random.Random(seed)
    for example in stream:
        if generator.random() < wrong_share:
            example = replace(example, demonstration=f" {example.metadata['digits']}")
        yield example
