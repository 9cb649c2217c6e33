"""The forms in which a conversation can be put to a chat template, since templates read messages
differently.

Messages come as OpenAI has them. Most templates read them so; some want content as a list of parts,
arguments of tool calls as JSON text, `null` where a message only calls tools, or know no role
`developer`. `list_forms` lists what is worth trying for a conversation, the plainest form first. No
form changes what a message says.

It is the first of four steps: forms here, rendering and ids in `chat_rendering`, documents to learn
in `conversations`, and `tokens` for everybody else. Before these, `data/messages.py` makes messages
of the rows of data sets.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuneloop.core.json_types import JsonMapping, JsonObject

Message = JsonObject
"""A message as OpenAI has it: ``role``, ``content``, ``tool_calls``."""
Reasoning = Literal["keep", "drop"]
"""What becomes of an assistant's reasoning: it is a part of the target, or it is left out
everywhere. The setting is `reasoning` of `stages/data_prep.py`; the way of such a setting is
described at `conversations.py: History`."""

REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message under which data sets and templates have the reasoning. Of a message that has
several the first one counts; a template gets all those that its source names. docs/templates.md
lists them."""
TEXT_PARTS = ("text", "input_text", "output_text")
"""Types of the parts of a content that are text, as OpenAI's two APIs call them."""
ABSENT = "absent"
"""Stands for no key `content` at all."""
INLINE = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
"""Reasoning at the beginning of a message's own text."""


@dataclass(frozen=True)
class Form:
    """How messages are put to a template.

    A choice that is added is a field at the end, a tuple at the end of the product in `list_forms`,
    which passes its values by position, and a branch of `apply`. It multiplies the number of
    renderings that a conversation takes before it is refused.

    Attributes:
        parts: whether content is a list of parts, and not text.
        developer: the role of developers' messages.
        arguments_as_text: whether the arguments of calls are JSON text, and not objects.
        no_content: what stands for the content of a message that only calls tools: ``""``, None or
            `ABSENT`.
    """

    parts: bool = False
    developer: str = "developer"
    arguments_as_text: bool = False
    no_content: str | None = ""

    def apply(self, message: Message) -> Message:
        """Return the message in this form."""
        message = dict(message)
        if message["role"] == "developer":
            message["role"] = self.developer
        if self.arguments_as_text and message.get("tool_calls"):
            message["tool_calls"] = [_write_arguments(call) for call in message["tool_calls"]]
        content = message.get("content")
        if not content and message.get("tool_calls"):
            message["content"] = self.no_content
            if self.no_content == ABSENT:
                del message["content"]
        elif self.parts and isinstance(content, str):
            message["content"] = [{"type": "text", "text": content}]
        return message


def list_forms(messages: Sequence[Message]) -> list[Form]:
    """List the forms that could make a difference to these messages, the plainest first."""
    calling = [message for message in messages if message.get("tool_calls")]
    has_silent_calls = not all(message.get("content") for message in calling)
    has_developer = any(message["role"] == "developer" for message in messages)
    roles = ("developer", "system") if has_developer else ("developer",)
    arguments_as_text = (False, True) if calling else (False,)
    no_contents = ("", None, ABSENT) if has_silent_calls else ("",)
    # The last choice varies first: content as parts changes most, and is tried last.
    choices = itertools.product((False, True), roles, arguments_as_text, no_contents)
    return list(itertools.starmap(Form, choices))


def clean_messages(
    messages: Sequence[JsonMapping], reasoning: Reasoning, template: str
) -> list[Message]:
    """Return messages as a template with this source reads them, without what is not for templates.

    Nulls and `weight` are left out, text parts are joined, arguments that are JSON text become
    objects, and an assistant without content and calls says nothing (``""``). Reasoning goes under
    the names that the template reads; where it reads none, it stays, or becomes, a block
    ``<think>`` of the text itself."""
    return [_clean_message(message, reasoning, template) for message in messages]


def join_parts(content: Any) -> str:
    """Return the text of a message's content. Parts of text are joined by line breaks, as vLLM
    joins them for templates that read text (``vllm.renderers.chat_utils``). Raises ValueError: a part is
    something else, such as an image."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"has content that is no text ({type(content).__name__})")
    texts: list[str] = []
    for part in content:
        # Some data sets have bare texts in the list.
        if isinstance(part, str):
            texts.append(part)
            continue
        if not isinstance(part, Mapping):
            raise ValueError("has content with a part that is no text")
        kind = part.get("type", "text")
        if kind not in TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(f"has content with a part of type {kind!r}; only text can be learned")
        texts.append(part["text"])
    return "\n".join(texts)


def split_reasoning(message: JsonMapping) -> tuple[str, str]:
    """Return the reasoning of an assistant's message and its text without it."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    inline = INLINE.match(text)
    if inline:
        return inline.group(1).strip(), text[inline.end() :]
    for key in REASONING_KEYS:
        if isinstance(message.get(key), str):
            return message[key].strip(), text
    return "", text


def list_tools(tools: str | Sequence[Any] | None) -> list[Message] | None:
    """Return the schemas of tools, which may be JSON text, as OpenAI has them; None where there are
    none. Raises ValueError: one is not an object with a name."""
    listed = json.loads(tools) if isinstance(tools, str) else tools
    if not listed:
        return None
    if not isinstance(listed, list):
        raise ValueError("tools are not a list")
    return [_read_tool(tool) for tool in listed]


def _read_tool(tool: Any) -> Message:
    """Return the schema of a tool as OpenAI has it; some data sets leave out what is around the
    function."""
    if find_function(tool) is None:
        raise ValueError("a tool is not an object with a name")
    return dict(tool) if "function" in tool else {"type": "function", "function": tool}


def find_function(value: Any) -> JsonMapping | None:
    """Find the function of a tool or of a call, in OpenAI's wrapper or without it; None: it is no
    object with a name."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return function
    return None


def _clean_message(message: JsonMapping, reasoning: Reasoning, template: str) -> Message:
    """Clean one message; see `clean_messages`."""
    cleaned = {key: value for key, value in message.items() if value is not None}
    # Ours alone: it says which turns are learned.
    cleaned.pop("weight", None)
    if "content" in cleaned:
        cleaned["content"] = join_parts(cleaned["content"])
    if not cleaned.get("tool_calls"):
        cleaned.pop("tool_calls", None)
        cleaned.setdefault("content", "")
    elif not isinstance(cleaned["tool_calls"], list):
        raise ValueError("tool_calls are not a list")
    else:
        cleaned["tool_calls"] = [_read_call(call) for call in cleaned["tool_calls"]]
    if cleaned["role"] != "assistant":
        return cleaned
    thought, text = split_reasoning(cleaned)
    for key in REASONING_KEYS:
        cleaned.pop(key, None)
    if reasoning == "drop":
        cleaned["content"] = text
        return cleaned
    # Templates differ in the key that they read; one that reads none gets the reasoning as text.
    keys = [key for key in REASONING_KEYS if re.search(rf"\b{key}\b", template)]
    if thought and keys:
        cleaned["content"] = text
        cleaned |= dict.fromkeys(keys, thought)
    elif thought:
        cleaned["content"] = f"<think>\n{thought}\n</think>\n\n{text}"
    return cleaned


def _read_call(call: Any) -> Message:
    """Return a tool call as OpenAI has it, with its arguments as an object where they are one.
    Raises ValueError: it is not an object with a name."""
    if not isinstance(call, Mapping):
        raise ValueError("a tool call is not an object")
    function = find_function(call)
    if function is None:
        raise ValueError("a tool call has no function with a name")
    wrapped = call if "function" in call else {}
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        # Text that is no JSON stays: the template shows it as it is.
        with contextlib.suppress(json.JSONDecodeError):
            arguments = json.loads(arguments)
    cleaned = {key: value for key, value in wrapped.items() if value is not None}
    cleaned.setdefault("type", "function")
    cleaned["function"] = dict(function) | {"arguments": arguments}
    return cleaned


def _write_arguments(call: JsonMapping) -> Message:
    """Return a tool call with its arguments as JSON text."""
    arguments = call["function"].get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function = call["function"] | {"arguments": text}
    return dict(call) | {"function": function}
