"""CSV and TSV with a header: every value is the text that the file has.

Other readers infer types, and make a number of "007" and null of "NA"; this one does not.
"""

import csv
import io
import json
import sys
from array import array
from typing import BinaryIO

from tuneloop.core.errors import UserError
from tuneloop.data import BadRow
from tuneloop.data.readers import ReadRow, Row, Rows
from tuneloop.data.readers.json_files import check_encoding
from tuneloop.data.readers.records import RecordFile
from tuneloop.formats.sequences import LazySequence


def read_csv(file: BinaryIO, path: str) -> Rows:
    """Read a table of text. A record may have several lines, so all are found by one pass, and
    copied to where they can be read by number. Raises UserError: no header, or text that is not
    UTF-8 or CSV."""
    check_encoding(file, path)
    records = RecordFile()
    lines = array("q")
    text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
    # Python's limit of 131,072 characters is below what a prompt may have.
    csv.field_size_limit(sys.maxsize)
    # The line before the record that is read, from 1.
    line = 0
    try:
        # Strict: a quote that does not end would swallow the rest of the file in silence.
        reader = csv.reader(text, delimiter=_find_delimiter(text, path), strict=True)
        header = next(reader, [])
        _check_header(header, path)
        line = reader.line_num
        for record in reader:
            if record:
                records.append(json.dumps(record).encode())
                lines.append(line + 1)
            line = reader.line_num
    except UnicodeDecodeError as error:
        raise UserError("data", path, f"is not UTF-8 ({error.reason}); save it as UTF-8") from error
    except csv.Error as error:
        remedy = f"is not CSV ({error} in the record that begins in line {line + 1}); correct it"
        raise UserError("data", path, remedy) from error
    finally:
        # The wrapper would close the file, which is not its own.
        text.detach()

    def read(index: int) -> ReadRow:
        record = json.loads(records[index])
        name = f"{path}:{lines[index]}"
        if len(record) != len(header):
            return BadRow(name, f"has {len(record)} fields where the header has {len(header)}")
        return Row(dict(zip(header, record)), name)

    return LazySequence(len(records), read)


def _find_delimiter(text: io.TextIOWrapper, path: str) -> str:
    """Find what separates the columns: tabs by the file's name, else semicolons where its first
    line has no comma, as Excel writes it in countries that write 1,5 for one and a half."""
    if ".tsv" in path.rpartition("/")[2]:
        return "\t"
    header = text.readline()
    text.seek(0)
    return ";" if ";" in header and "," not in header else ","


def _check_header(header: list[str], path: str) -> None:
    if not header:
        raise UserError("data", path, "is empty; point it at a table with at least one row")
    if len({*header}) < len(header) or "" in header:
        remedy = "its first line must name every column once"
        raise UserError("data", f"{path}:1", remedy)
