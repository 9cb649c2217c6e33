"""Rows of every wrong shape: the refusal names file and line, the column, what it has to hold and
what it holds, and is printed once."""

import json
from pathlib import Path
from typing import Any

import pytest

from tuneloop.cli import run_cli
from tuneloop.core.errors import UserError
from tuneloop.data import BadRow, BadValue
from tuneloop.data.layouts._parts import shuffle_choices
from tuneloop.data.sources import load_source

ASK = {"role": "user", "content": "a"}
REPLY = {"role": "assistant", "content": "b"}
LIST = "must hold a list of messages, each with role and content"
TEXT = "must hold text or chat messages"
COMPLETION = "must hold text, or one message of the assistant's"

SHAPES: list[tuple[dict[str, Any], str]] = [
    ({"messages": "hello"}, f"column 'messages' {LIST}, not text"),
    ({"messages": ""}, f"column 'messages' {LIST}, not empty text"),
    ({"messages": ASK}, f"column 'messages' {LIST}, not an object"),
    ({"messages": []}, f"column 'messages' {LIST}, not an empty list"),
    ({"messages": None}, f"column 'messages' {LIST}, not null"),
    ({"messages": 5}, f"column 'messages' {LIST}, not a number"),
    ({"messages": True}, f"column 'messages' {LIST}, not a boolean"),
    ({"messages": "{}"}, f"column 'messages' {LIST}, not text with an object"),
    ({"messages": "[1"}, "column 'messages' has text that is not JSON"),
    ({"messages": ["a"]}, "message 1 must be an object with role and content, not text"),
    ({"messages": [[ASK, REPLY]]}, "message 1 must be an object with role and content, not a list"),
    ({"messages": [ASK, {"content": "b"}]}, "message 2 has no role; it must be system, user"),
    ({"messages": [ASK, {"role": "x", "content": "b"}]}, "message 2 has the role 'x'; it must be"),
    ({"messages": [ASK, {"role": "user"}]}, "message 2 of the user has no content"),
    (
        {"messages": [ASK, {"role": "assistant", "content": 5}]},
        "message 2 must have text (or a list of text parts) as content, not a number",
    ),
    ({"messages": [ASK, {"from": "tool_call", "value": "f(x)"}]}, "of a call has text that is not"),
    ({"messages": [ASK, REPLY], "tools": "f"}, "column 'tools' has text that is not JSON"),
    ({"messages": [ASK, REPLY], "tools": 5}, "column 'tools' must hold a list of function schemas"),
    ({"messages": [ASK, REPLY], "tools": [5]}, "column 'tools': tool 1 must be the schema"),
    ({"conversations": "hello"}, f"column 'conversations' {LIST}, not text"),
    ({"conversations": {"from": "human"}}, f"column 'conversations' {LIST}, not an object"),
    ({"conversations": [{"from": "human", "value": 5}]}, "message 1 must have text"),
    ({"prompt": {"a": 1}, "completion": "b"}, f"column 'prompt' {TEXT}, not an object"),
    ({"prompt": None, "completion": "b"}, f"column 'prompt' {TEXT}, not null"),
    ({"prompt": [], "answer": "b"}, f"column 'prompt' {TEXT}, not an empty list"),
    ({"prompt": ["a"]}, "column 'prompt': message 1 must be an object"),
    ({"prompt": [{"role": "x", "content": "a"}], "answer": "b"}, "message 1 has the role 'x'"),
    ({"prompt": "a", "completion": 5}, f"column 'completion' {COMPLETION}, not a number"),
    ({"prompt": "a", "completion": []}, f"column 'completion' {COMPLETION}, not an empty list"),
    (
        {"prompt": [ASK], "completion": [ASK]},
        "column 'completion' ends with the user's message, not the assistant's",
    ),
    ({"prompt": [ASK], "completion": ["b"]}, f"column 'completion' {COMPLETION}, not a list"),
    ({"prompt": "a", "answer": {}}, "column 'answer' must hold text or a number, not an object"),
    ({"chosen": "a", "rejected": "b"}, f"column 'chosen' {LIST}, not text"),
    ({"chosen": [ASK, REPLY], "rejected": 5}, f"column 'rejected' {LIST}, not a number"),
    ({"prompt": "a", "chosen": 5, "rejected": "b"}, f"column 'chosen' {COMPLETION}, not a number"),
    ({"text": 5}, f"column 'text' {TEXT}, not a number"),
    (
        {"question": "a", "solutions": "[]", "input_output": "[1"},
        "column 'input_output' has text that is not JSON",
    ),
]


@pytest.mark.parametrize(("row", "reason"), SHAPES, ids=[json.dumps(row) for row, _ in SHAPES])
def test_a_wrong_shape_is_named_where_it_stands(
    row: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n" + json.dumps(row) + "\n")
    (bad,) = load_source("files", {"path": str(path)}, 10, 0).train
    assert isinstance(bad, BadRow)
    assert bad.row == f"{path}:2"
    assert reason in bad.reason
    # What a budget lists of a reason is no longer than this.
    assert len(bad.reason) <= 120


@pytest.mark.parametrize("value", ["5", '"text"', "null"])
def test_a_row_without_columns_is_refused_without_neighbours(value: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(value)
    with pytest.raises(UserError, match=r"rows.jsonl:1.*not a JSON object with named columns"):
        load_source("files", {"path": str(path)}, 10, 0)


def test_messages_that_are_rows_are_told_how_to_be_chats(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f"{json.dumps(ASK)}\n{json.dumps(REPLY)}\n")
    with pytest.raises(UserError, match=r"single messages as rows .*write each as"):
        load_source("files", {"path": str(path)}, 10, 0)


def test_the_command_says_it_once(
    smollm2: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"messages": "hello"}) + "\n")
    store = str(tmp_path / "runs")
    settings = ["--set", f"base_model={smollm2}", "--set", f"data={path}"]
    command = ["run", "sft", "--run", "r", "--store", store, "--no-track", "--no-warm", *settings]
    assert run_cli(command) == 2
    output = capfd.readouterr()
    reason = f"{path}:1: column 'messages' {LIST}, not text"
    assert reason not in output.out
    assert output.err.count(reason) == 1
    assert run_cli(["status", "r", "--store", store]) == 0
    assert capfd.readouterr().out.count(reason) == 1


def test_a_right_choice_among_the_wrong_ones_is_refused() -> None:
    with pytest.raises(BadValue, match="the right choice 'b' among the wrong ones"):
        shuffle_choices("b", ["a", "b"])
