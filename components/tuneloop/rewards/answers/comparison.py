"""Compare the answer of a completion with the gold answer, both read by `forms`.

The gold answer sets the form. What it states (brackets, all items of a list, a base, a direction)
the candidate has to state, too. A unit or a name may be left out, but not be another one.
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


def is_same(gold: Form, candidate: Form) -> bool:
    """Return whether `candidate` states the answer `gold`."""
    gold = _unwrap(gold)
    candidate = _unwrap(candidate)
    match gold, candidate:
        case Words(), Words():
            return _fold(gold.text) == _fold(candidate.text)
        case (Words(text=text), Value(latex=latex)) | (Value(latex=latex), Words(text=text)):
            # The letter of a choice in brackets and without, and short names.
            return latex.isalpha() and _fold(text) == _fold(latex)
        case Writing(), Writing():
            return bool(gold.text) and gold.text == candidate.text
        case Value(), Value():
            has_percent = gold.is_percent or candidate.is_percent
            is_number = is_worked_out(gold.latex, candidate.latex, may_be_fraction=has_percent)
            return is_number and _is_same_value(gold, candidate)
        case (
            (Several(items=items) | Union(items=items)),
            (Several(items=candidate_items) | Union(items=candidate_items)),
        ):
            return _are_same_set(items, candidate_items)
        case Ordered(), Ordered():
            return _is_same_sequence(gold, candidate)
        case Chain(), Chain():
            return _is_same_equation(gold, candidate)
        case Chain(name=str(name)), _ if name:
            # The name may be left out: `x = 5` and `5`.
            return is_same(gold.sides[-1], candidate)
        case _, Chain():
            # Every side has to be the answer: `4 = 5` is neither. The last one has to state it as
            # a number where it is one: `23 + 45 = 68`.
            *before, last = candidate.sides
            return is_same(gold, last) and all(_is_equal(gold, side) for side in before)
        case Bounds(), Bounds():
            return gold.name == candidate.name and _are_same_bounds(gold, candidate)
        case (Bounds(), Ordered()) | (Ordered(), Bounds()):
            left = gold if isinstance(gold, Bounds) else _read_interval(gold)
            right = candidate if isinstance(candidate, Bounds) else _read_interval(candidate)
            return left is not None and right is not None and _are_same_bounds(left, right)
        case Inequality(), Inequality():
            return _is_same_inequality(gold, candidate)
    return False


def _is_equal(gold: Form, candidate: Form) -> bool:
    """Return whether `candidate` is equal to `gold`, be it worked out or not."""
    gold = _unwrap(gold)
    candidate = _unwrap(candidate)
    if isinstance(gold, Value) and isinstance(candidate, Value):
        return _is_same_value(gold, candidate)
    return is_same(gold, candidate)


def _unwrap(form: Form) -> Form:
    """Take the only item out of a list: ``\\{5\\}`` and 5 state the same."""
    while isinstance(form, Several | Union) and len(form.items) == 1:
        form = form.items[0]
    return form


def _fold(text: str) -> str:
    # A single letter is a choice or a variable, and its case matters.
    folded = text.casefold() if len(text) > 1 else text
    return " ".join(folded.replace("-", " ").replace("’", "'").split())


def _is_same_value(gold: Value, candidate: Value) -> bool:
    if gold.unit and candidate.unit and gold.unit != candidate.unit:
        return False
    if gold.is_percent == candidate.is_percent:
        return are_equal(gold.latex, candidate.latex)
    if gold.is_percent:
        # 50% may be answered by 50, where the question asks for percent, and by its value, 1/2.
        return are_equal(gold.latex, candidate.latex) or are_equal(
            gold.latex, candidate.latex, scale=PERCENT
        )
    # To a gold answer without a percent sign the sign is a unit, so that 25% answers 25; only up
    # to 1, as for a probability, is it the value, so that 50% answers 1/2.
    size = evaluate_number(gold.latex)
    if size is not None and abs(size) <= 1:
        return are_equal(gold.latex, candidate.latex, scale=1 / PERCENT)
    return are_equal(gold.latex, candidate.latex)


def _are_same_set(gold: Sequence[Form], candidate: Sequence[Form]) -> bool:
    """Return whether each item of one is an item of the candidate, in any order."""
    if len(gold) != len(candidate) or len(gold) > MOST_ITEMS:
        return False
    unmatched = list(candidate)
    for item in gold:
        index = next((i for i, candidate in enumerate(unmatched) if is_same(item, candidate)), None)
        if index is None:
            return False
        unmatched.pop(index)
    return True


def _is_same_sequence(gold: Ordered, candidate: Ordered) -> bool:
    return (
        (gold.opening, gold.closing) == (candidate.opening, candidate.closing)
        and len(gold.items) == len(candidate.items)
        and all(map(is_same, gold.items, candidate.items))
    )


def _is_same_equation(gold: Chain, candidate: Chain) -> bool:
    if gold.name and gold.name == candidate.name:
        return all(is_same(gold.sides[-1], side) for side in candidate.sides)
    if gold.name and candidate.name and not _are_equations(gold, candidate):
        return False
    left = _subtract_sides(gold)
    right = _subtract_sides(candidate)
    return left is not None and right is not None and is_proportional(left, right)


def _are_equations(gold: Chain, candidate: Chain) -> bool:
    """Return whether two named values relate variables, as ``y = 2x`` and ``x = y/2`` do."""
    sides = [chain.sides[-1] for chain in (gold, candidate)]
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


def _are_same_bounds(gold: Bounds, candidate: Bounds) -> bool:
    return (
        gold.is_lower_open == candidate.is_lower_open
        and gold.is_upper_open == candidate.is_upper_open
        and _is_same_bound(_drop_infinity(gold.lower), _drop_infinity(candidate.lower))
        and _is_same_bound(_drop_infinity(gold.upper), _drop_infinity(candidate.upper))
    )


def _is_same_bound(gold: Form | None, candidate: Form | None) -> bool:
    if gold is None or candidate is None:
        return gold is candidate
    return is_same(gold, candidate)


def _is_same_inequality(gold: Inequality, candidate: Inequality) -> bool:
    sides = [gold.left, gold.right, candidate.left, candidate.right]
    expressions = [parse_value(side.latex) for side in sides]
    if gold.is_strict != candidate.is_strict or any(e is None for e in expressions):
        return False
    left, right, candidate_left, candidate_right = expressions
    return bool(left == candidate_left and right == candidate_right)
