"""Files: JSON Lines (``.jsonl``, ``.json``) or Parquet (``.parquet``), on a path or at a URL of the store."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from tuneloop.data import Columns, Example, Splits
from tuneloop.errors import UserError
from tuneloop.seeds import derive
from tuneloop.store import Store


def load(
    n: int,
    seed: int,
    *,
    train: str,
    eval: str | None = None,
    sft: str | None = None,
    preference: str | None = None,
    columns: Columns = Columns(),  # noqa: B008
    sft_columns: Columns | None = None,
    preference_columns: Columns | None = None,
    shuffle: bool = True,
) -> Splits:
    """Rows of a file; without files of their own, `eval` and `sft` are cut from the same one.

    Args:
        n: unused: a file has the rows it has.
        seed: of the order.
        train: file of the training prompts.
        eval: file of the held-out prompts.
        sft: file of the demonstrations.
        preference: file of the pairs.
        columns: which columns hold what.
        sft_columns, preference_columns: the same for demonstrations and pairs; None: as `columns`.
        shuffle: whether to take rows in random order.

    Raises:
        UserError: a file that can not be read, is empty or lacks a column.
    """

    def stream(name: str, file: str, columns: Columns = columns) -> Iterator[Example]:
        return columns.examples(read(name, file), file, derive(seed, name) if shuffle else None)

    main = stream("train", train)
    held_out = stream("eval", eval) if eval else main
    shown = stream("sft", sft, sft_columns or columns) if sft else main
    pairs = stream("preference", preference, preference_columns or columns) if preference else None
    return Splits(train=main, eval=held_out, sft=shown, preference=pairs)


def digest(arguments: Mapping[str, Any]) -> str | None:
    """Of the bytes of all files; None where one can not be read."""
    state = xxhash.xxh3_128()
    for name in ("train", "eval", "sft", "preference"):
        if (path := arguments.get(name)) is not None:
            data = _bytes(str(path))
            if data is None:
                return None
            state.update(f"{name}:{len(data)}:".encode() + data)
    return state.hexdigest()


def read(argument: str, path: str) -> list[dict[str, Any]]:
    """The rows of the file at `path`, which `argument` named.

    Raises:
        UserError: it does not exist, or is not what its name says.
    """
    field = f"source_args.{argument}"
    data = _bytes(path)
    if data is None:
        raise UserError(field, path, "no such file")
    if path.endswith(".parquet"):
        try:
            rows: list[dict[str, Any]] = pq.read_table(io.BytesIO(data)).to_pylist()
        except (pa.ArrowException, OSError) as error:
            raise UserError(field, path, f"is not readable as Parquet ({error})") from error
        return rows
    if not path.endswith((".jsonl", ".json")):
        raise UserError(field, path, "must end in .jsonl, .json or .parquet")
    return _parse(field, path, data)


def _bytes(path: str) -> bytes | None:
    folder, _, name = path.rpartition("/")
    return Store(folder or ("/" if path.startswith("/") else ".")).get(name)


def _parse(field: str, path: str, data: bytes) -> list[dict[str, Any]]:
    rows = []
    try:
        lines = data.decode().split("\n")  # not splitlines: JSON text may hold other line breaks
    except UnicodeDecodeError as error:
        raise UserError(field, path, f"is not UTF-8 ({error.reason} at byte {error.start})") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UserError(field, f"{path}:{number}", f"is not JSON ({error}); one object a line") from error
            if not isinstance(row, dict):
                raise UserError(field, f"{path}:{number}", "must be a JSON object")
            rows.append(row)
    return rows
