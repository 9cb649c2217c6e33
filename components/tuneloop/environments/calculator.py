"""A calculator: ``<tool_call>{"name": "calculator", "arguments": {"expression": "3 * (4 + 5)"}}</tool_call>``. A turn
without a call is the final answer; the rewards of the row judge it."""

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from tuneloop.environments import Call, Environment, Reply, tool_calls

LONGEST = 200
"""Characters of an expression."""
BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def create_environment(row: Mapping[str, Any]) -> Environment:
    """Begin an episode in which the policy may calculate."""
    return Calculator()


class Calculator:
    """`Environment` with one tool."""

    def step(self, said: str) -> Reply:
        calls = tool_calls(said)
        return Reply("\n".join(_answer(call) for call in calls)) if calls else Reply(done=True)


def evaluate_expression(expression: str) -> Fraction:
    """Compute the exact value of an expression of numbers, ``+ - * /`` and parentheses, without executing code. Raises
    ValueError where it is something else, too long, or divides by 0."""
    if len(expression) > LONGEST:
        raise ValueError(f"is longer than {LONGEST} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError as error:
        raise ValueError("divides by zero") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError("is not an expression of numbers, + - * / and parentheses") from error


def _answer(call: Call) -> str:
    if call.problem:
        return f"error: the call {call.problem}"
    expression = call.arguments.get("expression")
    if call.name != "calculator" or not isinstance(expression, str):
        return 'error: there is only calculator, and it takes {"expression": "…"}'
    try:
        value = evaluate_expression(expression)
    except ValueError as error:
        return f"error: {error}"
    try:
        return str(value) if value.denominator == 1 else f"{float(value):.12g}"
    except (
        OverflowError,
        ValueError,
    ):  # beyond a float, or beyond the digits that Python writes out
        return "error: the value is too large"


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=bool() | complex()):
            pass
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -_value(inner)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in BINARY:
            return BINARY[type(sign)](_value(left), _value(right))
    raise ValueError("is not an expression of numbers, + - * / and parentheses")
