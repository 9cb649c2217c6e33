"""JSON Lines and JSON: rows by number, each parsed when it is asked for.

A file of lines is not copied: eight bytes a row are in memory. The elements of an array, or objects
one after another, are found by one pass over the file, and copied to a temporary file (``TMPDIR``).

`local/probe.py` reads a row by `index_lines`, too, and `csv_files.py` uses `check_encoding`.
"""

import bisect
import codecs
import json
from array import array
from typing import BinaryIO

from tuneloop.core.errors import UserError
from tuneloop.data import BadRow, BadValue
from tuneloop.data.messages import is_messages
from tuneloop.data.readers import ReadRow, Row, Rows
from tuneloop.data.readers.json_values import split_values
from tuneloop.data.readers.records import RecordFile
from tuneloop.data.readers.strict_json import describe_type, parse_json
from tuneloop.formats.sequences import LazySequence

PROBED = 50
"""Lines at the beginning of a file that decide which form of JSON it has."""
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
"""How UTF-16 begins, which Windows' tools write by default."""
BLANK = b" \t\r\n\f\v\xef\xbb\xbf"
"""Bytes of a line that is no row: white space, and a byte order mark."""


def read_json(file: BinaryIO, path: str) -> Rows:
    """Read a file of JSON: an object a line, one array of objects, objects one after another, or
    one object that holds such an array. Raises UserError: it is UTF-16, or none of these forms."""
    check_encoding(file, path)
    return index_lines(file, path) if _has_lines(file) else index_values(file, path)


def _has_lines(file: BinaryIO) -> bool:
    """Return whether a file has a value a line, by its first lines."""
    first, *following = _read_lines(file)
    is_whole = _is_json(first)
    if first.startswith(b"["):
        # Lines with an array each are rows, and wrong ones, which their numbers name.
        return is_whole and bool(following)
    if not following:
        return _find_only_list(first) is None
    # A first line that is not whole is a damaged row, or an object written over several lines. Other
    # rows tell: these stand at the beginning of their lines.
    has_rows = any(line.startswith(b"{") and _is_json(line) for line in following)
    return is_whole or has_rows or not first.startswith(b"{")


def check_encoding(file: BinaryIO, path: str) -> None:
    """Check that a file does not begin as UTF-16 does. Raises UserError where it does."""
    file.seek(0)
    if file.read(2) in UTF16:
        raise UserError("data", path, "is UTF-16; save it as UTF-8")
    file.seek(0)


def index_lines(file: BinaryIO, path: str) -> Rows:
    """Index JSON Lines. A row that is no JSON object, or not UTF-8, is a `BadRow` once it is
    read."""
    starts = array("q")
    blanks = array("q")
    position = 0
    file.seek(0)
    for line in file:
        if line.strip(BLANK):
            starts.append(position)
        else:
            blanks.append(len(starts))
        position += len(line)

    def read(index: int) -> ReadRow:
        file.seek(starts[index])
        # Editors count the blank lines, too.
        line_number = index + 1 + bisect.bisect_right(blanks, index)
        return parse_row(file.readline(), f"{path}:{line_number}")

    return LazySequence(len(starts), read)


def index_values(file: BinaryIO, path: str) -> Rows:
    """Index the objects of an array, or objects one after another."""
    records = RecordFile()
    for text in split_values(file, path):
        records.append(text.encode())
    # The only object of a file may hold the rows, as `{"data": [...]}` does.
    rows = _find_only_list(records[0]) if len(records) == 1 else None
    if rows is not None:
        records = RecordFile()
        for row in rows:
            records.append(json.dumps(row).encode())

    def read(index: int) -> ReadRow:
        return parse_row(records[index], f"{path} row {index + 1}")

    return LazySequence(len(records), read)


def parse_row(data: bytes, name: str) -> ReadRow:
    """Parse the text of one row."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return BadRow(name, f"is not UTF-8 ({error.reason} at byte {error.start} of the row)")
    try:
        values = parse_json(text.strip())
    except BadValue as error:
        return BadRow(name, str(error))
    if not isinstance(values, dict):
        return BadRow(name, f"is {describe_type(values)}, not a JSON object with named columns")
    return Row(values, name)


def _read_lines(file: BinaryIO) -> list[bytes]:
    """Return the first lines that are not blank, up to `PROBED`, without a byte order mark; at
    least one, which may be empty."""
    file.seek(0)
    lines: list[bytes] = []
    for line in file:
        text = line.removeprefix(codecs.BOM_UTF8).rstrip()
        # The first is judged by how it begins, the others also by their indentation.
        if not lines:
            text = text.lstrip()
        if text.strip():
            lines.append(text)
        if len(lines) == PROBED:
            break
    return lines or [b""]


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _are_objects(values: list[object]) -> bool:
    return all(isinstance(value, dict) for value in values)


def _find_only_list(text: bytes) -> list[object] | None:
    """Return the list of objects that the only object of a file holds, if it holds one such
    list."""
    try:
        values = parse_json(text.decode())
    except (BadValue, UnicodeDecodeError):
        return None
    # A row with messages is a row, though it may be the only one.
    if not isinstance(values, dict) or not values.keys().isdisjoint(("messages", "conversations")):
        return None
    lists = [value for value in values.values() if isinstance(value, list)]
    # Nor is a prompt or a completion a table, though it is a list of messages.
    tables = [rows for rows in lists if rows and _are_objects(rows) and not is_messages(rows)]
    # A table stands by itself, or beside a version: with more beside it, it is a column.
    is_table = len(tables) == 1 and len(values) - len(lists) <= 1
    return tables[0] if is_table else None
