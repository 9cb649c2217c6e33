"""Compare the answer of a completion with the gold answer, both read by `forms`.

The gold answer sets the form. What it states (brackets, all items of a list, a base, a direction)
the candidate has to state, too. A unit or a name may be left out, but not be another one.

docs/rewards.md has the rules as a table, and `tests/unit/rewards/test_numeric.py` a case for each.
"""

from collections.abc import Sequence

import sympy

from tuneloop.rewards.answers.forms import (
    Bounds,
    Chain,
    Form,
    Ordered,
    Several,
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
"""The value of a percent sign."""
MOST_ITEMS = 60
"""The most items of a list that is compared in any order, which takes the square of their number; a
longer list has to be written as the gold answer is."""


def is_same(gold: Form, candidate: Form) -> bool:
    """Return whether `candidate` states the answer `gold`.

    A form without a case here is equal to nothing, not even to itself. The reward accepts an answer
    that is written as the gold answer before it asks this function (`rewards/numeric.py: score`).
    """
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
        case Several(items=items), Several(items=candidate_items):
            return _are_same_set(items, candidate_items)
        case Ordered(), Ordered():
            return _is_same_sequence(gold, candidate)
        case Bounds(), Bounds() if gold.name == candidate.name:
            return _is_same_sequence(gold.interval, candidate.interval)
        # The variable may be left out: `x < 3` and `(-\infty, 3)`.
        case Bounds(), Ordered():
            return _is_same_sequence(gold.interval, candidate)
        case Ordered(), Bounds():
            return _is_same_sequence(gold, candidate.interval)
        case Chain(), Chain():
            return _is_same_equation(gold, candidate)
        case Chain(name=str(name)), _ if name:
            # The name may be left out: `x = 5` and `5`.
            return is_same(gold.sides[-1], candidate)
        case _, Chain():
            # Every side has to be the answer: `4 = 5` is neither. The last one has to state it as
            # a number where it is one: `23 + 45 = 68`.
            *sides, last = candidate.sides
            return is_same(gold, last) and all(_is_equal(gold, side) for side in sides)
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
    while isinstance(form, Several) and len(form.items) == 1:
        form = form.items[0]
    return form


def _fold(text: str) -> str:
    """Bring words to one spelling."""
    # A single letter is a choice or a variable, and its case matters.
    folded = text.casefold() if len(text) > 1 else text
    return " ".join(folded.replace("-", " ").replace("’", "'").split())


def _is_same_value(gold: Value, candidate: Value) -> bool:
    """Return whether numbers are the same, of the same unit, in percent or not."""
    if gold.unit and candidate.unit and gold.unit != candidate.unit:
        return False
    scales = [sympy.S.One]
    if gold.is_percent and not candidate.is_percent:
        # 50% may be answered by 50, where the question asks for percent, and by its value, 1/2.
        scales.append(PERCENT)
    elif candidate.is_percent and not gold.is_percent:
        # To a gold answer without a percent sign the sign is a unit, so that 25% answers 25; only
        # up to 1, as for a probability, is it the value, so that 50% answers 1/2.
        size = evaluate_number(gold.latex)
        if size is not None and abs(size) <= 1:
            scales = [1 / PERCENT]
    return any(are_equal(gold.latex, candidate.latex, scale=scale) for scale in scales)


def _are_same_set(gold: Sequence[Form], candidate: Sequence[Form]) -> bool:
    """Return whether each item of one is an item of the other, in any order."""
    if len(gold) != len(candidate) or len(gold) > MOST_ITEMS:
        return False
    unmatched = list(candidate)
    for item in gold:
        partner = next((form for form in unmatched if is_same(item, form)), None)
        if partner is None:
            return False
        unmatched.remove(partner)
    return True


def _is_same_sequence(gold: Ordered, candidate: Ordered) -> bool:
    return (
        (gold.opening, gold.closing) == (candidate.opening, candidate.closing)
        and len(gold.items) == len(candidate.items)
        and all(map(is_same, gold.items, candidate.items))
    )


def _is_same_equation(gold: Chain, candidate: Chain) -> bool:
    """Return whether two equations state the same: one name has one value, or all solutions agree."""
    if gold.name and gold.name == candidate.name:
        return all(is_same(gold.sides[-1], side) for side in candidate.sides)
    if gold.name and candidate.name and not (_has_variables(gold) and _has_variables(candidate)):
        return False
    difference = _subtract_sides(gold)
    other = _subtract_sides(candidate)
    return difference is not None and other is not None and is_proportional(difference, other)


def _has_variables(chain: Chain) -> bool:
    """Return whether a named value relates variables, as ``y = 2x`` and ``x = y/2`` do."""
    side = chain.sides[-1]
    value = parse_value(side.latex) if isinstance(side, Value) else None
    return value is not None and bool(value.free_symbols)


def _subtract_sides(equation: Chain) -> object | None:
    """Return the first side less the second one; None where there are not two values."""
    sides = equation.sides
    if equation.name:
        sides = (Value(equation.name), *sides)
    match sides:
        case [Value(latex=first), Value(latex=second)]:
            minuend = parse_value(first)
            subtrahend = parse_value(second)
            if minuend is not None and subtrahend is not None:
                return minuend - subtrahend
    return None
