"""Two versions that differ by a training step are told apart, or it is said that they are not."""

import random

import pytest

from tuneloop.formats.canary import SEPARATED, tell_versions_apart


def draw(chance: random.Random, spread: float) -> list[float]:
    return [chance.gauss(0, spread) for _ in range(23)]


def add(*vectors: list[float]) -> list[float]:
    return [sum(values) for values in zip(*vectors)]


@pytest.mark.parametrize("noise", [1e-6, 1e-3, 0.02])
def test_an_old_version_is_caught_and_a_true_one_never_accused(noise: float) -> None:
    chance, caught, claimed = random.Random(0), 0, 0
    for _ in range(1000):
        before = draw(chance, 3.0)
        now = add(before, draw(chance, noise * 10 ** chance.uniform(-1, 3)))
        true = tell_versions_apart(add(now, draw(chance, noise)), now, before)
        old = tell_versions_apart(add(before, draw(chance, noise)), now, before)
        if true["separation"] >= SEPARATED:
            claimed += 1
            assert true["log_likelihood_ratio"] > 0
        if old["separation"] >= SEPARATED:
            caught += 1
            assert old["log_likelihood_ratio"] < 0
    assert 400 < claimed < 950 and 400 < caught < 950, (
        "smaller steps than the noise are not told apart, larger ones are"
    )


def test_the_same_parameters_are_not_told_apart() -> None:
    same = draw(random.Random(0), 3.0)
    assert tell_versions_apart(same, same, same) == {"separation": 0.0, "log_likelihood_ratio": 0.0}
