"""Compute values that are written in LaTeX, and compare them: parsed by math-verify, evaluated by
sympy at some points with 40 digits. Nothing is simplified, so no answer takes long to compare."""

import functools
import logging
import math
import re
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse

# Its own time limits are alarms, which work in a main thread only and do not stop C code. The
# parent's clock limits ours, so it need not warn once that its limit is off.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)

DIGITS = 40
"""Digits of an evaluation."""
EXACT = sympy.Float("1e-25")
"""The largest relative difference of two evaluations of the same value."""
ROUNDED = sympy.Float("1.5e-6")
"""The largest relative difference of a value and a decimal that rounds it to six digits."""
LARGEST = 1e5
"""The largest decimal exponent that is computed; of a larger number the writing is compared."""
MOST_OPERATIONS = 400
POINTS = (sympy.Rational(7312, 9973), sympy.Rational(23981, 7919), sympy.Rational(-13711, 9001))
"""Where expressions with variables are compared: no value of theirs is special."""
DECIMAL = re.compile(r"\d*\.\d+")
EXTRACTION = [
    LatexExtractionConfig(
        normalization_config=NormalizationConfig(
            basic_latex=True,
            units=False,
            malformed_operators=True,
            nits=False,
            boxed="none",
            equations=False,
        )
    )
]
"""The parser drops no units: `forms` has taken them off."""


@functools.lru_cache(maxsize=8192)
def parse_value(latex: str) -> Any:
    """Parse `latex`; None where it is no expression. Decimals become exact fractions."""
    parsed = parse(
        f"${latex}$",
        extraction_config=EXTRACTION,
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if len(parsed) != 1 or not isinstance(parsed[0], sympy.Expr):
        return None
    expression = parsed[0]
    decimals = {number: sympy.Rational(str(number)) for number in expression.atoms(sympy.Float)}
    # The letter i is the imaginary unit.
    imaginary = {symbol: sympy.I for symbol in expression.free_symbols if symbol.name == "i"}
    return expression.xreplace({**decimals, **imaginary})


def are_equal(gold: str, candidate: str, *, scale: sympy.Rational = sympy.S.One) -> bool:
    """Return whether `gold`, `scale` times, and `candidate`, in LaTeX, have the same value.

    A decimal has to be exact where the gold value is a decimal, too; it may be rounded, to six
    digits or more, where the gold value has no end, as 1/3 and the root of 2.
    """
    if len(gold) == len(candidate) == 1 and gold.isalpha():
        # The parser makes no difference between the letters A and a.
        return gold == candidate
    left = parse_value(gold)
    right = parse_value(candidate)
    if left is None or right is None:
        return False
    if scale != 1:
        left = left * scale
    if left == right:
        return True
    if not (_is_computable(left) and _is_computable(right)):
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    if symbols:
        return all(
            _is_near(_evaluate(left, symbols, shift), _evaluate(right, symbols, shift), EXACT)
            for shift in range(len(POINTS))
        )
    left = left.doit()
    right = right.doit()
    is_rounded = bool(DECIMAL.search(gold)) != bool(DECIMAL.search(candidate))
    if is_rounded and not _has_end(left if DECIMAL.search(candidate) else right):
        tolerance = ROUNDED
    elif left.is_Rational and right.is_Rational:
        return bool(left == right)
    else:
        tolerance = EXACT
    return _is_near(_evaluate(left, [], 0), _evaluate(right, [], 0), tolerance)


def evaluate_number(latex: str) -> float | None:
    """Evaluate a real number; None where `latex` is none."""
    expression = parse_value(latex)
    if expression is None or expression.free_symbols or not _is_computable(expression):
        return None
    value = _evaluate(expression, [], 0)
    return float(value) if value is not None and value.is_real else None


def is_proportional(left: Any, right: Any) -> bool:
    """Return whether `right` is a constant candidate than 0 times `left`: their equations ``= 0`` are
    the same."""
    if not (_is_computable(left) and _is_computable(right)):
        return False
    symbols = sorted(left.free_symbols | right.free_symbols, key=str)
    ratios = []
    for shift in range(len(POINTS)):
        denominator = _evaluate(left, symbols, shift)
        numerator = _evaluate(right, symbols, shift)
        if denominator is None or numerator is None or denominator == 0 or numerator == 0:
            return False
        ratios.append(numerator / denominator)
    return bool(symbols) and all(_is_near(ratios[0], ratio, EXACT) for ratio in ratios[1:])


def _evaluate(expression: Any, symbols: list[Any], shift: int) -> Any:
    """Evaluate at the point number `shift`; None where there is no finite value."""
    values = {
        symbol: POINTS[(shift + index) % len(POINTS)] + sympy.Rational(index + shift, 17)
        for index, symbol in enumerate(symbols)
    }
    value = expression.xreplace(values).doit().evalf(DIGITS)
    if not value.is_number or not value.is_finite or value.has(sympy.zoo, sympy.nan, sympy.oo):
        return None
    return value


def _is_near(left: Any, right: Any, tolerance: Any) -> bool:
    if left is None or right is None:
        return False
    difference = abs(sympy.N(left - right, DIGITS))
    return bool(difference <= tolerance * max(abs(sympy.N(left, DIGITS)), abs(EXACT)))


def _has_end(expression: Any) -> bool:
    """Return whether a value can be written as a decimal with an end."""
    if not expression.is_Rational:
        return False
    denominator = int(expression.q)
    for prime in (2, 5):
        while denominator % prime == 0:
            denominator //= prime
    return denominator == 1


def _is_computable(expression: Any) -> bool:
    """Return whether no part of an expression is too large to compute."""
    if expression.count_ops() > MOST_OPERATIONS:
        return False
    return _measure(expression) <= LARGEST


def _measure(expression: Any) -> float:
    """Estimate the decimal logarithm of the largest number that is met in computing a value."""
    parts = [_measure(part) for part in expression.args]
    largest = max(parts, default=0.0)
    if expression.is_Integer:
        return float(len(str(abs(int(expression)))))
    if expression.is_Rational:
        return float(max(len(str(abs(expression.p))), len(str(expression.q))))
    if expression.is_Pow:
        # A base of that many digits, and an exponent of that size.
        return max(largest, (parts[0] + 1) * _bound(parts[1]))
    if isinstance(expression, sympy.exp | sympy.sinh | sympy.cosh):
        return max(largest, _bound(parts[0]))
    if isinstance(expression, sympy.factorial | sympy.binomial):
        return max(largest, _bound(parts[0]) * (parts[0] + 1))
    if expression.is_Mul or expression.is_Add:
        return sum(parts)
    return largest


def _bound(digits: float) -> float:
    return 10.0**digits if digits < 300 else math.inf
