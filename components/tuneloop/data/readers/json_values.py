"""Where the values of a JSON file begin and end: of an array, or of objects one after another.

The file is read in blocks, so that little more than one value is in memory.

`json_files.py` alone uses it, and parses each text again by `strict_json.py`, which refuses more.
"""

import codecs
import json
import re
from collections.abc import Iterator
from typing import BinaryIO

from tuneloop.core.errors import UserError

BLOCK = 1 << 20
"""Bytes that are read at once."""
SPACE = re.compile(r"[ \t\r\n]*")
"""White space of JSON."""


def split_values(file: BinaryIO, path: str) -> Iterator[str]:
    """Yield the text of each value of a file that is an array, or values one after another."""
    text = _Text(file, path)
    text.skip_space()
    # Objects one after another need no commas; pretty-printed ones stand in several lines.
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
    """The text of a file, read as far as it is needed.

    Attributes:
        position: where the next value begins in the buffer.
        lines_before: line breaks in what was read and dropped, for messages.
    """

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
                # The value may go on behind what was read.
                if self.is_at_end:
                    # Of an integer with over 4300 digits Python's error has no `msg`.
                    reason = getattr(error, "msg", str(error))
                    raise self.explain(number, reason) from error
                self.read_more()
                continue
            # A number that ends with the buffer may have further digits.
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
