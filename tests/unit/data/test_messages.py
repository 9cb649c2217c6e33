"""Chats of one form, and what is refused of them."""

from typing import Any

import pytest

from tuneloop.data import BadValue
from tuneloop.data.messages import parse_messages, parse_tools, parse_transcript
from tuneloop.formats.chat_forms import clean_messages

ASK = {"role": "user", "content": "a"}
CALL = {"name": "get", "arguments": {"city": "X"}}


def parse_reply(reply: dict[str, Any]) -> dict[str, Any]:
    """Parse a chat that ends with this message, and return what became of it."""
    return parse_messages([ASK, reply])[-1]


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        ({"role": "assistant", "content": "b"}, {"content": "b"}),
        ({"role": "Assistant", "content": "b"}, {"content": "b"}),
        ({"role": "model", "content": "b"}, {"content": "b"}),
        ({"from": "gpt", "value": "b"}, {"content": "b"}),
        ({"role": "assistant", "content": [{"type": "text", "text": "b"}]}, {"content": "b"}),
        ({"role": "assistant", "content": [{"text": "b"}, "c"]}, {"content": "b\nc"}),
        ({"role": "assistant", "content": "b", "weight": 0}, {"content": "b", "weight": 0}),
        ({"role": "assistant", "content": "b", "weight": None}, {"content": "b"}),
        ({"role": "assistant", "content": "b", "tool_calls": None}, {"content": "b"}),
        ({"role": "assistant", "content": "b", "tool_calls": []}, {"content": "b"}),
        (
            {"role": "assistant", "content": "b", "reasoning_content": "r", "name": "x"},
            {"content": "b", "reasoning_content": "r", "name": "x"},
        ),
    ],
)
def test_replies_have_one_form(reply: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert parse_reply(reply) == {"role": "assistant", **wanted}


@pytest.mark.parametrize(
    "reply",
    [
        {"role": "assistant", "content": None, "tool_calls": [{"function": CALL}]},
        {"role": "assistant", "tool_calls": [CALL]},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": CALL}],
        },
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "get", "arguments": '{"city": "X"}'}}],
        },
        {"role": "assistant", "content": "", "function_call": CALL},
        {"from": "function_call", "value": '{"name": "get", "arguments": {"city": "X"}}'},
        {"role": "tool_call", "content": '{"name": "get", "arguments": "{\\"city\\": \\"X\\"}"}'},
    ],
)
def test_calls_have_one_form(reply: dict[str, Any]) -> None:
    call = {"type": "function", "function": CALL}
    assert parse_reply(reply) == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_parts_of_text_are_joined_alike_wherever_they_come_from() -> None:
    """A data set's parts are joined when it is read, those of a source of one's own by the template."""
    content = [{"type": "text", "text": "b"}, {"type": "output_text", "text": "c"}, "d"]
    reply = {"role": "assistant", "content": content}
    (cleaned,) = clean_messages([reply], "keep", "")
    assert cleaned["content"] == parse_reply(reply)["content"] == "b\nc\nd"


def test_nulls_that_the_author_wrote_into_arguments_stay() -> None:
    call = {"name": "get", "arguments": {"city": None}}
    (parsed,) = parse_reply({"role": "assistant", "tool_calls": [call]})["tool_calls"]
    assert parsed["function"]["arguments"] == {"city": None}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "must hold a list of messages, each with role and content, not an empty list"),
        ("[]", "not text with an empty list"),
        ("[nonsense", "column 'messages' has text that is not JSON"),
        ("nonsense", "must hold a list of messages, each with role and content, not text"),
        ([{"role": "assistant", "content": "b"}, ASK], "begins with the assistant's message"),
        ([{"role": "system", "content": "s"}], "has no message of the user"),
        (
            [ASK, {"role": "assistant", "content": None}],
            "message 2 of the assistant has no content",
        ),
        ([ASK, {"role": "assistant"}], "message 2 of the assistant has no content"),
        ([ASK, {"role": "assistant", "content": " "}], "message 2 of the assistant is empty"),
        (
            [ASK, {"role": "assistant", "content": 5}],
            "message 2 must have text (or a list of text parts) as content, not a number",
        ),
        ([ASK, {"role": "assistant", "content": {"a": 1}}], "as content, not an object"),
        (
            [{"role": "user", "content": [{"type": "image", "image": "x"}]}],
            "message 1 has content with a part of type 'image'",
        ),
        (
            [ASK, {"role": None, "content": "b"}],
            "message 2 has no role; it must be system, user, assistant",
        ),
        ([ASK, {"role": "narrator", "content": "b"}], "message 2 has the role 'narrator'"),
        ([ASK, "b"], "message 2 must be an object with role and content, not text"),
        ([ASK, {"role": "assistant", "content": "b", "weight": 0.5}], "has the weight 0.5"),
        ([ASK, {"role": "tool"}], "message 2 of the tool has no content"),
        ([{**ASK, "tool_calls": [CALL]}], "is of the user, but has tool calls"),
        (
            [ASK, {"role": "assistant", "tool_calls": [{"arguments": {}}]}],
            "has a tool call without the name of a function",
        ),
        (
            [ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}],
            "arguments must be a JSON object, not a list",
        ),
        (
            [ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a": NaN}'}]}],
            "has the number NaN",
        ),
        (
            [ASK, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}],
            "is not JSON",
        ),
    ],
)
def test_what_cannot_be_rendered_is_refused(messages: Any, reason: str) -> None:
    with pytest.raises(BadValue) as caught:
        parse_messages(messages)
    assert reason in str(caught.value)


def test_tools_have_one_form() -> None:
    schema = {"name": "get", "parameters": {"type": "object"}}
    wanted = [{"type": "function", "function": schema}]
    for tools in ([schema], '[{"name": "get", "parameters": {"type": "object"}}]', wanted, schema):
        assert parse_tools(tools) == wanted
    assert parse_tools([]) is parse_tools("") is parse_tools(None) is None
    for bad in ("nonsense", [5], [{"parameters": {}}], 5):
        with pytest.raises(BadValue):
            parse_tools(bad)


def test_transcripts_become_messages() -> None:
    text = "\n\nHuman: Hi\n\nAssistant: Yes?\n\nHuman: Is A: B?\n\nNo Human: here\n\nAssistant: No."
    assert [
        (message["role"], message["content"]) for message in parse_messages(parse_transcript(text))
    ] == [
        ("user", "Hi"),
        ("assistant", "Yes?"),
        ("user", "Is A: B?\n\nNo Human: here"),
        ("assistant", "No."),
    ]
    with pytest.raises(BadValue, match="does not begin with a turn of the human"):
        parse_transcript("Hello")
