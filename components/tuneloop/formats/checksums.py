"""``SHA256SUMS``: the digests of a directory's files, in the format of the tool ``sha256sum``.

The file makes a directory in a store verifiable without a manifest of ours: `sha256sum --check`
reads it, and anybody can write it. `formats/uploads.py` writes it, and reads it to go on with an
upload that was cut off; `formats/stored_models.py` reads it, and refuses a directory that has a
`CLAIM`. Tests: `tests/unit/cli/test_store_put.py`.
"""

import re
from collections.abc import Mapping

from tuneloop.core.errors import UserError

SUMS = "SHA256SUMS"
"""The name of the file."""
CLAIM = f".{SUMS}.partial"
"""The name of a file of sums beside files that are still on their way."""
# A line of the tool's, in text or binary mode; one of a name with a backslash is refused.
LINE = re.compile(r"(?P<digest>[0-9a-fA-F]{64}) [ *](?P<name>.+)")


def format_sums(digests: Mapping[str, str]) -> bytes:
    """Format name → SHA-256 in hexadecimal, a line for each file."""
    # Sorted, so that equal directories have equal files.
    lines = [f"{digests[name]}  {name}\n" for name in sorted(digests)]
    text = "".join(lines)
    return text.encode()


def parse_sums(data: bytes, address: str) -> dict[str, str]:
    """Parse a file of sums into name → SHA-256 in hexadecimal.

    Raises UserError if a line is none, with the `address` of the file.
    """
    digests: dict[str, str] = {}
    text = data.decode(errors="replace")
    for number, line in enumerate(text.splitlines(), start=1):
        match = LINE.fullmatch(line)
        if match is None:
            remedy = f"line {number} is not a SHA-256 and a name; write it by `sha256sum *`"
            raise UserError("file", address, remedy)
        # The tool repeats the paths that it was given, which may begin with the directory.
        name = match["name"].removeprefix("./")
        digests[name] = match["digest"].lower()
    return digests
