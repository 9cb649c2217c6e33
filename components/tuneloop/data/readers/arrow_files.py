"""Parquet and Arrow: rows by number from files that are mapped into memory.

Nested columns have a field for all rows if one row has it. Fields that are null there are left out,
as the row's author never wrote them; `Row.nulls` counts them."""

import bisect
import datetime
import decimal
import itertools
import tempfile
from array import array
from collections.abc import Mapping
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from tuneloop.core.errors import UserError
from tuneloop.data import BadRow
from tuneloop.data.readers import Row, Rows
from tuneloop.formats.token_files import Places

UNPACKED = 1024
"""Rows of Parquet that are unpacked at once."""


def read_parquet(file: BinaryIO, path: str) -> Rows:
    """Read Parquet rows, unpacked once into a temporary file (``TMPDIR``) that is mapped into
    memory. Raises UserError: it cannot be read."""
    try:
        packed = pq.ParquetFile(file, buffer_size=1 << 20, pre_buffer=False)
        with tempfile.NamedTemporaryFile() as unpacked:
            with pa.ipc.new_file(unpacked, packed.schema_arrow) as out:
                for batch in packed.iter_batches(UNPACKED):
                    out.write_batch(batch)
            unpacked.flush()
            # The mapping stays when the file's name goes.
            mapped = pa.ipc.open_file(pa.memory_map(unpacked.name))
    except (pa.ArrowException, OSError) as error:
        raise UserError("data", path, f"is not readable as Parquet ({error})") from error
    batches = [mapped.get_batch(number) for number in range(mapped.num_record_batches)]
    return _index_batches(batches, path)


def read_arrow(file: BinaryIO, path: str) -> Rows:
    """Read an Arrow file, of the file format (Feather) or of the stream format (`datasets`). Raises
    UserError: it cannot be read."""
    source = pa.memory_map(file.name) if isinstance(file.name, str) else pa.PythonFile(file)
    try:
        try:
            table = pa.ipc.open_file(source).read_all()
        except pa.ArrowInvalid:
            source.seek(0)
            table = pa.ipc.open_stream(source).read_all()
    except (pa.ArrowException, OSError) as error:
        raise UserError("data", path, f"is not readable as Arrow ({error})") from error
    return _index_batches(table.to_batches(), path)


def make_row(values: Mapping[str, Any], name: str) -> Row | BadRow:
    """Make a row of the values of a table."""
    nulls = sum(_count_nulls(value) for value in values.values())
    converted = {column: _convert(value) for column, value in values.items()}
    if any(isinstance(value, bytes) for value in converted.values()):
        columns = [column for column, value in converted.items() if isinstance(value, bytes)]
        converted = {column: value for column, value in converted.items() if column not in columns}
    return Row(converted, name, nulls)


def _index_batches(batches: list[pa.RecordBatch], path: str) -> Rows:
    ends = array("q", itertools.accumulate(batch.num_rows for batch in batches))

    def read(place: int) -> Row | BadRow:
        number = bisect.bisect_right(ends, place)
        start = ends[number - 1] if number else 0
        (values,) = batches[number].slice(place - start, 1).to_pylist()
        return make_row(values, f"{path} row {place + 1}")

    return Places(ends[-1] if len(ends) else 0, read)


def _count_nulls(value: Any) -> int:
    """Count the null fields of the structs inside a value."""
    if isinstance(value, dict):
        return sum(part is None or _count_nulls(part) for part in value.values())
    if isinstance(value, list):
        return sum(_count_nulls(part) for part in value)
    return 0


def _convert(value: Any) -> Any:
    """Make JSON of a value: structs without null fields, dates and decimal numbers as text."""
    if isinstance(value, dict):
        return {name: _convert(part) for name, part in value.items() if part is not None}
    if isinstance(value, list):
        return [_convert(part) for part in value]
    if isinstance(value, datetime.date | datetime.time | datetime.timedelta | decimal.Decimal):
        return str(value)
    return value
