"""JSON Lines and JSON: rows by number, each parsed when it is asked for.

A file of lines is not copied: eight bytes a row are in memory. The elements of an array, or objects
one after another, are found by one pass over the file, and copied to a temporary file (``TMPDIR``)."""

import bisect
import codecs
import json
import re
import tempfile
from array import array
from collections.abc import Iterator
from typing import BinaryIO

from tuneloop.core.errors import UserError
from tuneloop.data import BadRow, BadValue
from tuneloop.data.readers import Row, Rows
from tuneloop.data.readers.strict_json import parse_json
from tuneloop.formats.token_files import Places

BLOCK = 1 << 20
PROBED = 50
"""Lines that decide which form of JSON a file has."""
UTF16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
SPACE = re.compile(r"[ \t\r\n]*")


def read_json(file: BinaryIO, path: str) -> Rows:
    """Read a file of JSON: an object a line, one array of objects, objects one after another, or
    one object that holds such an array. Raises UserError where it is neither."""
    check_encoding(file, path)
    first, *others = _read_lines(file, most=PROBED)
    is_whole = _is_json(first)
    if first.startswith(b"["):
        is_array = not (is_whole and others)
        return index_values(file, path) if is_array else index_lines(file, path)
    # A first line that is not whole is a damaged row, or an object written over several lines. Other
    # rows tell: these stand at the beginning of their lines.
    has_rows = any(line.startswith(b"{") and _is_json(line) for line in others)
    is_wrapper = not others and _find_only_list(first) is not None
    is_spread = first.startswith(b"{") and not is_whole and bool(others) and not has_rows
    return index_values(file, path) if is_spread or is_wrapper else index_lines(file, path)


def check_encoding(file: BinaryIO, path: str) -> None:
    """Check that a file does not begin as UTF-16 does. Raises UserError where it does."""
    file.seek(0)
    if file.read(2) in UTF16:
        raise UserError("data", path, "is UTF-16; save it as UTF-8")
    file.seek(0)


def index_lines(file: BinaryIO, path: str) -> Rows:
    """Index JSON Lines. A row that is no JSON object, or not UTF-8, is a `BadRow` once it is read."""
    starts = array("q")
    blanks = array("q")
    position = 0
    file.seek(0)
    for line in file:
        if line.strip(b" \t\r\n\f\v\xef\xbb\xbf"):
            starts.append(position)
        else:
            blanks.append(len(starts))
        position += len(line)

    def read(place: int) -> Row | BadRow:
        file.seek(starts[place])
        line_number = place + 1 + bisect.bisect_right(blanks, place)
        return parse_row(file.readline(), f"{path}:{line_number}")

    return Places(len(starts), read)


def index_values(file: BinaryIO, path: str) -> Rows:
    """Index the objects of an array, or objects one after another."""
    copy = tempfile.TemporaryFile()  # noqa: SIM115 - read as long as there are rows to read
    ends = array("q")
    for text in _split_values(file, path):
        copy.write(text.encode())
        ends.append(copy.tell())
    copy.seek(0)
    rows = _find_only_list(copy.read()) if len(ends) == 1 else None
    if rows is not None:
        copy = tempfile.TemporaryFile()  # noqa: SIM115
        ends = array("q")
        for row in rows:
            copy.write(json.dumps(row).encode())
            ends.append(copy.tell())

    def read(place: int) -> Row | BadRow:
        start = ends[place - 1] if place else 0
        copy.seek(start)
        return parse_row(copy.read(ends[place] - start), f"{path} row {place + 1}")

    return Places(len(ends), read)


def parse_row(data: bytes, name: str) -> Row | BadRow:
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
        return BadRow(name, f"is {describe_type(values)}, not a JSON object")
    return Row(values, name)


def describe_type(value: object) -> str:
    """Name the JSON type of a value, with its article."""
    if isinstance(value, bool):
        return "a boolean"
    if value is None:
        return "null"
    if isinstance(value, str):
        return "text"
    if isinstance(value, int | float):
        return "a number"
    return "a list" if isinstance(value, list) else "an object"


def _read_lines(file: BinaryIO, most: int) -> list[bytes]:
    """Return up to `most` lines that are not blank, without a byte order mark; at least one."""
    file.seek(0)
    lines: list[bytes] = []
    for line in file:
        if (text := line.removeprefix(codecs.BOM_UTF8).rstrip()).strip():
            lines.append(text if lines else text.lstrip())
        if len(lines) == most:
            break
    return lines or [b""]


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _find_only_list(text: bytes) -> list[object] | None:
    """Return the list of objects that the only object of a file holds, if it holds one such list."""
    try:
        values = parse_json(text.decode())
    except (BadValue, UnicodeDecodeError):
        return None
    if not isinstance(values, dict):
        return None
    lists = [
        value
        for value in values.values()
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value)
    ]
    others = [value for value in values.values() if not isinstance(value, list)]
    # A row with messages is a row: only what stands by itself, or beside a version, is a table.
    is_table = (
        len(lists) == 1 and len(others) <= 1 and not {"messages", "conversations"} & {*values}
    )
    return lists[0] if is_table else None


def _split_values(file: BinaryIO, path: str) -> Iterator[str]:
    """Yield the text of each value of a file that is an array, or values one after another."""
    text = _Text(file, path)
    text.skip_space()
    is_array = text.peek() == "["
    if is_array:
        text.position += 1
    number = 0
    while True:
        text.skip_space()
        character = text.peek()
        if not character or (is_array and character == "]"):
            break
        number += 1
        yield text.take_value(number)
        text.skip_space()
        if is_array and text.peek() == ",":
            text.position += 1
        elif is_array and text.peek() != "]":
            raise text.explain(number, "Expecting ',' or ']'")
    if is_array:
        if text.peek() != "]":
            raise text.explain(number, "the array does not end")
        text.position += 1
        text.skip_space()
        if text.peek():
            raise text.explain(number, "something follows the array")


class _Text:
    """The text of a file, read as far as it is needed. `position` is where the next value begins."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        file.seek(0)
        self.file = file
        self.path = path
        self.decoder = codecs.getincrementaldecoder("utf-8-sig")()
        self.buffer = ""
        self.position = 0
        self.lines_before = 0
        self.is_at_end = False

    def read_more(self) -> None:
        """Read at least as much as there is already, so that long values cost no square of time."""
        self.lines_before += self.buffer.count("\n", 0, self.position)
        self.buffer = self.buffer[self.position :]
        self.position = 0
        data = self.file.read(max(BLOCK, len(self.buffer)))
        self.is_at_end = not data
        try:
            self.buffer += self.decoder.decode(data, final=not data)
        except UnicodeDecodeError as error:
            raise UserError("data", self.path, f"is not UTF-8 ({error.reason})") from error

    def peek(self) -> str:
        """Return the next character; empty at the end of the file."""
        while self.position >= len(self.buffer) and not self.is_at_end:
            self.read_more()
        return self.buffer[self.position : self.position + 1]

    def skip_space(self) -> None:
        """Move to the next character that is no white space."""
        while self.peek() in (" ", "\t", "\r", "\n"):
            match = SPACE.match(self.buffer, self.position)
            assert match is not None
            self.position = match.end()

    def take_value(self, number: int) -> str:
        """Return the text of the value that begins here. Raises UserError where it is no JSON."""
        while True:
            try:
                _, end = json.JSONDecoder().raw_decode(self.buffer, self.position)
            except RecursionError as error:
                raise self.explain(number, "nested too deeply") from error
            except ValueError as error:
                if self.is_at_end:
                    reason = getattr(error, "msg", str(error))
                    raise self.explain(number, reason) from error
                self.read_more()
                continue
            if end < len(self.buffer) or self.is_at_end:
                break
            self.read_more()
        text = self.buffer[self.position : end]
        self.position = end
        return text

    def explain(self, number: int, reason: str) -> UserError:
        """Return the error of a file that is no JSON: `number` is that of the row, from 1."""
        line = 1 + self.lines_before + self.buffer.count("\n", 0, self.position)
        remedy = f"is not JSON ({reason} in row {number}, which begins in line {line})"
        return UserError("data", self.path, f"{remedy}; correct it")
