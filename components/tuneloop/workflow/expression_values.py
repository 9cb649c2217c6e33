"""Operators, conversions and member access of expr-lang (github.com/expr-lang/expr), on Python's
values. `expressions.py` parses; it also evaluates Argo's `when` (govaluate) by `apply_operator`.
Tests: `tests/unit/workflow/test_expressions.py`.
"""

import ast
import json
import math
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

SMALL = 1e-6
LARGE = 1e21
"""From `SMALL` up to `LARGE`, Go's encoding/json writes a number without an exponent."""


class ExpressionError(ValueError):
    """A tag or expression that cannot be resolved; the message names it."""


def format_value(value: Any) -> str:
    """Format a value as Argo writes it into a parameter: JSON, without quotes around a string."""
    return value if isinstance(value, str) else format_json(value)


def format_json(value: Any) -> str:
    """Format a value as Go does: sorted keys, integral floats without a point."""
    if isinstance(value, float) and math.isfinite(value):
        return _format_float(value)
    if isinstance(value, list):
        items = ",".join(format_json(item) for item in value)
        return f"[{items}]"
    if isinstance(value, dict):
        members = ",".join(f"{format_json(key)}:{format_json(value[key])}" for key in sorted(value))
        return f"{{{members}}}"
    return json.dumps(value, ensure_ascii=False)


def _format_float(value: float) -> str:
    """Format a finite float as Go's encoding/json does: an exponent below 1e-6 and from 1e21 on."""
    size = abs(value)
    if value.is_integer() and size < LARGE:
        return str(int(value))
    if SMALL <= size < LARGE:
        return format(Decimal(repr(value)), "f")
    # Python writes 1e-07, Go's encoding/json 1e-7.
    return repr(value).replace("e-0", "e-")


def parse_string_literal(word: str) -> str:
    """Return the text of a string literal. Raises ExpressionError at an escape that JSON lacks."""
    body = word[1:-1]
    if word[0] == "'":
        body = body.replace("\\'", "'")
    # A quote that needed no escape between the others needs one in JSON.
    literal = '"' + re.sub(r'(?<!\\)"', r"\"", body) + '"'
    try:
        return str(
            json.loads(
                literal,
                strict=False,
            )
        )
    except ValueError as error:
        raise ExpressionError(f"{word} is not text ({error})") from None


def get_member(
    value: Any,
    key: Any,
) -> Any:
    """Return a member of a mapping or an item of a list; None for a key that a mapping does not
    have.

    Raises:
        ExpressionError: the index is out of range, or the value has no members.
    """
    if isinstance(value, dict):
        return value.get(key)
    if (
        isinstance(
            value,
            list,
        )
        and isinstance(key, int)
        and not isinstance(key, bool)
    ):
        # A negative index counts from the end, in Go's expr as in Python.
        if -len(value) <= key < len(value):
            return value[key]
        raise ExpressionError(f"index {key} is out of range of {len(value)} items")
    raise ExpressionError(f"cannot take {key!r} of {format_value(value)}")


def is_number(value: Any) -> bool:
    """Return whether a value is a number; a boolean is not."""
    return isinstance(
        value,
        int | float,
    ) and not isinstance(value, bool)


def require_number(
    value: Any,
    sign: str,
) -> Any:
    """Return a value, which an operator needs to be a number; raise ExpressionError if it is
    none.
    """
    if not is_number(value):
        hint = "asInt() and asFloat() make one of text"
        raise ExpressionError(f"{sign!r} needs a number, got {format_json(value)} ({hint})")
    return value


def apply_operator(
    operation: type[ast.AST],
    first: Any,
    second: Any,
) -> Any:
    """Apply a binary operator.

    Args:
        operation: its class in Python's grammar, by which `expressions.py` parses. It writes words of
            expr-lang as words of Python: ``matches`` is parsed as ``is``, so `ast.Is`.
        first, second: the operands.

    Raises:
        ExpressionError: the operator does not take these operands.
    """
    if operation in (ast.Eq, ast.NotEq):
        return _are_equal(first, second) == (operation is ast.Eq)
    if operation in (ast.In, ast.NotIn):
        if not isinstance(second, list | dict):
            message = f"'in' needs a list or map on its right, got {format_json(second)}"
            raise ExpressionError(message)
        # A map has its keys as members.
        is_member = any(_are_equal(first, item) for item in second)
        return is_member == (operation is ast.In)
    are_texts = isinstance(first, str) and isinstance(second, str)
    if operation is ast.Is:
        if not are_texts:
            operands = f"{format_json(first)} and {format_json(second)}"
            raise ExpressionError(f"'matches' needs two strings, got {operands}")
        return re.search(second, first) is not None
    sign, apply = _OPERATORS[operation]
    # Texts can be joined, and compared with one another.
    if are_texts and (sign == "+" or operation in _ORDER):
        return apply(first, second)
    if operation in _ORDER and not (is_number(first) and is_number(second)):
        raise ExpressionError(f"cannot compare {format_json(first)} {sign} {format_json(second)}")
    require_number(first, sign)
    require_number(second, sign)
    try:
        return apply(first, second)
    except (ZeroDivisionError, ValueError):
        # `math.fmod` raises the latter.
        raise ExpressionError(f"{first} {sign} {second}: division by zero") from None


def _are_equal(
    first: Any,
    second: Any,
) -> bool:
    """Return whether two values are equal; a boolean equals no number, as it would in Python."""
    if is_number(first) != is_number(second):
        return False
    if isinstance(first, bool) != isinstance(second, bool):
        return False
    return bool(first == second)


def _compute_remainder(
    dividend: Any,
    divisor: Any,
) -> Any:
    """Compute a remainder that has the sign of the dividend, as in Go."""
    remainder = math.fmod(dividend, divisor)
    if isinstance(dividend, int) and isinstance(divisor, int):
        return int(remainder)
    return remainder


_OPERATORS: dict[type[ast.AST], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.Mod: ("%", _compute_remainder),
}
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def to_int(value: Any) -> int:
    """Convert a value as `asInt` does. Raises ValueError if it is neither a number nor the text
    of an integer.
    """
    if isinstance(value, str):
        if not re.fullmatch(r"[-+]?\d+", value):
            raise ValueError("not an integer")
        return int(value)
    # Towards zero, as in Go.
    return int(require_number(value, "int"))


def to_float(value: Any) -> float:
    """Convert a value as `asFloat` does. Raises ValueError if it is neither a number nor the text
    of one.
    """
    return (
        float(value)
        if isinstance(
            value,
            str,
        )
        else float(require_number(value, "float"))
    )
