"""Numbers and nouns agree."""

import pytest

from tuneloop.core.wording import format_count
from tuneloop.formats.held_out import HeldOutFacts


@pytest.mark.parametrize(
    ("number", "noun", "plural", "text"),
    [
        (0, "row", "", "0 rows"),
        (1, "row", "", "1 row"),
        (2, "row", "", "2 rows"),
        (1234, "row", "", "1,234 rows"),
        (1, "process", "processes", "1 process"),
        (2, "process", "processes", "2 processes"),
    ],
)
def test_a_noun_follows_its_number(number: int, noun: str, plural: str, text: str) -> None:
    assert format_count(number, noun, plural) == text


def test_a_loss_names_what_it_was_measured_on() -> None:
    losses = HeldOutFacts(demonstrations=1, targets=16, loss_before=2.851, loss_after=0.005)
    assert str(losses).endswith("(16 target tokens of 1 held-out demonstration)")
