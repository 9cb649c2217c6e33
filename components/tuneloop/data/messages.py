"""Chats of one form: OpenAI's messages, with text as content, whatever form a data set has them in.

What templates cannot render, or would render as something else, is settled here: the roles of
ShareGPT, content as a list of parts, ``content: null``, arguments as JSON text, calls without their
wrapper. What cannot be settled without changing what a row means is a `BadValue`."""

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.data import BadValue
from tuneloop.data.readers.strict_json import check_depth, parse_json
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
"""Roles as data sets write them, in lower case, and what templates call them."""
CALLING_ROLES = ("function_call", "function-call", "tool_call")
"""Roles of ShareGPT whose content is the call itself, as JSON."""
SPEAKER = re.compile(r"\n\n(Human|Assistant):")
"""The beginning of a turn in a transcript of Anthropic's HH."""


def parse_messages(value: Any) -> list[Message]:
    """Make OpenAI's messages of a list of messages, or of its JSON text, in any form that data sets
    have. Raises BadValue: it is no such list, or a message cannot be rendered as what it is."""
    if isinstance(value, str):
        value = parse_json(value)
    if not isinstance(value, list) or not value:
        raise BadValue("has no list of messages")
    check_depth(value)
    messages: list[Message] = []
    for number, message in enumerate(value, start=1):
        try:
            messages.append(_parse_message(message))
        except BadValue as error:
            raise BadValue(f"message {number} {error}") from error
    # A turn of the assistant is learned in the context before it, and there is none.
    if messages[0]["role"] == "assistant":
        raise BadValue("begins with the assistant's message: nothing comes before it")
    # Many templates refuse a chat without the user's message, or begin one of their own.
    if not any(message["role"] == "user" for message in messages):
        raise BadValue("has no message of the user")
    return messages


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
        value = parse_json(value) if value.strip() else None
    if not value:
        return None
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise BadValue("has tools that are no list of schemas")
    return [_parse_tool(tool) for tool in value]


def parse_calls(value: Any) -> list[JsonObject]:
    """Make OpenAI's tool calls of a list of calls, in their wrapper or without it. Raises BadValue:
    it is no such list, or a call has no name, or arguments that are no object."""
    if isinstance(value, Mapping):
        value = [value]
    if not isinstance(value, list):
        raise BadValue("has tool calls that are no list")
    return [_parse_call(call) for call in value]


def get_text(message: JsonMapping) -> str:
    """Return the text of a message that is normalised."""
    return str(message.get("content") or "")


def _parse_message(message: Any) -> Message:
    """Make one of OpenAI's messages, with what else the data set says of it. Raises BadValue."""
    if not isinstance(message, Mapping):
        raise BadValue("is no object with a role")
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
            calls = parse_json(content) if isinstance(content, str) else content
            content = None
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
    if role is None:
        raise BadValue(f"has the role {written!r}; known are {', '.join(ROLES)}")
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
        raise BadValue("has a tool call that is no object")
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
        arguments = parse_json(arguments) if arguments.strip() else {}
    if arguments is None:
        return {}
    if not isinstance(arguments, Mapping):
        raise BadValue("has a tool call whose arguments are no JSON object")
    return dict(arguments)


def _parse_tool(tool: Any) -> JsonObject:
    # Some data sets have a list of JSON texts.
    function = find_function(parse_json(tool) if isinstance(tool, str) else tool)
    if function is None:
        raise BadValue("has a tool without a name")
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
