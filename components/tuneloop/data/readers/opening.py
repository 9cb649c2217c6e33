"""From what a user writes to rows: a file, several, a glob, a folder, or a data set of the hub.

`data/files.py` and `data/layout_tables.py` open rows by it. `planning/limits.py` and
`planning/pod_paths.py` ask the same functions which files a run would need, and `data/sources.py`
whether a setting means a place or the name of a source.
"""

import glob
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import xxhash

from tuneloop.core.errors import UserError
from tuneloop.core.hub import is_hub_name
from tuneloop.core.store import Store, local_path
from tuneloop.data.readers import Rows, hub
from tuneloop.data.readers.arrow_files import read_arrow, read_parquet
from tuneloop.data.readers.csv_files import read_csv
from tuneloop.data.readers.json_files import read_json

READERS: dict[str, Callable[[BinaryIO, str], Rows]] = {
    ".jsonl": read_json,
    ".json": read_json,
    ".ndjson": read_json,
    ".csv": read_csv,
    ".tsv": read_csv,
    ".parquet": read_parquet,
    ".arrow": read_arrow,
    ".feather": read_arrow,
}
"""Suffix of a file → what reads it: an open file that can be sought, and its path for messages.
Files in a folder with any other suffix are passed over without a word."""
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
"""Suffix of a compressed file → pyarrow's name of its compression."""
SUFFIXES = ", ".join(READERS)
# Words in the path of a file below its folder. The split `train` takes the files that `TRAINED`
# matches, or else all that `HELD_OUT` does not match; any other split takes those with its very
# name.
HELD_OUT = re.compile(r"(^|[^a-z])(test|eval|evaluation|valid|validation|val|dev)([^a-z]|$)")
TRAINED = re.compile(r"(^|[^a-z])train(ing)?([^a-z]|$)")
BLOCK = 1 << 22
"""Bytes that are digested or copied at once."""


def is_place(source: str) -> bool:
    """Return whether a text may name a file, a glob, a folder or a data set of the hub: it exists,
    has a folder or a known suffix in it, or is an address."""
    # Not only what exists: pods may have files that are not here.
    if "/" in source or glob.has_magic(source):
        return True
    return _find_suffix(source) is not None or os.path.exists(source)


def open_files(
    path: str | Sequence[str], split: str, name: str | None = None, revision: str | None = None
) -> dict[str, Rows]:
    """Open the rows at one or several places, by file; files without rows are left out. Raises
    UserError: there is no such file, it cannot be read, or none has a row."""
    rows_by_file: dict[str, Rows] = {}
    for file in list_all_files([path] if isinstance(path, str) else path, split):
        if _is_for_datasets(file):
            rows_by_file[file] = hub.load_split(file, name, revision, split)
        else:
            rows_by_file[file] = read_file(file)
    filled = {file: rows for file, rows in rows_by_file.items() if len(rows)}
    if not filled:
        named = ", ".join(list(rows_by_file)[:3])
        raise UserError("data", named, "is empty; point it at a table with at least one row")
    return filled


def is_on_hub(address: str) -> bool:
    """Return whether a text names a data set on the hub, and no file here."""
    if address.startswith("hf://"):
        return True
    # A name without an owner is one of a source or of a file here.
    is_name = "/" in address and is_hub_name(address)
    return is_name and not os.path.exists(address) and not _find_suffix(address)


def _is_for_datasets(address: str) -> bool:
    """Return whether the library `datasets` reads what a text names."""
    return is_on_hub(address) or hub.is_saved(address)


def list_files(pattern: str, split: str) -> list[str]:
    """List the files that a path, a glob, or a folder's `split` names, sorted. A file that a path
    names need not exist. Raises UserError: a folder has no file of the split, or a glob matches
    none."""
    folder = Path(pattern)
    is_stored = local_path(pattern) is None
    if is_stored and _find_suffix(pattern):
        return [pattern]
    if is_stored or folder.is_dir():
        if is_stored:
            url = pattern.rstrip("/")
            keys = Store(url).keys()
            readable = [f"{url}/{key}" for key in keys if _find_suffix(key)]
        else:
            readable = [str(file) for file in folder.rglob("*") if _find_suffix(file.name)]
        files = _choose_split(sorted(readable), pattern, split)
        if readable and not files:
            raise UserError("data", pattern, f"no file of the split {split!r} is there")
    elif glob.has_magic(pattern):
        files = sorted(glob.glob(pattern, recursive=True))
    else:
        # Whether it is there, its reader finds out.
        return [pattern]
    if not files:
        raise UserError("data", pattern, f"no file there ends in one of {SUFFIXES}")
    return files


def read_file(path: str) -> Rows:
    """Read the rows of one file; objects of a store, and compressed files, are copied to ``TMPDIR``
    first. Raises UserError: it does not exist, or is not what its name says."""
    suffix = _find_suffix(path)
    file = _open(path)
    if file is None:
        raise UserError("data", path, "no such file")
    if suffix is None:
        raise UserError("data", path, explain_suffix())
    compression = COMPRESSED.get(Path(path).suffix.lower())
    # Readers go back and forth in a file, which neither a stream nor an object can.
    if compression or local_path(path) is None:
        file = _copy(file, path, compression)
    return READERS[suffix](file, path)


def explain_suffix() -> str:
    """Return the remedy for a file whose name does not say its format."""
    return f"must end in one of {SUFFIXES}, perhaps with {', '.join(COMPRESSED)}"


def has_known_suffix(path: str) -> bool:
    """Return whether the name of a file says a format that is read."""
    return _find_suffix(path) is not None


def list_all_files(addresses: Sequence[str], split: str) -> list[str]:
    """List the files that several texts name. A data set that `datasets` reads is listed by its own
    name. Raises UserError as `list_files`."""
    files: list[str] = []
    for address in addresses:
        if _is_for_datasets(address):
            files.append(address)
        else:
            files += list_files(address, split)
    return files


def digest_files(sources: Sequence[tuple[str, str]]) -> str | None:
    """Digest the bytes of all files of addresses, each with the split that is read of it. None: a
    file cannot be read.

    Of a data set on the hub only the name is digested: that its rows have changed is not noticed. A
    revision pins them.
    """
    state = xxhash.xxh3_128()
    for address, split in sources:
        if is_on_hub(address):
            state.update(f"{address}\n".encode())
            continue
        for path in _list_bytes(address, split):
            file = _open(path)
            if file is None:
                return None
            with file:
                # With names and lengths, bytes that moved from one file to another differ.
                length = file.seek(0, os.SEEK_END)
                state.update(f"{path}:{length}:".encode())
                file.seek(0)
                while block := file.read(BLOCK):
                    state.update(block)
    return state.hexdigest()


def _list_bytes(address: str, split: str) -> Iterator[str]:
    """Yield all files whose bytes decide about rows: those of the split, or all of a folder that
    ``save_to_disk`` wrote."""
    if hub.is_saved(address):
        for path in sorted(Path(address).rglob("*")):
            if path.is_file():
                yield str(path)
    else:
        yield from list_files(address, split)


def _find_suffix(path: str) -> str | None:
    """Return the suffix that names the form of a file, under that of a compressed one."""
    name = Path(path)
    if name.suffix.lower() in COMPRESSED:
        name = name.with_suffix("")
    return name.suffix.lower() if name.suffix.lower() in READERS else None


def _choose_split(files: list[str], folder: str, split: str) -> list[str]:
    """Choose the files of a split by words in their paths below the folder.

    ``train`` takes the files that are named so, or else all that are not named as held out. Any
    other split takes only the files with its own word: ``validation`` does not find ``val.jsonl``.
    """
    names = {file: os.path.relpath(file, folder).lower() for file in files}
    if split == "train":
        trained = [file for file in files if TRAINED.search(names[file])]
        return trained or [file for file in files if not HELD_OUT.search(names[file])]
    word = re.compile(rf"(^|[^a-z]){re.escape(split.lower())}([^a-z]|$)")
    return [file for file in files if word.search(names[file])]


def _open(path: str) -> BinaryIO | None:
    """Open a file here or an object of a store; None where there is none."""
    folder, _, name = path.rpartition("/")
    try:
        return Store(folder or ("/" if path.startswith("/") else ".")).open(name)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    except PermissionError as error:
        raise UserError("store", path, f"not permitted ({error.strerror}); grant access") from error


def _copy(file: BinaryIO, path: str, compression: str | None) -> BinaryIO:
    """Copy a file to where it can be sought, unpacked."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - read as long as there are rows to read
    try:
        source = pa.CompressedInputStream(pa.PythonFile(file), compression) if compression else file
        shutil.copyfileobj(source, copy, BLOCK)
    except (pa.ArrowException, OSError) as error:
        # Without compression it is the store or the disk that fails, which are no user's mistake.
        if compression is None:
            raise
        remedy = f"is not readable as {compression} ({error}); was it copied whole?"
        raise UserError("data", path, remedy) from error
    copy.seek(0)
    return copy
