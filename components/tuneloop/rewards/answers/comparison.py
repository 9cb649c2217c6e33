"""Compare the answer of a completion with the gold answer, both read by `forms`.

The gold answer sets the form. What it states (brackets, all items of a list, a base, a direction)
the other has to state, too. A unit or a name may be left out, but not be another one.
"""

from collections.abc import Sequence

import sympy

from tuneloop.rewards.answers.forms import (
    Bounds,
    Chain,
    Form,
    Inequality,
    Ordered,
    Several,
    Union,
    Value,
    Words,
    Writing,
)
from tuneloop.rewards.answers.literals import is_worked_out
from tuneloop.rewards.answers.values import (
    are_equal,
    evaluate_number,
    is_proportional,
    parse_value,
)

PERCENT = sympy.Rational(1, 100)
MOST_ITEMS = 60
"""Items of the longest list whose items are compared in any order."""


def is_same(gold: Form, other: Form) -> bool:
    """Return whether `other` states the answer `gold`."""
    gold = _unwrap(gold)
    other = _unwrap(other)
    match gold, other:
        case Words(), Words():
            return _fold(gold.text) == _fold(other.text)
        case (Words(text=text), Value(latex=latex)) | (Value(latex=latex), Words(text=text)):
            # The letter of a choice in brackets and without, and short names.
            return latex.isalpha() and _fold(text) == _fold(latex)
        case Writing(), Writing():
            return bool(gold.text) and gold.text == other.text
        case Value(), Value():
            has_percent = gold.is_percent or other.is_percent
            is_number = is_worked_out(gold.latex, other.latex, may_be_fraction=has_percent)
            return is_number and _is_same_value(gold, other)
        case (
            (Several(items=items) | Union(items=items)),
            (Several(items=other_items) | Union(items=other_items)),
        ):
            return _are_same_set(items, other_items)
        case Ordered(), Ordered():
            return _is_same_sequence(gold, other)
        case Chain(), Chain():
            return _is_same_equation(gold, other)
        case Chain(name=str(name)), _ if name:
            # The name may be left out: `x = 5` and `5`.
            return is_same(gold.sides[-1], other)
        case _, Chain():
            # Every side has to be the answer: `4 = 5` is neither. The last one has to state it as
            # a number where it is one: `23 + 45 = 68`.
            *before, last = other.sides
            return is_same(gold, last) and all(_is_equal(gold, side) for side in before)
        case Bounds(), Bounds():
            return gold.name == other.name and _are_same_bounds(gold, other)
        case (Bounds(), Ordered()) | (Ordered(), Bounds()):
            left = gold if isinstance(gold, Bounds) else _read_interval(gold)
            right = other if isinstance(other, Bounds) else _read_interval(other)
            return left is not None and right is not None and _are_same_bounds(left, right)
        case Inequality(), Inequality():
            return _is_same_inequality(gold, other)
    return False


def _is_equal(gold: Form, other: Form) -> bool:
    """Return whether `other` is equal to `gold`, be it worked out or not."""
    gold = _unwrap(gold)
    other = _unwrap(other)
    if isinstance(gold, Value) and isinstance(other, Value):
        return _is_same_value(gold, other)
    return is_same(gold, other)


def _unwrap(form: Form) -> Form:
    """Take the only item out of a list: ``\\{5\\}`` and 5 state the same."""
    while isinstance(form, Several | Union) and len(form.items) == 1:
        form = form.items[0]
    return form


def _fold(text: str) -> str:
    # A single letter is a choice or a variable, and its case matters.
    folded = text.casefold() if len(text) > 1 else text
    return " ".join(folded.replace("-", " ").replace("’", "'").split())


def _is_same_value(gold: Value, other: Value) -> bool:
    if gold.unit and other.unit and gold.unit != other.unit:
        return False
    if gold.is_percent == other.is_percent:
        return are_equal(gold.latex, other.latex)
    if gold.is_percent:
        # 50% may be answered by 50, where the question asks for percent, and by its value, 1/2.
        return are_equal(gold.latex, other.latex) or are_equal(
            gold.latex, other.latex, scale=PERCENT
        )
    # To a gold answer without a percent sign the sign is a unit, so that 25% answers 25; only up
    # to 1, as for a probability, is it the value, so that 50% answers 1/2.
    size = evaluate_number(gold.latex)
    if size is not None and abs(size) <= 1:
        return are_equal(gold.latex, other.latex, scale=1 / PERCENT)
    return are_equal(gold.latex, other.latex)


def _are_same_set(gold: Sequence[Form], other: Sequence[Form]) -> bool:
    """Return whether each item of one is an item of the other, in any order."""
    if len(gold) != len(other) or len(gold) > MOST_ITEMS:
        return False
    unmatched = list(other)
    for item in gold:
        index = next((i for i, candidate in enumerate(unmatched) if is_same(item, candidate)), None)
        if index is None:
            return False
        unmatched.pop(index)
    return True


def _is_same_sequence(gold: Ordered, other: Ordered) -> bool:
    return (
        (gold.opening, gold.closing) == (other.opening, other.closing)
        and len(gold.items) == len(other.items)
        and all(map(is_same, gold.items, other.items))
    )


def _is_same_equation(gold: Chain, other: Chain) -> bool:
    if gold.name and gold.name == other.name:
        return all(is_same(gold.sides[-1], side) for side in other.sides)
    if gold.name and other.name and not _are_equations(gold, other):
        return False
    left = _subtract_sides(gold)
    right = _subtract_sides(other)
    return left is not None and right is not None and is_proportional(left, right)


def _are_equations(gold: Chain, other: Chain) -> bool:
    """Return whether two named values relate variables, as ``y = 2x`` and ``x = y/2`` do."""
    sides = [chain.sides[-1] for chain in (gold, other)]
    expressions = [parse_value(side.latex) for side in sides if isinstance(side, Value)]
    return len(expressions) == 2 and all(e is not None and e.free_symbols for e in expressions)


def _subtract_sides(equation: Chain) -> object | None:
    """Return the left side less the right one; None where there are not two values."""
    sides = list(equation.sides)
    if equation.name:
        sides.insert(0, Value(equation.name))
    if len(sides) != 2 or not all(isinstance(side, Value) for side in sides):
        return None
    left, right = (parse_value(side.latex) for side in sides if isinstance(side, Value))
    return None if left is None or right is None else left - right


def _read_interval(form: Form) -> Bounds | None:
    """Read an interval as the bounds of a variable without a name."""
    if not isinstance(form, Ordered) or len(form.items) != 2:
        return None
    if form.opening not in "([" or form.closing not in ")]":
        return None
    lower, upper = form.items
    return Bounds("", lower, form.opening == "(", upper, form.closing == ")")


def _drop_infinity(bound: Form | None) -> Form | None:
    is_infinite = isinstance(bound, Value) and bound.latex.lstrip("+-") == r"\infty"
    return None if is_infinite else bound


def _are_same_bounds(gold: Bounds, other: Bounds) -> bool:
    return (
        gold.is_lower_open == other.is_lower_open
        and gold.is_upper_open == other.is_upper_open
        and _is_same_bound(_drop_infinity(gold.lower), _drop_infinity(other.lower))
        and _is_same_bound(_drop_infinity(gold.upper), _drop_infinity(other.upper))
    )


def _is_same_bound(gold: Form | None, other: Form | None) -> bool:
    if gold is None or other is None:
        return gold is other
    return is_same(gold, other)


def _is_same_inequality(gold: Inequality, other: Inequality) -> bool:
    sides = [gold.left, gold.right, other.left, other.right]
    expressions = [parse_value(side.latex) for side in sides]
    if gold.is_strict != other.is_strict or any(e is None for e in expressions):
        return False
    left, right, other_left, other_right = expressions
    return bool(left == other_left and right == other_right)
