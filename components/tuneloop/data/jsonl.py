"""Files, JSON Lines (``.jsonl``, ``.json``) or Parquet (``.parquet``), on a path or at a URL of the store. Rows are
unpacked as they are asked for: a file may be larger than the machine's memory."""

import bisect
import itertools
import json
import os
import shutil
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from tuneloop.core.errors import UserError
from tuneloop.core.seeds import derive_seed
from tuneloop.core.store import Store, local_path
from tuneloop.data import Columns, Example, Splits
from tuneloop.formats.token_files import Places

Row = Mapping[str, Any]
UNPACKED = 1024
"""Rows of Parquet that are unpacked at once."""


def load_splits(
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
    """Load rows of a file. Without files of their own, `eval` and `sft` are cut from `train`; without columns of their
    own, `sft` and `preference` have `columns`. Raises UserError: a file cannot be read, is empty or lacks a column."""
    own = {"sft": sft_columns or columns, "preference": preference_columns or columns}

    def stream(name: str, file: str) -> Iterator[Example]:
        order = derive_seed(seed, name) if shuffle else None
        return own.get(name, columns).examples(read_rows(name, file), file, order)

    return Splits.of_tables(
        {"train": train, "eval": eval, "sft": sft, "preference": preference}, stream
    )


def digest_source(arguments: Mapping[str, Any]) -> str | None:
    """Digest the bytes of all files; None where one cannot be read."""
    state = xxhash.xxh3_128()
    for name in ("train", "eval", "sft", "preference"):
        if (path := arguments.get(name)) is not None:
            if (file := _open(str(path))) is None:
                return None
            with file:
                length = file.seek(0, os.SEEK_END)
                state.update(f"{name}:{length}:".encode())
                file.seek(0)
                while block := file.read(1 << 22):
                    state.update(block)
    return state.hexdigest()


def read_rows(argument: str, path: str) -> Places[Row]:
    """Read the rows of the file at `path`, named by `argument`; objects of a store are copied to ``TMPDIR`` first.
    Raises UserError: it does not exist, or is not what its name says; of a line of JSON, once it is read."""
    field = f"source_args.{argument}"
    if (file := _open(path)) is None:
        raise UserError(field, path, "no such file")
    if not path.endswith((".jsonl", ".json", ".parquet")):
        raise UserError(field, path, "must end in .jsonl, .json or .parquet")
    if local_path(path) is None:
        copy = tempfile.TemporaryFile()  # noqa: SIM115 - read as long as there are rows to read
        shutil.copyfileobj(file, copy, 1 << 22)
        copy.seek(0)
        file = copy
    if not path.endswith(".parquet"):
        return index_json_lines(file, field, path)
    try:
        return read_parquet(file)
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


def index_json_lines(file: BinaryIO, field: str, path: str) -> Places[Row]:
    """Index JSON Lines in a file that can be sought cheaply; eight bytes a row in memory. A row that is not a JSON
    object, or not UTF-8, raises UserError once it is read."""
    starts, at = array("q"), 0
    for line in file:
        if line.strip():
            starts.append(at)
        at += len(line)

    def read(place: int) -> Row:
        file.seek(starts[place])
        line = file.readline()
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError as error:
            where = starts[place] + error.start
            raise UserError(
                field, path, f"is not UTF-8 ({error.reason} at byte {where})"
            ) from error
        except ValueError as error:
            raise UserError(
                field, f"{path}:{number(place)}", f"is not JSON ({error}); one object a line"
            ) from error
        if not isinstance(row, dict):
            raise UserError(field, f"{path}:{number(place)}", "must be a JSON object")
        return row

    def number(place: int) -> int:
        file.seek(0)
        ends = itertools.accumulate(map(len, file))
        return 1 + sum(1 for _ in itertools.takewhile(lambda end: end <= starts[place], ends))

    return Places(len(starts), read)


def read_parquet(file: BinaryIO) -> Places[Row]:
    """Read Parquet rows, unpacked once into a temporary file (``TMPDIR``) that is mapped into memory. Raises
    pyarrow.ArrowException, OSError: it cannot be read."""
    packed = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
    with tempfile.NamedTemporaryFile() as unpacked:
        with pa.ipc.new_file(unpacked, packed.schema_arrow) as out:
            for batch in packed.iter_batches(UNPACKED):
                out.write_batch(batch)
        unpacked.flush()
        mapped = pa.ipc.open_file(pa.memory_map(unpacked.name))  # stays when the name goes
    ends = array(
        "q",
        itertools.accumulate(
            mapped.get_batch(k).num_rows for k in range(mapped.num_record_batches)
        ),
    )

    def read(place: int) -> Row:
        k = bisect.bisect_right(ends, place)
        return mapped.get_batch(k).slice(place - (ends[k - 1] if k else 0), 1).to_pylist()[0]

    return Places(len(ends) and ends[-1], read)
