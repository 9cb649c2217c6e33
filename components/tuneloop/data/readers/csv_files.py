"""CSV and TSV with a header: every value is the text that the file has.

Nothing is made of "007", "NA" or "1e5", as the readers of tables do that infer types."""

import csv
import io
import json
import sys
import tempfile
from array import array
from typing import BinaryIO

from tuneloop.core.errors import UserError
from tuneloop.data import BadRow
from tuneloop.data.readers import Row, Rows
from tuneloop.data.readers.json_files import check_encoding
from tuneloop.formats.token_files import Places


def read_csv(file: BinaryIO, path: str) -> Rows:
    """Read a table of text; its rows are copied to a temporary file (``TMPDIR``), where they can be
    read by number. Raises UserError: no header, or text that is not UTF-8 or CSV."""
    check_encoding(file, path)
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - read as long as there are rows to read
    ends = array("q")
    lines = array("q")
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    csv.field_size_limit(sys.maxsize)
    delimiter = _find_delimiter(text, path)
    reader = csv.reader(text, delimiter=delimiter, strict=True)
    line = 0
    try:
        header = next(reader, [])
        _check_header(header, path)
        line = reader.line_num
        for record in reader:
            if record:
                copy.write(json.dumps(record).encode())
                ends.append(copy.tell())
                lines.append(line + 1)
            line = reader.line_num
    except UnicodeDecodeError as error:
        raise UserError("data", path, f"is not UTF-8 ({error.reason}); save it as UTF-8") from error
    except csv.Error as error:
        remedy = f"is not CSV ({error} in the record that begins in line {line + 1}); correct it"
        raise UserError("data", path, remedy) from error
    finally:
        text.detach()

    def read(place: int) -> Row | BadRow:
        start = ends[place - 1] if place else 0
        copy.seek(start)
        record = json.loads(copy.read(ends[place] - start))
        name = f"{path}:{lines[place]}"
        if len(record) != len(header):
            return BadRow(name, f"has {len(record)} fields where the header has {len(header)}")
        return Row(dict(zip(header, record)), name)

    return Places(len(ends), read)


def _find_delimiter(text: io.TextIOWrapper, path: str) -> str:
    if ".tsv" in path:
        return "\t"
    try:
        header = text.readline()
    except UnicodeDecodeError as error:
        raise UserError("data", path, f"is not UTF-8 ({error.reason}); save it as UTF-8") from error
    text.seek(0)
    return ";" if ";" in header and "," not in header else ","


def _check_header(header: list[str], path: str) -> None:
    if not header:
        raise UserError("data", path, "is empty; point it at a table with at least one row")
    repeated = {name for name in header if header.count(name) > 1}
    if repeated or "" in header:
        remedy = "its first line must name every column once"
        raise UserError("data", f"{path}:1", remedy)
