"""Rows that are left out, as people are told of them."""

import random

import pytest

from tuneloop.core.errors import UserError
from tuneloop.data.budgets import SHOWN, Budget


def count_rows(share: float, numbers: list[int]) -> Budget:
    """Return a budget that was given the rows of these numbers, in any order."""
    budget = Budget("data.bad_rows", "cannot be used", "rows", "drop", share)
    shuffled = random.Random(0).sample(numbers, len(numbers))
    for number in shuffled:
        budget.add(f"a.jsonl:{number}", "is empty" if number % 2 else "is no text")
    return budget


def test_the_first_rows_are_listed_as_they_stand_in_the_file() -> None:
    budget = count_rows(1.0, list(range(1, 60)))
    assert budget.count == 59
    assert [text.partition(": ")[0] for text in budget.examples] == [
        f"a.jsonl:{number}" for number in range(1, SHOWN + 1)
    ]


def test_rows_are_listed_by_reason() -> None:
    budget = count_rows(0.0, [9, 10, 100, 11])
    budget.add("b.jsonl row 2", "is empty")
    listed = "a.jsonl:9, a.jsonl:11, b.jsonl row 2: is empty; a.jsonl:10, a.jsonl:100: is no text"
    assert budget.list_by_reason() == listed
    with pytest.raises(UserError) as caught:
        budget.check(500)
    assert caught.value.remedy.startswith(f"cannot be used: {listed}; correct them")
    shown = "a.jsonl:9, a.jsonl:11: is empty; a.jsonl:10: is no text; …"
    assert budget.describe() == f"left out 5 rows that cannot be used: {shown}"
