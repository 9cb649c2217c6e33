"""Rows of `data_prep`, whose chats are JSON text, as TRL and other trainers read chats: lists of messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tuneloop.core.errors import UserError

LIST = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
ANSWERS = ("completion", "chosen", "rejected")


def rewrite_chats(path: Path) -> None:
    """Rewrite the chats of a Parquet file in place; one of plain text, or without a column ``chat``, stays as it is.

    ``prompt`` becomes the list of messages, ``completion``, ``chosen`` and ``rejected`` a list of one of the
    assistant's; a whole conversation becomes ``messages``, with neither.

    Raises:
        UserError: chats beside plain text, or conversations beside prompts with a completion: TRL wants one form a
            file; or a message that holds more than text (tool calls).
    """
    table = pq.ParquetFile(path)
    if "chat" not in table.schema_arrow.names:
        return
    kinds = {_kind(row) for batch in table.iter_batches() for row in batch.to_pylist()}
    if len(kinds) > 1:
        raise UserError("--messages", path.name, f"holds {' and '.join(sorted(kinds))}: keep one kind a file")
    if kinds in ({"plain text"}, set()):
        return
    kept = [field for field in table.schema_arrow if field.name not in ("prompt", "chat", *ANSWERS)]
    named = [name for name in ("prompt", *ANSWERS) if name in table.schema_arrow.names]
    made = ["messages"] if kinds == {"conversations"} else named
    schema = pa.schema([*kept, *((name, LIST) for name in made)])
    new = path.with_name(f".{path.name}")
    with pq.ParquetWriter(new, schema) as out:
        for batch in table.iter_batches(1024):
            rows = [_row(row) for row in batch.to_pylist()]
            out.write_table(pa.Table.from_pylist(rows, schema))
    new.replace(path)


def _kind(row: dict[str, Any]) -> str:
    if not row["chat"]:
        return "plain text"
    return "conversations" if "completion" in row and row["completion"] is None else "chats"


def _row(row: dict[str, Any]) -> dict[str, Any]:
    said = json.loads(row["prompt"])
    for message in said:
        if message.keys() != {"role", "content"} or not isinstance(message["content"], str):
            raise UserError(f"prompt of {row['id']}", str(message)[:60], "must have a role and a text, and no more")
    answers = {name: [{"role": "assistant", "content": row[name]}] for name in ANSWERS if row.get(name) is not None}
    return {**row, "prompt": said, "messages": said, **answers}
