"""Files: JSON Lines (``.jsonl``, ``.json``) or Parquet (``.parquet``), on a path or at a URL of the store."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import pyarrow as pa
import xxhash

from tuneloop.core.errors import UserError
from tuneloop.core.seeds import derive_seed
from tuneloop.core.store import Store, local_path
from tuneloop.data import Columns, Example, Splits, _rows
from tuneloop.data._rows import Rows


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
    """Load rows of a file; without files of their own, `eval` and `sft` are cut from the same one.

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
        UserError: a file that cannot be read, is empty or lacks a column.
    """

    def stream(name: str, file: str, columns: Columns = columns) -> Iterator[Example]:
        return columns.examples(read_rows(name, file), file, derive_seed(seed, name) if shuffle else None)

    main = stream("train", train)
    held_out = stream("eval", eval) if eval else main
    shown = stream("sft", sft, sft_columns or columns) if sft else main
    pairs = stream("preference", preference, preference_columns or columns) if preference else None
    return Splits(train=main, eval=held_out, sft=shown, preference=pairs)


def digest(arguments: Mapping[str, Any]) -> str | None:
    """Digest the bytes of all files; None where one cannot be read."""
    state = xxhash.xxh3_128()
    for name in ("train", "eval", "sft", "preference"):
        if (path := arguments.get(name)) is not None:
            file = _open(str(path))
            if file is None:
                return None
            with file:
                length = file.seek(0, os.SEEK_END)
                state.update(f"{name}:{length}:".encode())
                file.seek(0)
                while block := file.read(1 << 22):
                    state.update(block)
    return state.hexdigest()


def read_rows(argument: str, path: str) -> Rows:
    """Read the rows of the file at `path`, named by `argument`; objects of a store are copied to ``TMPDIR`` first.

    Raises:
        UserError: it does not exist, or is not what its name says; of a line of JSON, once it is read.
    """
    field = f"source_args.{argument}"
    file = _open(path)
    if file is None:
        raise UserError(field, path, "no such file")
    if not path.endswith((".jsonl", ".json", ".parquet")):
        raise UserError(field, path, "must end in .jsonl, .json or .parquet")
    if local_path(path) is None:
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - read as long as there are rows to read
        shutil.copyfileobj(file, copy, 1 << 22)
        copy.seek(0)
        file = copy
    if not path.endswith(".parquet"):
        return _rows.json_lines(file, field, path)
    try:
        return _rows.read_parquet(file)
    except (pa.ArrowException, OSError) as error:
        raise UserError(field, path, f"is not readable as Parquet ({error})") from error


def _open(path: str) -> BinaryIO | None:
    folder, _, name = path.rpartition("/")
    try:
        return Store(folder or ("/" if path.startswith("/") else ".")).open(name)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except PermissionError as error:
        raise UserError("store", path, f"not permitted ({error.strerror}); grant access") from error
