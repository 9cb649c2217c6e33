"""Copy an artifact, or a part of it, to a directory: the program of a TrainJob's initializers.

    python -m tuneloop.training.fetch --into /workspace/model s3://bucket/demo/base-model@sha256:…

A file or directory of the artifact follows ``#``; without it the whole artifact is copied. Kubeflow
Trainer passes the reference as ``STORAGE_URI``. Every byte is verified; a complete directory is not
copied again. With ``--messages`` the chats in Parquet files of `data_prep`, which are JSON text,
become lists of messages, as trainers like TRL read them.

Who runs it: a Workflow's step before a TrainJob (`extensions/trainers/trainjob.py`), initializers
with fixed flags (`manifests/components/trainer/trl/trl.yaml`,
`manifests/components/model-server/server.yaml`), and `training/delegation.py` and
`extensions/provenance/attestation.py`, which call `fetch_artifact`. A flag that is renamed is
renamed in those manifests.

Tests: `tests/unit/training/test_fetch.py`, of chats `tests/unit/training/test_messages.py`.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError, report_errors
from tuneloop.core.json_types import JsonObject

MESSAGES = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
ANSWERS = ("completion", "chosen", "rejected")
"""Columns with a message of the assistant (`data/tables.py: SCHEMAS`)."""
TEXTS = ("prompt", *ANSWERS)
"""Columns that become lists of messages in a chat."""


def fetch_artifact(source: str, into: Path, *, messages: bool = False) -> None:
    """Copy `source` to the directory `into`, replacing the files of an earlier call.

    Raises UserError if there is no such artifact or part, `messages` cannot convert a row, or
    `into` has files that no earlier call wrote.
    """
    into = into.resolve()
    # The file beside the directory says what was copied; it is empty while that is incomplete.
    mark = into.with_name(f".{into.name}.fetched")
    request = f"{source} --messages" if messages else source
    if into.is_dir() and mark.is_file() and mark.read_text() == request:
        return
    is_free = not into.exists() or (into.is_dir() and (mark.is_file() or not any(into.iterdir())))
    if not is_free:
        raise UserError(
            "--into",
            str(into),
            "holds files that no fetch has written; choose another directory",
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
        if messages:
            for file in staged.glob("*.parquet"):
                rewrite_chats(file)
        # From here on the directory belongs to this program.
        mark.write_text("")
        shutil.rmtree(into, ignore_errors=True)
        staged.rename(into)
    finally:
        shutil.rmtree(staged, ignore_errors=True)
    mark.write_text(request)


def rewrite_chats(path: Path) -> None:
    """Rewrite the chats of a Parquet file in place; a file with plain text, or without a column
    ``chat``, is unchanged.

    ``prompt`` becomes a list of messages; ``completion``, ``chosen`` and ``rejected`` become lists
    of one message by the assistant; a whole conversation becomes ``messages`` alone. Raises
    UserError for several kinds of rows (plain text, chats with a completion, conversations), as TRL
    needs one, and for a message with more than text.
    """
    table = pq.ParquetFile(path)
    if "chat" not in table.schema_arrow.names:
        return
    kinds = {_describe_kind(row) for batch in table.iter_batches() for row in batch.to_pylist()}
    if len(kinds) > 1:
        raise UserError(
            "--messages",
            path.name,
            f"holds {' and '.join(sorted(kinds))}: keep one kind a file",
        )
    if kinds in ({"plain text"}, set()):
        return
    lists = [name for name in TEXTS if name in table.schema_arrow.names]
    if kinds == {"conversations"}:
        lists = ["messages"]
    # The column ``chat`` would say that the texts are JSON, which they are no longer.
    replaced = {"chat"}.union(TEXTS)
    fields = [field for field in table.schema_arrow if field.name not in replaced]
    fields += [pa.field(name, MESSAGES) for name in lists]
    schema = pa.schema(fields)
    # A reader never sees a half of the new file.
    staged = path.with_name(f".{path.name}")
    with pq.ParquetWriter(staged, schema) as writer:
        for batch in table.iter_batches(1024):
            rows = [_convert_row(row) for row in batch.to_pylist()]
            writer.write_table(pa.Table.from_pylist(rows, schema))
    staged.replace(path)


def _describe_kind(row: JsonObject) -> str:
    """Return the kind of a row, in the words of an error."""
    if not row["chat"]:
        return "plain text"
    # A conversation has no completion: its prompt is all of it.
    return "conversations" if "completion" in row and row["completion"] is None else "chats"


def _convert_row(row: JsonObject) -> JsonObject:
    """Return a row with its texts as messages. Raises UserError: a message has more than text."""
    chat = json.loads(row["prompt"])
    for message in chat:
        if message.keys() != {"role", "content"} or not isinstance(message["content"], str):
            raise UserError(
                f"prompt of {row['id']}",
                str(message)[:60],
                "must have only a role and a text",
            )
    converted = row | {"prompt": chat, "messages": chat}
    for name in ANSWERS:
        if row.get(name) is not None:
            converted[name] = [{"role": "assistant", "content": row[name]}]
    return converted


@report_errors
def main(argv: Sequence[str]) -> int:
    """Copy what the arguments name; return the exit code."""
    parser = argparse.ArgumentParser(prog="tuneloop.training.fetch")
    parser.add_argument("source", nargs="?", default=os.environ.get("STORAGE_URI"), metavar="REF")
    parser.add_argument("--into", type=Path, required=True)
    parser.add_argument(
        "--messages",
        action="store_true",
        help="chats as lists of messages, as TRL reads them",
    )
    arguments = parser.parse_args(argv)
    source = arguments.source
    if not source:
        raise UserError("storageUri", source, "is required: the reference of an artifact")
    fetch_artifact(source, arguments.into, messages=arguments.messages)
    print(f"fetch: {source} is at {arguments.into}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
