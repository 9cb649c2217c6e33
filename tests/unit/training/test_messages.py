"""Chats of `data_prep` as lists of messages."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tuneloop.core.errors import UserError
from tuneloop.training.fetch import rewrite_chats

ASKED = [{"role": "system", "content": "brief"}, {"role": "user", "content": "2 + 2?"}]
SAID = {"role": "assistant", "content": "4"}
PLAIN = {"id": "a", "prompt": "2 + 2 =", "chat": False, "completion": "4"}
CHAT = {"id": "b", "prompt": json.dumps(ASKED), "chat": True, "completion": "4"}
WHOLE = {"id": "c", "prompt": json.dumps([*ASKED, SAID]), "chat": True, "completion": None}


def rewritten(path: Path, *rows: dict[str, Any]) -> list[dict[str, Any]]:
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    rewrite_chats(path)
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return found


def test_chats_become_lists(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    assert rewritten(path, CHAT) == [{"id": "b", "prompt": ASKED, "completion": [SAID]}]
    assert rewritten(path, WHOLE) == [{"id": "c", "messages": [*ASKED, SAID]}]
    pair = {"id": "d", "prompt": CHAT["prompt"], "chat": True, "chosen": "4", "rejected": "5"}
    wrong = [{**SAID, "content": "5"}]
    assert rewritten(path, pair) == [
        {"id": "d", "prompt": ASKED, "chosen": [SAID], "rejected": wrong}
    ]
    question = {"id": "e", "prompt": CHAT["prompt"], "chat": True, "answer": "4", "reward": "{}"}
    assert rewritten(path, question) == [
        {"id": "e", "answer": "4", "reward": "{}", "prompt": ASKED}
    ]
    assert rewritten(path, PLAIN) == [PLAIN]
    assert rewritten(path, {"id": "f", "text": "no chat"}) == [{"id": "f", "text": "no chat"}]


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ((PLAIN, CHAT), "holds chats and plain text: keep one kind a file"),
        ((CHAT, WHOLE), "holds chats and conversations"),
        (
            ({**CHAT, "prompt": json.dumps([{**ASKED[1], "tool_calls": []}])},),
            "must have only a role and a text",
        ),
    ],
)
def test_what_has_no_one_form_is_refused_and_left_alone(
    tmp_path: Path, rows: tuple[Any, ...], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        rewritten(tmp_path / "rows.parquet", *rows)
    assert pq.read_table(tmp_path / "rows.parquet").to_pylist() == list(rows)
