"""Chats of one form: OpenAI's messages, with text as content, whatever form a data set has them in.

What templates cannot render, or would render as something else, is settled here: the roles of
ShareGPT, content as a list of parts, ``content: null``, arguments as JSON text, calls without their
wrapper. What cannot be settled without changing what a row means is a `BadValue`.

Layouts and columns call it for each row. What it lets pass, `formats/chat_forms.py` can put to a
template. The keys of a message that it does not know stay as they are, such as
``reasoning_content`` (`formats/chat_forms.py: REASONING_KEYS`) and ``tool_call_id``;
`formats/conversations.py` reads ``weight``. With ``--messages``, `training/fetch.py` refuses any
key besides role and content.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from tuneloop.core.errors import shorten_text
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.data import BadValue
from tuneloop.data.readers.strict_json import check_depth, describe_type, parse_json
from tuneloop.formats.chat_forms import Message, find_function, join_parts

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "function_call": "assistant",
    "function-call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "function-response": "tool",
}
"""Roles as data sets write them, in lower case → what templates call them. A role whose content is
a call belongs into `CALLING_ROLES`, too."""
EXPECTED_ROLES = "system, user, assistant or tool (or one of ShareGPT's)"
"""How errors name the roles of `ROLES`, which are too many to list."""
CALLING_ROLES = ("function_call", "function-call", "tool_call")
"""Roles of ShareGPT whose content is the call itself, as JSON."""
JSON_BEGINNINGS = ("[", "{", '"')
"""How the JSON of a list, an object or a text begins. Text that begins otherwise was not meant as
JSON, and the error says that a list is expected, not that the JSON is damaged."""
SPEAKER = re.compile(r"\n\n(Human|Assistant):")
"""The beginning of a turn in a transcript of Anthropic's HH."""


def parse_messages(value: Any, column: str = "messages") -> list[Message]:
    """Make OpenAI's messages of a list of messages, or of its JSON text, in any form that data sets
    have.

    Args:
        value: what a row has.
        column: where it has it, for messages.

    Raises:
        BadValue: it is no such list, a message cannot be rendered as what it is, or they do not
            begin as a chat does.
    """
    messages = parse_turns(value, column)
    # A turn of the assistant is learned in the context before it, and there is none.
    if messages[0]["role"] == "assistant":
        remedy = "begins with the assistant's message: nothing comes before it"
        raise BadValue(f"column {column!r} {remedy}")
    # Many templates refuse a chat without the user's message, or begin one of their own.
    if not any(message["role"] == "user" for message in messages):
        raise BadValue(f"column {column!r} has no message of the user")
    return messages


def parse_turns(value: Any, column: str) -> list[Message]:
    """Make OpenAI's messages of turns that may stand anywhere in a chat, such as a completion.

    It takes what `parse_messages` takes, but the turns need not begin as a chat does. Raises
    BadValue.
    """
    is_json_text = isinstance(value, str) and value.lstrip().startswith(JSON_BEGINNINGS)
    if is_json_text:
        value = parse_text(value, f"column {column!r}")
    if not isinstance(value, list) or not value:
        kind = describe_type(value)
        if is_json_text:
            kind = f"text with {kind}"
        remedy = "must hold a list of messages, each with role and content"
        raise BadValue(f"column {column!r} {remedy}, not {kind}")
    check_depth(value)
    messages: list[Message] = []
    for number, message in enumerate(value, start=1):
        try:
            messages.append(_parse_message(message))
        except BadValue as error:
            raise BadValue(f"column {column!r}: message {number} {error}") from error
    return messages


def parse_text(text: str, subject: str) -> Any:
    """Parse JSON that a row has as text. Raises BadValue that names `subject`, what holds it: the
    row itself is JSON."""
    try:
        return parse_json(text)
    except BadValue as error:
        raise BadValue(f"{subject} has text that {error}") from error


def is_messages(value: Any) -> TypeGuard[list[Message]]:
    """Return whether a value looks like a list of messages, in one of the forms that are known."""
    if not isinstance(value, list) or not value:
        return False
    return all(
        isinstance(message, Mapping) and bool(message.keys() & {"role", "from"})
        for message in value
    )


def parse_tools(value: Any) -> list[JsonObject] | None:
    """Make OpenAI's list of tool schemas of a list, or of its JSON text; None where there are none.
    Raises BadValue: it is no such list."""
    if isinstance(value, str):
        value = parse_text(value, "column 'tools'") if value.strip() else None
    if not value:
        return None
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        kind = describe_type(value)
        raise BadValue(f"column 'tools' must hold a list of function schemas, not {kind}")
    tools: list[JsonObject] = []
    for number, tool in enumerate(value, start=1):
        tools.append(_parse_tool(tool, f"column 'tools': tool {number}"))
    return tools


def parse_calls(value: Any) -> list[JsonObject]:
    """Make OpenAI's tool calls of a list of calls, in their wrapper or without it. Raises BadValue:
    it is no such list, or a call has no name, or arguments that are no object.

    Calls that a policy writes are read by `rewards/structures/calls.py: parse_calls`.
    """
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        kind = describe_type(value)
        raise BadValue(f"has tool_calls that must be a list of calls, not {kind}")
    return [_parse_call(call) for call in value]


def get_text(message: JsonMapping) -> str:
    """Return the text of a message that is normalised."""
    return str(message.get("content") or "")


def _parse_message(message: Any) -> Message:
    """Make one of OpenAI's messages, with all other keys that the data set has. Raises BadValue."""
    if not isinstance(message, Mapping):
        kind = describe_type(message)
        raise BadValue(f"must be an object with role and content, not {kind}")
    # Parquet and Arrow have every key in all messages, as null where a message has it not.
    values = {name: value for name, value in message.items() if value is not None}
    written_role = values.pop("role", values.get("from"))
    values.pop("from", None)
    role = _parse_role(written_role)
    content = values.pop("content", values.get("value"))
    values.pop("value", None)
    calls = values.pop("tool_calls", None)
    if role == "assistant":
        # The key of OpenAI's API before there were `tool_calls`, for a single call.
        calls = values.pop("function_call", None) if calls is None else calls
        if not calls and written_role.lower().strip() in CALLING_ROLES:
            calls = content
            if isinstance(content, str):
                calls = parse_text(content, "of a call")
            content = None
    if not isinstance(content, str | list | None):
        kind = describe_type(content)
        raise BadValue(f"must have text (or a list of text parts) as content, not {kind}")
    try:
        text = "" if content is None else join_parts(content)
    except ValueError as error:
        raise BadValue(str(error)) from error
    parsed: Message = {"role": role, "content": text}
    if calls:
        if role != "assistant":
            raise BadValue(f"is of the {role}, but has tool calls")
        parsed["tool_calls"] = parse_calls(calls)
    _check_content(parsed, is_missing=content is None)
    if "weight" in values:
        weight = values.pop("weight")
        if isinstance(weight, bool) or weight not in (0, 1):
            raise BadValue(f"has the weight {weight!r}; it may be 0 or 1")
        parsed["weight"] = int(weight)
    return parsed | values


def _parse_role(written: Any) -> str:
    role = ROLES.get(written.lower().strip()) if isinstance(written, str) else None
    if written is None or written == "":
        raise BadValue(f"has no role; it must be {EXPECTED_ROLES}")
    if role is None:
        raise BadValue(
            f"has the role {shorten_text(repr(written), 30)}; it must be {EXPECTED_ROLES}"
        )
    return role


def _check_content(message: Message, is_missing: bool) -> None:
    """Check that a message says something: only one with calls, or of a tool, may be empty."""
    role = message["role"]
    must_speak = role in ("user", "assistant") and "tool_calls" not in message
    if (must_speak or role == "tool") and is_missing:
        raise BadValue(f"of the {role} has no content")
    if must_speak and not message["content"].strip():
        raise BadValue(f"of the {role} is empty")


def _parse_call(call: Any) -> JsonObject:
    """Make one of OpenAI's tool calls. Raises BadValue."""
    if not isinstance(call, Mapping):
        kind = describe_type(call)
        raise BadValue(f"has a tool call that must be an object, not {kind}")
    function = find_function(call)
    if function is None:
        raise BadValue("has a tool call without the name of a function")
    parsed: JsonObject = {"type": "function"}
    if isinstance(call.get("id"), str):
        parsed["id"] = call["id"]
    # `parameters` is the word of Llama's tool calls.
    arguments = function.get("arguments", function.get("parameters"))
    parsed["function"] = {"name": function["name"], "arguments": parse_arguments(arguments)}
    return parsed


def parse_arguments(arguments: Any) -> JsonObject:
    """Return the arguments of a call as an object. Raises BadValue: they are no JSON object."""
    if isinstance(arguments, str):
        subject = "has a tool call whose arguments"
        arguments = parse_text(arguments, subject) if arguments.strip() else {}
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        kind = describe_type(arguments)
        raise BadValue(f"has a tool call whose arguments must be a JSON object, not {kind}")
    return dict(arguments)


def _parse_tool(tool: Any, subject: str) -> JsonObject:
    # Some data sets have a list of JSON texts.
    if isinstance(tool, str):
        tool = parse_text(tool, subject)
    function = find_function(tool)
    if function is None:
        raise BadValue(f"{subject} must be the schema of a function, with its name")
    return {"type": "function", "function": dict(function)}


def parse_transcript(text: str) -> list[Message]:
    """Parse the form of Anthropic's HH: turns that begin with ``Human:`` and ``Assistant:`` after
    an empty line. Raises BadValue: the text does not begin so."""
    pieces = SPEAKER.split(text)
    if pieces[0].strip() or len(pieces) < 3:
        raise BadValue("does not begin with a turn of the human")
    # Speakers and their words alternate, after what stands before the first.
    return [
        {"from": speaker.lower(), "value": words.strip()}
        for speaker, words in zip(pieces[1::2], pieces[2::2])
    ]
