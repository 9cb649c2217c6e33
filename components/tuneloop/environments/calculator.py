"""A calculator, the tool ``calculator`` with the argument ``expression``.

The policy writes ``<tool_call>{"name": "calculator", "arguments": {"expression": "3 * (4 + 5)"}}
</tool_call>``. A turn without a call is the final answer; the rewards of the row judge it.
"""

import ast
import math
import operator
from collections.abc import Callable
from fractions import Fraction

from tuneloop.core.json_types import JsonMapping
from tuneloop.environments import Call, Environment, Reply, parse_tool_calls

# `tuneloop probe` sends its attacks there. `_answer_call` knows the same names.
TOOL = ("calculator", "expression")
"""The tool's name, and its argument that holds what the policy writes."""
LONGEST = 200
"""The maximum characters of an expression, which bounds its depth and the size of its numbers."""
# Without a power, whose value could have more digits than there is memory for.
BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
NO_EXPRESSION = "is not an expression of numbers, + - * / and parentheses"


def create_environment(row: JsonMapping) -> Environment:
    """Begin an episode in which the policy may calculate."""
    return Calculator()


class Calculator:
    """`Environment` with one tool."""

    def step(self, turn: str) -> Reply:
        """Answer each call on a line of its own."""
        calls = parse_tool_calls(turn)
        if not calls:
            return Reply(done=True)
        return Reply("\n".join(map(_answer_call, calls)))


def evaluate_expression(expression: str) -> Fraction:
    """Compute the exact value of an expression, without executing code.

    Args:
        expression: numbers, ``+ - * /`` and parentheses.

    Raises:
        ValueError: it is something else, too long, or divides by 0.
    """
    if len(expression) > LONGEST:
        raise ValueError(f"is longer than {LONGEST} characters")
    try:
        return _compute(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError as error:
        raise ValueError("divides by zero") from error
    except (SyntaxError, RecursionError, MemoryError) as error:
        raise ValueError(NO_EXPRESSION) from error


def _answer_call(call: Call) -> str:
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
    except (OverflowError, ValueError):
        # It is beyond a float, or has more digits than Python writes out.
        return "error: the value is too large"


def _compute(node: ast.expr) -> Fraction:
    match node:
        # To Python True is an integer.
        case ast.Constant(value=bool() | complex()):
            pass
        case ast.Constant(value=int() | float() as number):
            if math.isinf(number):
                raise ValueError("has a number that is too large")
            # The text of a float has the digits that the policy wrote; its bits do not.
            return Fraction(str(number))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_compute(operand)
        case ast.BinOp(left=first, op=sign, right=second) if type(sign) in BINARY:
            return BINARY[type(sign)](_compute(first), _compute(second))
    raise ValueError(NO_EXPRESSION)
