"""Rows of a file by place, unpacked as they are asked for: a file may be larger than the machine's memory."""

from __future__ import annotations

import bisect
import itertools
import json
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from tuneloop.core.errors import UserError

Row = Mapping[str, Any]
UNPACKED = 1024
"""Rows of Parquet that are unpacked at once."""


class Rows(Sequence[Row]):
    """`length` rows; `read` makes the one at a place."""

    def __init__(self, length: int, read: Callable[[int], Row]) -> None:
        self._length, self._read = length, read

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, place: Any) -> Any:
        return self._read(range(self._length)[place])


def json_lines(file: BinaryIO, field: str, path: str) -> Rows:
    """Index JSON Lines in a file that can be sought cheaply; eight bytes a row in memory.

    A row that is not a JSON object, or not UTF-8, raises UserError once it is read.

    Args:
        field, path: name the file in errors.
    """
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
            raise UserError(field, path, f"is not UTF-8 ({error.reason} at byte {where})") from error
        except ValueError as error:
            raise UserError(field, f"{path}:{number(place)}", f"is not JSON ({error}); one object a line") from error
        if not isinstance(row, dict):
            raise UserError(field, f"{path}:{number(place)}", "must be a JSON object")
        return row

    def number(place: int) -> int:
        file.seek(0)
        ends = itertools.accumulate(map(len, file))
        return 1 + sum(1 for _ in itertools.takewhile(lambda end: end <= starts[place], ends))

    return Rows(len(starts), read)


def read_parquet(file: BinaryIO) -> Rows:
    """Read Parquet rows, unpacked once into a temporary file (``TMPDIR``) that is mapped into memory.

    Raises:
        pyarrow.ArrowException, OSError: it cannot be read.
    """
    packed = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
    with tempfile.NamedTemporaryFile() as unpacked:
        with pa.ipc.new_file(unpacked, packed.schema_arrow) as out:
            for batch in packed.iter_batches(UNPACKED):
                out.write_batch(batch)
        unpacked.flush()
        mapped = pa.ipc.open_file(pa.memory_map(unpacked.name))  # stays when the name goes
    ends = array("q", itertools.accumulate(mapped.get_batch(k).num_rows for k in range(mapped.num_record_batches)))

    def read(place: int) -> Row:
        k = bisect.bisect_right(ends, place)
        found: Row = mapped.get_batch(k).slice(place - (ends[k - 1] if k else 0), 1).to_pylist()[0]
        return found

    return Rows(len(ends) and ends[-1], read)
