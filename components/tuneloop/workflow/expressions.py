"""Argo's templating: ``{{tags}}``, ``{{=expressions}}`` and ``when`` conditions.

A `Scope` is flat, ``"tasks.update.outputs.parameters.loss" → "0.3"``, as the controller keeps it; every value is text
(artifacts apart). Expressions are the subset of expr-lang (https://expr-lang.org/docs/language-definition) that
workflows use: literals, lists, maps, arithmetic, comparison, ``&& || ! and or not``, ``?:``, ``??``, ``?.``, member and
index access, ``in``, ``contains startsWith endsWith matches``, and the functions in `FUNCTIONS`. A ``when`` is
govaluate's language, in which a bare word is a string. Whatever else appears is refused by name.

This module needs the standard library only.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from tuneloop.workflow.expression_values import (
    ExpressionError,
    apply_operator,
    format_json,
    format_value,
    get_member,
    parse_string_literal,
    require_number,
    to_float,
    to_int,
)

TAG = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)
Scope = Mapping[str, Any]


def substitute_tags(value: Any, scope: Scope) -> Any:
    """Replace every tag in every string of `value`, also in nested lists and maps, by its text.

    Raises:
        ExpressionError: a tag that `scope` does not hold, a faulty expression, an expression without value.
    """
    if isinstance(value, str):
        return TAG.sub(lambda match: _resolve(match[1], scope), value)
    if isinstance(value, list):
        return [substitute_tags(item, scope) for item in value]
    if isinstance(value, dict):
        return {key: substitute_tags(item, scope) for key, item in value.items()}
    return value


def evaluate_expression(expression: str, scope: Scope) -> Any:
    """Evaluate an expr-lang `expression` (without braces) to a string, number, boolean, list, dict or None."""
    try:
        return _Parser(_tokens(expression), _nest(scope)).whole()
    except ExpressionError as error:
        raise ExpressionError(f"{expression!r}: {error}") from None


def check_expression(expression: str) -> None:
    """Check an expression's grammar and the functions it calls, without knowing any names.

    Raises:
        ExpressionError: as `evaluate_expression` would whatever the names stand for.
    """
    parser = _Parser(_tokens(expression), {})
    parser.live = False
    try:
        parser.whole()
    except ExpressionError as error:
        raise ExpressionError(f"{expression!r}: {error}") from None


def evaluate_boolean(expression: str, scope: Scope) -> bool:
    """Evaluate an expression that must be a boolean, as in ``retryStrategy.expression`` and hooks."""
    value = evaluate_expression(expression, scope)
    if not isinstance(value, bool):
        raise ExpressionError(f"{expression!r} is {format_value(value)}, not true or false")
    return value


def evaluate_when(when: str) -> bool:
    """Evaluate an already substituted ``when``; an empty one holds."""
    if not when.strip():
        return True
    try:
        value = _Parser(_tokens(when), None).whole()
    except ExpressionError as error:
        hint = "quote both sides if a value may hold spaces, hyphens or nothing"
        raise ExpressionError(f"invalid 'when' expression {when!r}: {error} ({hint})") from None
    if not isinstance(value, bool):
        raise ExpressionError(f"'when' expression {when!r} is {format_value(value)}, not true or false")
    return value


def _resolve(tag: str, scope: Scope) -> str:
    if tag.lstrip().startswith("="):
        value = evaluate_expression(tag.lstrip()[1:].strip(), scope)
        if value is None:
            raise ExpressionError(f"{{{{{tag}}}}} has no value (nil)")
        return format_value(value)
    value = scope.get(tag.strip())
    if not isinstance(value, str):
        raise ExpressionError(f"failed to resolve {{{{{tag.strip()}}}}}")
    return value


def _nest(scope: Scope) -> dict[str, Any]:
    """Turn ``{"a.b": 1}`` into ``{"a": {"b": 1}}``; where a name is both a value and a prefix, the members win."""
    root: dict[str, Any] = {}
    for name in sorted(scope):
        *path, last = name.split(".")
        branch = root
        for part in path:
            step = branch.get(part)
            branch = branch.setdefault(part, {}) if isinstance(step, dict | None) else {}
            if step is not None and not isinstance(step, dict):
                _put(root, path[: path.index(part) + 1], branch)
        branch[last] = scope[name]
    return root


def _put(root: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        root = root[part]
    root[path[-1]] = value


_TOKEN = re.compile(
    r"""\s*(?:
      (?P<number>\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)
    | (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|`[^`]*`)
    | (?P<name>[A-Za-z_$][\w$]*)
    | (?P<op>\?\?|\?\.|\*\*|&&|\|\||==|!=|<=|>=|=~|!~|\.\.|[-+*/%^!<>?:()\[\]{},.|;\#])
    )""",
    re.VERBOSE,
)
Token = tuple[str, str]


def _tokens(source: str) -> list[Token]:
    tokens, at = [], 0
    while source[at:].strip():
        match = _TOKEN.match(source, at)
        if match is None:
            raise ExpressionError(f"unexpected {source[at:].strip()[0]!r}")
        tokens.append((str(match.lastgroup), match[str(match.lastgroup)]))
        at = match.end()
    return [*tokens, ("end", "the end")]


_BINARY = {
    **{"||": 1, "or": 1, "&&": 2, "and": 2},
    **dict.fromkeys(("==", "!=", "<", "<=", ">", ">=", "=~", "!~"), 4),
    **dict.fromkeys(("in", "contains", "startsWith", "endsWith", "matches", "not"), 4),
    **{"+": 6, "-": 6, "*": 7, "/": 7, "%": 7, "**": 9, "^": 9, "??": 10},
}
_UNSUPPORTED = {"..": "ranges", "|": "pipes", ";": "sequences", "#": "predicates", "{": "predicates"}


class _Parser:
    """Evaluates while it parses (precedence climbing). `live` is off in branches that are not taken.

    Without an environment it speaks govaluate, in which names are strings.
    """

    def __init__(self, tokens: list[Token], env: dict[str, Any] | None) -> None:
        self.tokens, self.env, self.at, self.live = tokens, env, 0, True

    def whole(self) -> Any:
        value = self.ternary()
        if self.tokens[self.at][0] != "end":
            raise self.refuse()
        return value

    def refuse(self) -> ExpressionError:
        word = self.tokens[self.at][1]
        return ExpressionError(
            f"{_UNSUPPORTED.get(word, 'unexpected')} {word!r}" + (" are not supported" * (word in _UNSUPPORTED))
        )

    def take(self, *words: str) -> str | None:
        kind, word = self.tokens[self.at]
        if kind in ("op", "name") and word in words:
            self.at += 1
            return word
        return None

    def need(self, word: str) -> None:
        if self.take(word) is None:
            raise self.refuse()

    def muted(self, live: bool, parse: Callable[[], Any]) -> Any:
        before, self.live = self.live, self.live and live
        try:
            return parse()
        finally:
            self.live = before

    def ternary(self) -> Any:
        value = self.binary(1)
        if self.take("?") is None:
            return value
        chosen = self.boolean(value, "?")
        yes = self.muted(chosen, self.ternary)
        self.need(":")
        no = self.muted(not chosen, self.ternary)
        return yes if chosen else no

    def binary(self, lowest: int) -> Any:
        left, before = self.unary(), ""
        while True:
            kind, op = self.tokens[self.at]
            rank = _BINARY.get(op, 0) if kind in ("op", "name") else 0
            if rank < lowest:
                return left
            if before and (op == "??") != (before == "??"):
                raise ExpressionError("'??' and other operators cannot be mixed; put one of them in parentheses")
            before = op
            self.at += 1
            negated = op == "not"
            if negated:
                op = self.take("in", "contains", "startsWith", "endsWith", "matches") or ""
                if not op:
                    raise self.refuse()
            left = self.apply(op, left, rank)
            left = not left if negated else left

    def apply(self, op: str, left: Any, rank: int) -> Any:
        if op in ("&&", "and"):
            right = self.muted(self.boolean(left, op), lambda: self.binary(rank + 1))
            return self.boolean(left, op) and self.boolean(right, op)
        if op in ("||", "or"):
            right = self.muted(not self.boolean(left, op), lambda: self.binary(rank + 1))
            return self.boolean(left, op) or self.boolean(right, op)
        if op == "??":
            right = self.muted(left is None, lambda: self.binary(rank + 1))
            return right if left is None else left
        right = self.binary(rank if op in ("**", "^") else rank + 1)
        return apply_operator(op, left, right) if self.live else None

    def boolean(self, value: Any, op: str) -> bool:
        if not self.live:
            return False
        if not isinstance(value, bool):
            raise ExpressionError(f"{op!r} needs true or false, got {format_value(value)}")
        return value

    def unary(self) -> Any:
        if op := self.take("!", "not"):
            return not self.boolean(self.unary(), op) if self.live else self.unary()
        if op := self.take("-", "+"):
            value = self.binary(8)
            if not self.live:
                return None
            return -require_number(value, op) if op == "-" else require_number(value, op)
        return self.postfix(self.primary())

    def postfix(self, value: Any) -> Any:
        while True:
            if self.take("?."):
                if value is None:
                    self.muted(False, lambda: self.postfix(self.member(None)))
                    return None
                value = self.member(value)
            elif self.env is not None and self.take("."):
                value = self.member(value)
            elif self.env is not None and self.take("["):
                value = self.index(value)
            else:
                return value

    def member(self, value: Any) -> Any:
        if self.take("["):
            return self.index(value)
        kind, name = self.tokens[self.at]
        if kind != "name":
            raise self.refuse()
        self.at += 1
        return get_member(value, name) if self.live else None

    def index(self, value: Any) -> Any:
        key = self.ternary()
        if self.take(":"):
            raise ExpressionError("slices are not supported")
        self.need("]")
        return get_member(value, key) if self.live else None

    def primary(self) -> Any:
        kind, word = self.tokens[self.at]
        self.at += 1
        if kind == "number":
            plain = word.replace("_", "")
            return int(plain) if plain.isdigit() else float(plain)
        if kind == "string":
            return parse_string_literal(word)
        if kind == "name":
            return self.name(word)
        if word == "(":
            return self.parenthesis()
        if word == "[" and self.env is not None:
            return self.sequence("]")
        if word == "{" and self.env is not None:
            return self.mapping()
        self.at -= 1
        raise self.refuse()

    def parenthesis(self) -> Any:
        value = self.ternary()
        if self.env is None and self.tokens[self.at][1] == ",":  # govaluate's list
            self.at += 1
            return [value, *self.sequence(")")]
        self.need(")")
        return value

    def name(self, word: str) -> Any:
        if word in ("true", "false"):
            return word == "true"
        if self.env is None:
            return word
        if word == "nil":
            return None
        if word == "sprig":
            self.need(".")
            raise ExpressionError(f"the function sprig.{self.tokens[self.at][1]} is not supported")
        if self.take("("):
            return self.call(word)
        if word not in self.env and self.live:
            raise ExpressionError(f"unknown name {word!r}")
        return self.env.get(word)

    def call(self, word: str) -> Any:
        if word not in FUNCTIONS:
            raise ExpressionError(f"the function {word} is not supported")
        arguments = self.sequence(")")
        try:
            return FUNCTIONS[word](*arguments) if self.live else None
        except (TypeError, ValueError) as error:
            raise ExpressionError(f"{word}({', '.join(map(format_json, arguments))}): {error}") from None

    def sequence(self, end: str) -> list[Any]:
        values: list[Any] = []
        while self.take(end) is None:
            values.append(self.ternary())
            if self.take(",") is None and self.tokens[self.at][1] != end:
                raise self.refuse()
        return values

    def mapping(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while self.take("}") is None:
            kind, key = self.tokens[self.at]
            self.at += 1
            self.need(":")
            values[parse_string_literal(key) if kind == "string" else key] = self.ternary()
            if self.take(",") is None and self.tokens[self.at][1] != "}":
                raise self.refuse()
        return values


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "asInt": to_int,
    "int": to_int,
    "asFloat": to_float,
    "float": to_float,
    "string": format_value,
    "toJson": format_json,
    "toJSON": format_json,
    "fromJSON": json.loads,
    "len": len,
    "abs": abs,
    "min": min,
    "max": max,
    "floor": lambda x: float(math.floor(x)),
    "ceil": lambda x: float(math.ceil(x)),
    "upper": str.upper,
    "lower": str.lower,
    "trim": str.strip,
    "split": str.split,
    "replace": str.replace,
    "join": lambda items, by="": by.join(items),
}
"""The functions an expression may call: Argo's own names and expr-lang's."""
