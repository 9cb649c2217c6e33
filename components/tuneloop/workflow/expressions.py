"""Argo's templating: ``{{tags}}``, ``{{=expressions}}`` and ``when`` conditions.

A `Scope` is flat, ``"tasks.update.outputs.parameters.loss" → "0.3"``, as the controller keeps it;
every value is text (artifacts apart). Expressions are the part of expr-lang
(https://expr-lang.org/docs/language-definition) that pipelines render: literals, lists,
``+ - * / %``, comparison, ``&& || ! and or not``, ``?:``, member and index access, ``in``,
``matches``, and the functions in `FUNCTIONS`. A ``when`` is govaluate's language, in which a bare
word is a string. Whatever else appears is refused by name.

Both languages are read by Python's grammar, once their words are replaced by Python's: ``!`` by
``~`` and ``matches`` by ``is``, which bind as tightly. An operator that is added is a word of
`_PYTHON` or `_SHARED`, and an entry of `expression_values.py: _OPERATORS` or a case of `_evaluate`.

The local executor evaluates by it, and `argo/lint.py` parses by it: what is not supported here is
refused on a cluster, too. Argo's own answers are in tests/unit/local/parity
(`tests/unit/local/test_parity.py`).
"""

import ast
import keyword
import re
from collections.abc import Callable, Iterator
from typing import Any

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow import expression_values as values
from tuneloop.workflow.expression_values import ExpressionError

TAG = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
Scope = JsonMapping


def substitute_tags(value: Any, scope: Scope) -> Any:
    """Replace every tag in every string of a value by its text.

    Args:
        value: a string, or a list or map that holds strings, at any depth; all else stays.
        scope: name → value of the tags.

    Raises:
        ExpressionError: `scope` does not hold a tag, or an expression is faulty or has no value.
    """
    if isinstance(value, str):
        return TAG.sub(lambda match: _resolve(match[1], scope), value)
    if isinstance(value, list):
        return [substitute_tags(item, scope) for item in value]
    if isinstance(value, dict):
        return {key: substitute_tags(item, scope) for key, item in value.items()}
    return value


def evaluate_expression(expression: str, scope: Scope) -> Any:
    """Evaluate an expr-lang `expression` (without braces) to a string, number, boolean, list,
    dict or None.
    """
    node = check_expression(expression)
    try:
        return _evaluate(node, _nest(scope))
    except ExpressionError as error:
        raise ExpressionError(f"{expression!r}: {error}") from None


def check_expression(expression: str) -> ast.expr:
    """Parse an expression, knowing no names. Raises ExpressionError at faulty grammar and at
    unsupported functions.
    """
    try:
        return _parse(expression)
    except ExpressionError as error:
        raise ExpressionError(f"{expression!r}: {error}") from None


def evaluate_boolean(expression: str, scope: Scope) -> bool:
    """Evaluate an expression that must be a boolean, as in ``retryStrategy.expression`` and
    hooks.
    """
    value = evaluate_expression(expression, scope)
    if not isinstance(value, bool):
        raise ExpressionError(f"{expression!r} is {values.format_value(value)}, not true or false")
    return value


def evaluate_when(when: str) -> bool:
    """Evaluate an already substituted ``when``; an empty one holds."""
    if not when.strip():
        return True
    try:
        value = _evaluate(_parse(when), None)
    except ExpressionError as error:
        hint = "quote both sides if a value may hold spaces, hyphens or nothing"
        raise ExpressionError(f"invalid 'when' expression {when!r}: {error} ({hint})") from None
    if not isinstance(value, bool):
        raise ExpressionError(
            f"'when' expression {when!r} is {values.format_value(value)}, not true or false"
        )
    return value


def _resolve(tag: str, scope: Scope) -> str:
    """Return the text of a tag, which is a name, or an expression after ``=``."""
    text = tag.strip()
    if text.startswith("="):
        result = evaluate_expression(text[1:].strip(), scope)
        if result is None:
            raise ExpressionError(f"{{{{{tag}}}}} has no value (nil)")
        return values.format_value(result)
    # Artifacts are in the scope, too, and have no text.
    value = scope.get(text)
    if not isinstance(value, str):
        raise ExpressionError(f"failed to resolve {{{{{text}}}}}")
    return value


def _nest(scope: Scope) -> JsonObject:
    """Turn ``{"a.b": 1}`` into ``{"a": {"b": 1}}``; if a name is both a value and a prefix, the
    members win.
    """
    root: JsonObject = {}
    # A prefix comes before its members, which then replace it.
    for name in sorted(scope):
        parents = name.split(".")
        last = parents.pop()
        branch = root
        for parent in parents:
            if not isinstance(branch.get(parent), dict):
                branch[parent] = {}
            branch = branch[parent]
        branch[last] = scope[name]
    return root


_TOKEN = re.compile(
    r"""\s*(?:
      (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    | (?P<number>\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)
    | (?P<member>\.\s*[A-Za-z_]\w*)
    | (?P<name>not\s+in\b|[A-Za-z_]\w*)
    | (?P<op>\?\?|\?\.|\*\*|&&|\|\||==|!=|<=|>=|=~|!~|\.\.|\S)
    )""",
    re.VERBOSE,
)
_PYTHON = {
    "&&": "and",
    "||": "or",
    "!": "~",
    "not": "~",
    "=~": "is",
    "matches": "is",
    "true": "True",
    "false": "False",
    "nil": "None",
}
"""Words of both languages that Python writes otherwise."""
_SHARED = {
    "and",
    "or",
    "in",
    "not in",
    "==",
    "!=",
    "<=",
    ">=",
} | set("+-*/%<>?:()[],")
"""Words that are the same in all three."""


def _parse(source: str) -> ast.expr:
    """Parse an expression as Python's; raise ExpressionError at faulty grammar and at unsupported
    functions.
    """
    python, end = _translate(_read_words(source))
    if end:
        raise ExpressionError(f"unexpected {end!r}")
    python = python.strip()
    try:
        expression = ast.parse(python, mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        # Only a SyntaxError says where it is, from 1.
        offset = error.offset if isinstance(error, SyntaxError) else None
        remainder = python[(offset or 1) - 1 :].split()
        word = remainder[0] if remainder else "end"
        raise ExpressionError(f"unexpected {word!r}") from None
    # What Python's grammar takes and these languages do not.
    for node in ast.walk(expression):
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Constant):
            # A member is an index by now: `a.b` is `a['b']`.
            name = re.sub(
                r"\['(\w+)'\]",
                r".\1",
                ast.unparse(node.func),
            )
            if name not in FUNCTIONS:
                raise ExpressionError(f"the function {name} is not supported")
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            raise ExpressionError("a comparison of comparisons needs parentheses")
    return expression


def _translate(words: Iterator[str]) -> tuple[str, str]:
    """Return the Python of an expression, and the bracket, comma or colon that ends it."""
    # It calls itself for what is in brackets, or after a question mark.
    python = ""
    for word in words:
        if word == "?":
            # Python has the condition between the two results.
            positive, colon = _translate(words)
            negative, end = _translate(words)
            if colon != ":":
                raise ExpressionError(f"unexpected {colon or 'end'!r}")
            return f"({positive}) if ({python}) else ({negative})", end
        if word in (")", "]", ",", ":"):
            return python, word
        python += f" {word}"
        end = "," if word in ("(", "[") else ""
        while end == ",":
            part, end = _translate(words)
            python += part + end
        if end == ":":
            raise ExpressionError("slices are not supported")
    return python, ""


def _read_words(source: str) -> Iterator[str]:
    """Yield each word of an expression as Python has it."""
    for match in _TOKEN.finditer(source.rstrip()):
        kind = str(match.lastgroup)
        word = " ".join(match[kind].split(" "))
        if kind == "string":
            # In parentheses, as Python would join two strings that follow one another.
            yield f"({values.parse_string_literal(word)!r})"
        elif kind == "member":
            yield f"[{word[1:].strip()!r}]"
        elif kind == "number" or word in _SHARED:
            yield word
        elif word in _PYTHON:
            yield _PYTHON[word]
        elif kind == "name" and not keyword.iskeyword(word):
            yield word
        else:
            raise ExpressionError(f"unexpected {word!r}")


def _evaluate(
    node: ast.expr,
    env: JsonMapping | None,
) -> Any:
    """Evaluate a parsed expression.

    Args:
        node: what Python's grammar made of it.
        env: name → value; None: the expression is govaluate's, in which names are strings.

    Raises:
        ExpressionError: the language has no such expression, or an operator does not take its
        operands.
    """

    def evaluate(inner: ast.expr) -> Any:
        return _evaluate(inner, env)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name(id=name):
            return _look_up(name, env)
        case ast.Subscript(value=owner, slice=key) if env is not None:
            return values.get_member(evaluate(owner), evaluate(key))
        # Each of the two languages has its own brackets for a list.
        case ast.List(elts=items) if env is not None:
            return [evaluate(item) for item in items]
        case ast.Tuple(elts=items) if env is None:
            return [evaluate(item) for item in items]
        case ast.Call(func=ast.Name(id=name), args=arguments) if env is not None:
            return _call_function(name, [evaluate(argument) for argument in arguments])
        case ast.IfExp(test=test, body=positive, orelse=negative):
            is_positive = _require_boolean(evaluate(test), "?")
            return evaluate(positive if is_positive else negative)
        case ast.BoolOp(op=ast.Or(), values=operands):
            return any(_require_boolean(evaluate(operand), "||") for operand in operands)
        case ast.BoolOp(op=ast.And(), values=operands):
            return all(_require_boolean(evaluate(operand), "&&") for operand in operands)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return not _require_boolean(evaluate(operand), "!")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -values.require_number(evaluate(operand), "-")
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return values.require_number(evaluate(operand), "+")
        # Python's grammar has two kinds of binary operators, where these languages have one.
        case (
            ast.BinOp(left=first, op=operation, right=second)
            | ast.Compare(left=first, ops=[operation], comparators=[second])
        ):
            return values.apply_operator(type(operation), evaluate(first), evaluate(second))
    raise ExpressionError(f"unexpected {ast.unparse(node)!r}")


def _look_up(
    name: str,
    env: JsonMapping | None,
) -> Any:
    """Return the value of a name; the name itself in a language without names."""
    if env is None:
        return name
    if name not in env:
        raise ExpressionError(f"unknown name {name!r}")
    return env[name]


def _call_function(name: str, arguments: list[Any]) -> Any:
    """Call a function of an expression; raise ExpressionError if it does not take these
    arguments.
    """
    try:
        return FUNCTIONS[name](*arguments)
    except (TypeError, ValueError) as error:
        call = f"{name}({', '.join(map(values.format_json, arguments))})"
        raise ExpressionError(f"{call}: {error}") from None


def _require_boolean(value: Any, sign: str) -> bool:
    """Return a value, which an operator needs to be true or false; raise ExpressionError if it is
    neither.
    """
    if not isinstance(value, bool):
        raise ExpressionError(f"{sign!r} needs true or false, got {values.format_value(value)}")
    return value


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "asInt": values.to_int,
    "int": values.to_int,
    "asFloat": values.to_float,
    "float": values.to_float,
    "string": values.format_value,
    "toJson": values.format_json,
    "len": len,
}
"""The functions an expression may call: Argo's own names and expr-lang's. One that is added has to
answer as Go's does, also for wrong arguments, which raise ValueError."""
