"""A dollar may be money or open a formula: prose with amounts is read as prose."""

import pytest

from tuneloop.rewards.numeric import score

GSM8K = """Natalia's shop sells 12 mugs for $8 each, so the mugs bring 12 * $8 = $96.
She also sells 5 plates for $11 each, which is 5 * 11 = $55.
In total she takes $96 + $55 = $151.
After paying $31 of rent she keeps $151 - $31 = $120."""
STEPS = """**Step 1:** Tickets for adults cost $15 each: 2 x $15 = $30.

**Step 2:** Tickets for children cost $7.50 each: 4 x $7.50 = $30.

**Step 3:** The family pays $30 + $30 = **$60**."""
LIST = """- Rent: $1,200
- Food: $350.25
- Bus: ($40)

Total: $1,590.25"""


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        ("18", "She sells 9 eggs for $2 each, so she makes 9 * 2 = $18 every day."),
        ("38", "The total cost is $18 + $20 = $38."),
        ("38", "She pays $18 now and $20 later, so she pays 38 in total."),
        ("11", "It costs $5 and $6.\n\nTotal: $11"),
        ("10", "Each costs $3 x 2 = $6, then $4, so $10 total"),
        ("11", "The shirt costs ($5)+($6)=($11)."),
        ("38", "He has $18 and gets $20. The answer is $38."),
        ("120", GSM8K),
        ("60", STEPS),
        ("1590.25", LIST),
    ],
)
def test_amounts_of_money_are_numbers_in_prose(gold: str, completion: str) -> None:
    assert score(completion, gold, {}) == 1.0
    assert score(completion, "17", {}) == 0.0


@pytest.mark.parametrize(
    ("gold", "completion"),
    [
        ("x+1", "The polynomial is $x+1$."),
        (r"\frac{1}{2}", r"He pays $5, and the share is $\frac{1}{2}$."),
        ("7", "He pays $5 and the unknown is $x = 7$."),
        ("2, 3", "The roots are $2$ and $3$."),
        ("38", r"It costs \$18 and \$20, so $18 + 20 = 38$."),
    ],
)
def test_formulas_between_dollars_are_read_whole(gold: str, completion: str) -> None:
    assert score(completion, gold, {}) == 1.0
