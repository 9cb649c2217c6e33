"""Compute values that are written in LaTeX, and compare them.

math-verify parses them, and sympy evaluates them at some points with 40 digits. Nothing is
simplified, so no answer takes long to compare.

Parsing and evaluating run in the process of the reward, whose time is limited
(`rewards/workers.py`). The limits of `rewards/answers/forms.py` on an expression's length and depth
are checked before; those below, on its size, after it is parsed.
`tests/unit/rewards/test_numeric.py` has the expressions that must not be computed.
"""

import functools
import logging
import math
import re
from collections.abc import Iterator
from typing import Any

import sympy
from latex2sympy2_extended import NormalizationConfig
from math_verify import LatexExtractionConfig, parse

# math-verify's own time limits are alarms, which work in a main thread only and do not stop C code,
# so they are off (`parsing_timeout=None`), and its warnings that they are off are silenced.
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
"""The most operations of an expression that is computed; of a longer one the writing is compared
(`rewards/numeric.py: score`)."""
POINTS = (sympy.Rational(7312, 9973), sympy.Rational(23981, 7919), sympy.Rational(-13711, 9001))
"""Values of variables for which expressions are compared. None is special, as 0 or 1 would be."""
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
"""How math-verify normalizes an expression. It drops no units, since `forms.py` has taken them
off."""


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
    return expression.xreplace(decimals | imaginary)


def are_equal(gold: str, candidate: str, *, scale: sympy.Rational = sympy.S.One) -> bool:
    """Return whether `gold`, `scale` times, and `candidate`, in LaTeX, have the same value.

    A decimal has to be exact where the gold value is a decimal, too; it may be rounded, to six
    digits or more, where the gold value has no end, as 1/3 and the root of 2.
    """
    if len(gold) == len(candidate) == 1 and gold.isalpha():
        # The parser makes no difference between the letters A and a.
        return gold == candidate
    gold_value = parse_value(gold)
    value = parse_value(candidate)
    if gold_value is None or value is None:
        return False
    if scale != 1:
        gold_value = gold_value * scale
    if gold_value == value:
        return True
    if not (_is_computable(gold_value) and _is_computable(value)):
        return False
    if gold_value.free_symbols or value.free_symbols:
        return all(
            _is_near(gold_number, number, EXACT)
            for gold_number, number in _evaluate_at_points(gold_value, value)
        )
    gold_value = gold_value.doit()
    value = value.doit()
    tolerance = EXACT
    has_decimal = DECIMAL.search(candidate) is not None
    is_rounded = has_decimal != (DECIMAL.search(gold) is not None)
    if is_rounded and not _has_end(gold_value if has_decimal else value):
        tolerance = ROUNDED
    elif gold_value.is_Rational and value.is_Rational:
        return bool(gold_value == value)
    return _is_near(_evaluate(gold_value), _evaluate(value), tolerance)


def evaluate_number(latex: str) -> float | None:
    """Evaluate a real number; None where `latex` is none."""
    expression = parse_value(latex)
    if expression is None or expression.free_symbols or not _is_computable(expression):
        return None
    value = _evaluate(expression)
    return float(value) if value is not None and value.is_real else None


def is_proportional(first: Any, second: Any) -> bool:
    """Return whether one expression is a constant times the other one.

    The constant is not 0, so that their equations ``= 0`` are the same.
    """
    if not (_is_computable(first) and _is_computable(second)):
        return False
    if not first.free_symbols | second.free_symbols:
        return False
    ratios: list[Any] = []
    for denominator, numerator in _evaluate_at_points(first, second):
        if not denominator or not numerator:
            return False
        ratios.append(numerator / denominator)
    return all(_is_near(ratios[0], ratio, EXACT) for ratio in ratios[1:])


def _evaluate_at_points(first: Any, second: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the values of two expressions at each point; None where there is no finite value."""
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    for shift in range(len(POINTS)):
        # Each variable gets a value of its own, so that exchanging two of them shows.
        point = {
            symbol: POINTS[(shift + index) % len(POINTS)] + sympy.Rational(index + shift, 17)
            for index, symbol in enumerate(symbols)
        }
        yield _evaluate(first.xreplace(point)), _evaluate(second.xreplace(point))


def _evaluate(expression: Any) -> Any:
    """Evaluate an expression without variables; None where it has no finite value."""
    value = expression.doit().evalf(DIGITS)
    if not value.is_number or not value.is_finite or value.has(sympy.zoo, sympy.nan, sympy.oo):
        return None
    return value


def _is_near(first: Any, second: Any, tolerance: Any) -> bool:
    """Return whether two numbers differ by at most `tolerance` times the first one."""
    if first is None or second is None:
        return False
    difference = abs(sympy.N(first - second, DIGITS))
    return bool(difference <= tolerance * max(abs(sympy.N(first, DIGITS)), EXACT))


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
    """Return the size of a number of that many digits, up to what a float holds."""
    return 10.0**digits if digits < 300 else math.inf
