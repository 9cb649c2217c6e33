"""Copy an artifact, or a part of it, to a directory: the program of a TrainJob's initializers.

    python -m tuneloop.training.fetch --into /workspace/model s3://bucket/runs/demo/base-model@xxh3-128:…#model

A file or directory of the artifact follows ``#``; without it the whole artifact is copied. Kubeflow Trainer passes the
reference as ``STORAGE_URI``. Every byte is verified; a complete directory is not copied again. With ``--messages`` the
chats in Parquet files of `data_prep`, which are JSON text, become lists of messages, as trainers like TRL read them."""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError, report_errors

LIST = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
ANSWERS = ("completion", "chosen", "rejected")


def fetch_artifact(source: str, into: Path, *, messages: bool = False) -> None:
    """Copy `source` to the directory `into`, replacing the files of an earlier call. Raises UserError if there is no
    such artifact or part, `messages` cannot convert a row, or `into` has files that no earlier call wrote."""
    into = into.resolve()
    mark, said = (
        into.with_name(f".{into.name}.fetched"),
        f"{source} --messages" if messages else source,
    )
    if into.is_dir() and mark.is_file() and mark.read_text() == said:
        return
    if into.exists() and not (into.is_dir() and (mark.is_file() or not any(into.iterdir()))):
        raise UserError(
            "--into", str(into), "holds files that no fetch has written; choose another directory"
        )
    ref, _, part = source.partition("#")
    artifact = Artifact(ref)
    path = artifact.part(part) if part else artifact.path
    staged = into.with_name(f".{into.name}.{os.urandom(4).hex()}")
    try:
        if path.is_dir():
            shutil.copytree(path, staged, copy_function=shutil.copyfile)
        else:
            staged.mkdir(parents=True)
            shutil.copyfile(path, staged / path.name)
        for file in staged.glob("*.parquet") if messages else ():
            rewrite_chats(file)
        mark.write_text("")  # from here on `into` belongs to this program, and is incomplete
        shutil.rmtree(into, ignore_errors=True)
        staged.rename(into)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    mark.write_text(said)


def rewrite_chats(path: Path) -> None:
    """Rewrite the chats of a Parquet file in place; a file with plain text, or without a column ``chat``, is unchanged.

    ``prompt`` becomes a list of messages; ``completion``, ``chosen`` and ``rejected`` become lists of one message by
    the assistant; a whole conversation becomes ``messages`` alone. Raises UserError for several kinds of rows (plain
    text, chats with a completion, conversations), as TRL needs one, and for a message with more than text."""
    table = pq.ParquetFile(path)
    if "chat" not in table.schema_arrow.names:
        return
    kinds = {_kind(row) for batch in table.iter_batches() for row in batch.to_pylist()}
    if len(kinds) > 1:
        raise UserError(
            "--messages", path.name, f"holds {' and '.join(sorted(kinds))}: keep one kind a file"
        )
    if kinds in ({"plain text"}, set()):
        return
    kept = [field for field in table.schema_arrow if field.name not in ("prompt", "chat", *ANSWERS)]
    named = [name for name in ("prompt", *ANSWERS) if name in table.schema_arrow.names]
    made = ["messages"] if kinds == {"conversations"} else named
    schema = pa.schema([*kept, *((name, LIST) for name in made)])
    new = path.with_name(f".{path.name}")
    with pq.ParquetWriter(new, schema) as out:
        for batch in table.iter_batches(1024):
            out.write_table(pa.Table.from_pylist([_row(row) for row in batch.to_pylist()], schema))
    new.replace(path)


def _kind(row: dict[str, Any]) -> str:
    if not row["chat"]:
        return "plain text"
    return "conversations" if "completion" in row and row["completion"] is None else "chats"


def _row(row: dict[str, Any]) -> dict[str, Any]:
    said = json.loads(row["prompt"])
    for message in said:
        if message.keys() != {"role", "content"} or not isinstance(message["content"], str):
            raise UserError(
                f"prompt of {row['id']}", str(message)[:60], "must have only a role and a text"
            )
    answers = {
        name: [{"role": "assistant", "content": row[name]}]
        for name in ANSWERS
        if row.get(name) is not None
    }
    return {**row, "prompt": said, "messages": said, **answers}


@report_errors
def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="tuneloop.training.fetch")
    parser.add_argument("source", nargs="?", default=os.environ.get("STORAGE_URI"), metavar="REF")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument(
        "--messages", action="store_true", help="chats as lists of messages, as TRL reads them"
    )
    given = parser.parse_args(argv)
    if not given.source:
        raise UserError("storageUri", given.source, "is required: the reference of an artifact")
    fetch_artifact(given.source, given.into, messages=given.messages)
    print(f"fetch: {given.source} is at {given.into}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
