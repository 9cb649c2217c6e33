"""Read the tool calls of a completion, in the formats in which models write them.

- Hermes, Qwen: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, and Qwen3-Coder's
  ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``
- Mistral: ``[TOOL_CALLS] [{…}, …]`` and ``[TOOL_CALLS]NAME[ARGS]{…}``
- Llama: ``{"name": …, "parameters": {…}}``, perhaps after ``<|python_tag|>``, and ``[f(a=1)]``
- OpenAI: ``{"tool_calls": [{"function": {"name": …, "arguments": "{…}"}}]}``, or the list alone
- BFCL: ``[f(a=1), g(b=2)]``, and ``[{"f": {"a": 1}}]``

Text may stand around what has a mark of its own; else the completion, or its only fenced block, is
the calls and nothing else.

Rollouts are decoded without special tokens, except for those that `formats/tokens.py: CALL_MARKS`
lists: a mark that is added here, and that a tokenizer takes for special, belongs there.

The reward `tool_calls` alone reads calls by it, so a format that is added is known to no
environment: these read Hermes' JSON only (`environments/__init__.py: parse_tool_calls`). Calls in
data sets are read by `data/messages.py: parse_calls`. `tests/unit/rewards/test_tool_calls.py` has
each format, and docs/rewards.md lists them.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuneloop.core.json_types import JsonMapping
from tuneloop.rewards.structures.json_text import (
    NotJson,
    parse_json,
    take_fenced,
    take_final_text,
)

TAG = "<tool_call>"
END_TAG = "</tool_call>"
XML_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)</function>", re.DOTALL)
XML_PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?</parameter>", re.DOTALL)
MISTRAL = "[TOOL_CALLS]"
MISTRAL_CALL = re.compile(
    r"\s*([\w.\-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(\{.*\})\s*", re.DOTALL
)
PYTHON_TAG = "<|python_tag|>"
BETWEEN_OBJECTS = re.compile(r"(?<=\})\s*[;\n]\s*(?=\{)")
MOST_CALLS = 64
"""The most calls of one completion; with more it has none that count. Comparing them in any order
takes more than linear time."""


@dataclass(frozen=True)
class Call:
    """A call of a tool; its arguments by their names."""

    name: str
    arguments: JsonMapping


class NotCalls(ValueError):
    """The text does not hold tool calls in a known format."""


def parse_calls(completion: str, parameters: Mapping[str, Sequence[str]]) -> list[Call]:
    """Parse the tool calls of a completion.

    Args:
        completion: what the model wrote.
        parameters: tool → the names of its parameters in their order, for ``f(1)``.

    Raises:
        NotCalls: there are none, or they are written in no known format.
    """
    text = take_final_text(completion)
    try:
        calls = _parse_text(text, parameters)
    except (NotJson, RecursionError, MemoryError) as error:
        raise NotCalls(str(error)[:200]) from None
    if not 0 < len(calls) <= MOST_CALLS:
        raise NotCalls(f"{len(calls)} calls")
    return calls


def _parse_text(text: str, parameters: Mapping[str, Sequence[str]]) -> list[Call]:
    """Parse calls in any of the formats; the first whose mark is in the text decides.

    Args:
        text: without thoughts and tokens that end turns.
        parameters: as of `parse_calls`.
    """
    tagged = _take_tagged(text)
    if tagged:
        return [call for block in tagged for call in _parse_tagged(block)]
    # Marks are looked for first: what stands around them is prose.
    if MISTRAL in text:
        return [call for part in text.split(MISTRAL)[1:] for call in _parse_mistral(part.strip())]
    if PYTHON_TAG in text:
        text = text.rpartition(PYTHON_TAG)[2].strip()
    text = take_fenced(text)
    if text[:1] == "{" or (text[:1] == "[" and text[1:].lstrip()[:1] in "{]"):
        return _read_calls(_parse_objects(text))
    return _parse_pythonic(text, parameters)


def _take_tagged(text: str) -> list[str]:
    """Take what stands between tags, each in one look at the text."""
    parts = (part.partition(END_TAG) for part in text.split(TAG)[1:])
    return [block.strip() for block, end, _ in parts if end]


def _parse_tagged(block: str) -> list[Call]:
    functions = XML_FUNCTION.findall(block)
    if not functions:
        return _read_calls(parse_json(block))
    calls: list[Call] = []
    for name, body in functions:
        arguments = {key: _parse_plain(value) for key, value in XML_PARAMETER.findall(body)}
        calls.append(Call(name, arguments))
    return calls


def _parse_plain(value: str) -> Any:
    """Parse a value that is JSON, or text without quotes."""
    try:
        return parse_json(value)
    except NotJson:
        return value


def _parse_mistral(text: str) -> list[Call]:
    named = MISTRAL_CALL.fullmatch(text)
    if named is not None:
        return [Call(named[1], _read_arguments(parse_json(named[2])))]
    return _read_calls(parse_json(text))


def _parse_objects(text: str) -> Any:
    """Parse a JSON value, or several that Llama separates by semicolons and others by lines."""
    try:
        return parse_json(text)
    except NotJson:
        parts = BETWEEN_OBJECTS.split(text)
        if len(parts) < 2:
            raise
    return [parse_json(part) for part in parts]


def _read_calls(value: Any) -> list[Call]:
    """Read the calls in a JSON value. Raises NotCalls: it holds none."""
    match value:
        case list():
            return [call for part in value for call in _read_calls(part)]
        case {"tool_calls": list() as calls}:
            return _read_calls(calls)
        case {"function": dict() as call} | {"function_call": dict() as call}:
            return _read_calls(call)
        case {"name": str(name)} | {"function": str(name)}:
            arguments = value.get("arguments", value.get("parameters", {}))
        case dict() if len(value) == 1:
            ((name, arguments),) = value.items()
        case _:
            raise NotCalls("no object with a name")
    return [Call(name, _read_arguments(arguments))]


def _read_arguments(value: Any) -> JsonMapping:
    if isinstance(value, str):
        value = parse_json(value or "{}")
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise NotCalls("arguments that are no object")
    return value


def _parse_pythonic(text: str, parameters: Mapping[str, Sequence[str]]) -> list[Call]:
    """Parse ``f(a=1)``, several in brackets, or one a line."""
    try:
        tree = ast.parse(text.strip())
    except (SyntaxError, ValueError) as error:
        raise NotCalls(str(error)[:200]) from None
    # Brackets and commas group calls; nothing else of Python is a call.
    expressions: list[ast.expr] = []
    for statement in tree.body:
        match statement:
            case ast.Expr(value=ast.List(elts=elements) | ast.Tuple(elts=elements)):
                expressions += elements
            case ast.Expr(value=expression):
                expressions.append(expression)
            case _:
                raise NotCalls("a statement")
    return [_read_pythonic(expression, parameters) for expression in expressions]


def _read_pythonic(expression: ast.expr, parameters: Mapping[str, Sequence[str]]) -> Call:
    if not isinstance(expression, ast.Call):
        raise NotCalls("an expression that is no call")
    name = ast.unparse(expression.func)
    if not re.fullmatch(r"[\w.]+", name):
        raise NotCalls("a call of what is no name")
    names = parameters.get(name, ())
    if len(expression.args) > len(names):
        raise NotCalls("arguments without names")
    arguments = {key: _read_literal(node) for key, node in zip(names, expression.args)}
    for keyword in expression.keywords:
        if keyword.arg is None or keyword.arg in arguments:
            raise NotCalls("the same argument twice")
        arguments[keyword.arg] = _read_literal(keyword.value)
    return Call(name, arguments)


def _read_literal(node: ast.expr) -> Any:
    """Read a literal as the JSON value that it stands for; `true` and `null` are known, too."""
    if isinstance(node, ast.Name) and node.id in ("true", "false", "null"):
        return json.loads(node.id)
    try:
        value = ast.literal_eval(node)
        # A tuple is a list, and what has no place in JSON is no argument.
        return json.loads(json.dumps(value, allow_nan=False))
    except (ValueError, TypeError, OverflowError) as error:
        raise NotCalls(str(error)[:200]) from None
