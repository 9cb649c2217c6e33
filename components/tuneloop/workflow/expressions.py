"""Argo's templating: ``{{tags}}``, ``{{=expressions}}`` and ``when`` conditions.

A `Scope` is flat, ``"tasks.update.outputs.parameters.loss" → "0.3"``, as the controller keeps it; every value is text
(artifacts apart). Expressions are the part of expr-lang (https://expr-lang.org/docs/language-definition) that pipelines
render: literals, lists, ``+ - * / %``, comparison, ``&& || ! and or not``, ``?:``, member and index access, ``in``,
``matches``, and the functions in `FUNCTIONS`. A ``when`` is govaluate's language, in which a bare word is a string.
Whatever else appears is refused by name. Both languages are read by Python's grammar, once their words are replaced by
Python's: ``!`` by ``~`` and ``matches`` by ``is``, which bind as tightly."""

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
    """Replace every tag in every string of `value`, also in nested lists and maps, by its text. Raises ExpressionError
    at a tag that `scope` does not hold, a faulty expression, or one without value."""
    if isinstance(value, str):
        return TAG.sub(lambda match: _resolve(match[1], scope), value)
    if isinstance(value, list):
        return [substitute_tags(item, scope) for item in value]
    if isinstance(value, dict):
        return {key: substitute_tags(item, scope) for key, item in value.items()}
    return value


def evaluate_expression(expression: str, scope: Scope) -> Any:
    """Evaluate an expr-lang `expression` (without braces) to a string, number, boolean, list, dict or None."""
    parsed = check_expression(expression)
    try:
        return _evaluate(parsed, _nest(scope))
    except ExpressionError as error:
        raise ExpressionError(f"{expression!r}: {error}") from None


def check_expression(expression: str) -> ast.expr:
    """Parse an expression, knowing no names. Raises ExpressionError at faulty grammar and at unsupported functions."""
    try:
        return _parse(expression)
    except ExpressionError as error:
        raise ExpressionError(f"{expression!r}: {error}") from None


def evaluate_boolean(expression: str, scope: Scope) -> bool:
    """Evaluate an expression that must be a boolean, as in ``retryStrategy.expression`` and hooks."""
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
    if tag.lstrip().startswith("="):
        if (value := evaluate_expression(tag.lstrip()[1:].strip(), scope)) is None:
            raise ExpressionError(f"{{{{{tag}}}}} has no value (nil)")
        return values.format_value(value)
    value = scope.get(tag.strip())
    if not isinstance(value, str):
        raise ExpressionError(f"failed to resolve {{{{{tag.strip()}}}}}")
    return value


def _nest(scope: Scope) -> JsonObject:
    """Turn ``{"a.b": 1}`` into ``{"a": {"b": 1}}``; where a name is both a value and a prefix, the members win."""
    root: JsonObject = {}
    for name in sorted(scope):
        *path, last = name.split(".")
        branch = root
        for part in path:
            if not isinstance(branch.get(part), dict):
                branch[part] = {}
            branch = branch[part]
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
    **{
        word: word
        for word in ("and", "or", "in", "not in", "==", "!=", "<=", ">=", *"-+*/%<>?:()[],")
    },
}


def _parse(source: str) -> ast.expr:
    """Parse an expression as Python's."""
    text, end = _translate(_read_words(source))
    if end:
        raise ExpressionError(f"unexpected {end!r}")
    try:
        parsed = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, RecursionError, MemoryError) as error:
        rest = text.strip()[(getattr(error, "offset", 0) or 1) - 1 :].split()
        raise ExpressionError(f"unexpected {rest[0] if rest else 'end'!r}") from None
    for node in ast.walk(parsed):
        if isinstance(node, ast.Call) and not isinstance(node.func, ast.Constant):
            name = re.sub(r"\['(\w+)'\]", r".\1", ast.unparse(node.func))
            if name not in FUNCTIONS:
                raise ExpressionError(f"the function {name} is not supported")
        if isinstance(node, ast.Compare) and len(node.ops) > 1:
            raise ExpressionError("a comparison of comparisons needs parentheses")
    return parsed


def _translate(words: Iterator[str]) -> tuple[str, str]:
    """Return the Python of an expression, and the bracket, comma or colon that ends it."""
    text = ""
    for word in words:
        if word == "?":
            yes, colon = _translate(words)
            no, end = _translate(words)
            if colon != ":":
                raise ExpressionError(f"unexpected {colon or 'end'!r}")
            return f"({yes}) if ({text}) else ({no})", end
        if word in (")", "]", ",", ":"):
            return text, word
        text += f" {word}"
        end = "," if word in ("(", "[") else ""
        while end == ",":
            part, end = _translate(words)
            text += part + end
        if end == ":":
            raise ExpressionError("slices are not supported")
    return text, ""


def _read_words(source: str) -> Iterator[str]:
    """Yield each word of an expression as Python has it."""
    for match in _TOKEN.finditer(source.rstrip()):
        kind = str(match.lastgroup)
        word = " ".join(match[str(match.lastgroup)].split(" "))
        if kind == "string":
            yield f"({values.parse_string_literal(word)!r})"  # Python would join two that follow one another
        elif kind == "member":
            yield f"[{word[1:].strip()!r}]"
        elif kind == "number" or word in _PYTHON:
            yield _PYTHON.get(word, word)
        elif kind == "name" and not keyword.iskeyword(word):
            yield word
        else:
            raise ExpressionError(f"unexpected {word!r}")


def _evaluate(node: ast.expr, env: JsonMapping | None) -> Any:
    """Evaluate a parsed expression; without an environment it is govaluate's, in which names are strings."""

    def value(inner: ast.expr) -> Any:
        return _evaluate(inner, env)

    match node:
        case ast.Constant():
            return node.value
        case ast.Name(id=name):
            if env is not None and name not in env:
                raise ExpressionError(f"unknown name {name!r}")
            return name if env is None else env[name]
        case ast.Subscript(value=owner, slice=key) if env is not None:
            return values.get_member(value(owner), value(key))
        case ast.List(elts=items) if env is not None:
            return [value(item) for item in items]
        case ast.Tuple(elts=items) if env is None:
            return [value(item) for item in items]
        case ast.Call(func=ast.Name(id=name), args=arguments) if env is not None:
            given = [value(argument) for argument in arguments]
            try:
                return FUNCTIONS[name](*given)
            except (TypeError, ValueError) as error:
                raise ExpressionError(
                    f"{name}({', '.join(map(values.format_json, given))}): {error}"
                ) from None
        case ast.IfExp(test=test, body=yes, orelse=no):
            return value(yes if _require_boolean(value(test), "?") else no)
        case ast.BoolOp(op=op, values=parts):
            decided, word = (True, "||") if isinstance(op, ast.Or) else (False, "&&")
            return (
                decided
                if any(_require_boolean(value(part), word) is decided for part in parts)
                else not decided
            )
        case ast.UnaryOp(op=ast.Invert(), operand=inner):
            return not _require_boolean(value(inner), "!")
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return -values.require_number(value(inner), "-")
        case ast.UnaryOp(op=ast.UAdd(), operand=inner):
            return values.require_number(value(inner), "+")
        case (
            ast.BinOp(left=left, op=sign, right=right)
            | ast.Compare(left=left, ops=[sign], comparators=[right])
        ):
            return values.apply_operator(type(sign), value(left), value(right))
    raise ExpressionError(f"unexpected {ast.unparse(node)!r}")


def _require_boolean(value: Any, op: str) -> bool:
    if not isinstance(value, bool):
        raise ExpressionError(f"{op!r} needs true or false, got {values.format_value(value)}")
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
"""The functions an expression may call: Argo's own names and expr-lang's."""
