"""Operators, conversions and member access of expr-lang (github.com/expr-lang/expr), on Python's values."""

import ast
import json
import math
import operator
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any


class ExpressionError(ValueError):
    """A tag or expression that cannot be resolved; the message names it."""


def format_value(value: Any) -> str:
    """Format a value as Argo writes it into a parameter: JSON, without quotes around a string."""
    return value if isinstance(value, str) else format_json(value)


def format_json(value: Any) -> str:
    """Format a value as Go does: sorted keys, integral floats without a point."""
    if isinstance(value, float) and math.isfinite(value):
        if value.is_integer() and abs(value) < 1e21:
            return str(int(value))
        return (
            format(Decimal(repr(value)), "f")
            if 1e-6 <= abs(value) < 1e21
            else repr(value).replace("e-0", "e-")
        )
    if isinstance(value, list):
        return f"[{','.join(map(format_json, value))}]"
    if isinstance(value, dict):
        return (
            "{" + ",".join(f"{json.dumps(k)}:{format_json(value[k])}" for k in sorted(value)) + "}"
        )
    return json.dumps(value, ensure_ascii=False)


def parse_string_literal(word: str) -> str:
    """Return the text of a string literal. Raises ExpressionError at an escape that JSON lacks."""
    body = word[1:-1].replace("\\'", "'") if word[0] == "'" else word[1:-1]
    try:
        return str(json.loads('"' + re.sub(r'(?<!\\)"', r"\"", body) + '"', strict=False))
    except ValueError as error:
        raise ExpressionError(f"{word} is not text ({error})") from None


def get_member(value: Any, key: Any) -> Any:
    """Return a member of a mapping or an item of a list; None for a key that a mapping does not have. Raises
    ExpressionError where the index is out of range, or the value has no members."""
    if isinstance(value, dict):
        return value.get(key)
    if isinstance(value, list) and isinstance(key, int) and not isinstance(key, bool):
        if -len(value) <= key < len(value):
            return value[key]
        raise ExpressionError(f"index {key} is out of range of {len(value)} items")
    raise ExpressionError(f"cannot take {key!r} of {format_value(value)}")


def is_number(value: Any) -> bool:
    """Say whether a value is a number; a boolean is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_number(value: Any, op: str) -> Any:
    """Return `value`. Raises ExpressionError where it is not a number, which the operator needs."""
    if not is_number(value):
        hint = "asInt() and asFloat() make one of text"
        raise ExpressionError(f"{op!r} needs a number, got {format_json(value)} ({hint})")
    return value


def apply_operator(op: type[ast.AST], left: Any, right: Any) -> Any:
    """Apply a binary operator; `ast.Is` means ``matches``. Raises ExpressionError at operands that it does not take."""
    if op in (ast.Eq, ast.NotEq):
        alike = is_number(left) == is_number(right) and isinstance(left, bool) == isinstance(
            right, bool
        )
        return (alike and left == right) == (op is ast.Eq)
    if op in (ast.In, ast.NotIn):
        if not isinstance(right, list | dict):
            raise ExpressionError(
                f"'in' needs a list or map on its right, got {format_json(right)}"
            )
        return any(apply_operator(ast.Eq, left, item) for item in right) == (op is ast.In)
    texts = isinstance(left, str) and isinstance(right, str)
    if op is ast.Is:
        if not texts:
            raise ExpressionError(
                f"'matches' needs two strings, got {format_json(left)} and {format_json(right)}"
            )
        return re.search(right, left) is not None
    sign, apply = _OPERATORS[op]
    if texts and (sign == "+" or op in _ORDER):
        return apply(left, right)
    if op in _ORDER and not (is_number(left) and is_number(right)):
        raise ExpressionError(f"cannot compare {format_json(left)} {sign} {format_json(right)}")
    a = require_number(left, sign)
    b = require_number(right, sign)
    try:
        return apply(a, b)
    except (ZeroDivisionError, ValueError):  # math.fmod raises the latter
        raise ExpressionError(f"{left} {sign} {right}: division by zero") from None


def _remainder(a: Any, b: Any) -> Any:
    """Compute a remainder that has the sign of `a`, as Go does."""
    return int(math.fmod(a, b)) if isinstance(a, int) and isinstance(b, int) else math.fmod(a, b)


_OPERATORS: dict[type[ast.AST], tuple[str, Callable[[Any, Any], Any]]] = {
    ast.Lt: ("<", operator.lt),
    ast.LtE: ("<=", operator.le),
    ast.Gt: (">", operator.gt),
    ast.GtE: (">=", operator.ge),
    ast.Add: ("+", operator.add),
    ast.Sub: ("-", operator.sub),
    ast.Mult: ("*", operator.mul),
    ast.Div: ("/", operator.truediv),
    ast.Mod: ("%", _remainder),
}
_ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def to_int(value: Any) -> int:
    """Convert a value as `asInt` does. Raises ValueError where it is neither a number nor the text of an integer."""
    if isinstance(value, str):
        if not re.fullmatch(r"[-+]?\d+", value):
            raise ValueError("not an integer")
        return int(value)
    return int(require_number(value, "int"))


def to_float(value: Any) -> float:
    """Convert a value as `asFloat` does. Raises ValueError where it is neither a number nor the text of one."""
    return float(value) if isinstance(value, str) else float(require_number(value, "float"))
