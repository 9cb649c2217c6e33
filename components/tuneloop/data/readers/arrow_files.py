"""Parquet and Arrow: rows by number from files that are mapped into memory.

Nested columns have a field for all rows if one row has it. Fields that are null there are left out,
as the row's author never wrote them; `Row.nulls` counts them.

`hub.py` makes its rows by `make_row`, too.
"""

import datetime
import decimal
import tempfile
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.data.readers import ReadRow, Row, Rows
from tuneloop.formats.sequences import LazySequence, chain_sequences

UNPACKED = 1024
"""Rows of Parquet that are unpacked at once."""
READ_BYTES = 1 << 20
"""Bytes of a packed file that are read at once."""


def read_parquet(file: BinaryIO, path: str) -> Rows:
    """Read Parquet rows, unpacked once into a temporary file (``TMPDIR``) that is mapped into
    memory. Raises UserError: it cannot be read."""
    try:
        # Column chunks of a large file have gigabytes: they are read in pieces, and not ahead.
        packed = pq.ParquetFile(file, buffer_size=READ_BYTES, pre_buffer=False)
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
    # What was copied to a temporary file has a number in place of a name.
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


def make_row(values: JsonMapping, name: str) -> ReadRow:
    """Make a row of the values of a table. A column of bytes is left out, as JSON has no bytes.
    Bytes inside a struct or a list stay, and are refused with the row's metadata if they get
    there."""
    nulls = sum(_count_nulls(value) for value in values.values())
    converted = {
        column: _convert(value) for column, value in values.items() if not isinstance(value, bytes)
    }
    return Row(converted, name, nulls)


def _index_batches(batches: list[pa.RecordBatch], path: str) -> Rows:
    tables = chain_sequences([LazySequence(len(batch), batch.slice) for batch in batches])

    def read(index: int) -> ReadRow:
        (values,) = tables[index].slice(0, 1).to_pylist()
        return make_row(values, f"{path} row {index + 1}")

    return LazySequence(len(tables), read)


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
