"""The token of a run's rollout servers: a file that servers and their clients read anew for each request.

Each line is a token that a server accepts; a client sends the first. So a token is rotated without refused requests:
add the new one as a second line, make it the first, remove the old one."""

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "TUNELOOP_TOKEN_FILE"
"""Environment variable of servers and clients: the file. If it never existed, no token is required or sent."""
_SEEN = set[str]()


def read_tokens(variable: str = VARIABLE) -> Sequence[str]:
    """Read the tokens that a server accepts; empty: it requires none. A file that is empty (while it is replaced), or
    was deleted after it was read, gives a random token that no client has: requests are refused, and retried."""
    path = os.environ.get(variable)
    found: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        if path:
            found = Path(path).read_text().split()
            _SEEN.add(path)
    return found or ([secrets.token_urlsafe(32)] if path in _SEEN else ())


def build_token_headers(variable: str = VARIABLE) -> dict[str, str]:
    """Return the headers of a client's request, with its token if there is one."""
    return {"Authorization": f"Bearer {tokens[0]}"} if (tokens := read_tokens(variable)) else {}


def create_token_file(path: Path, prefix: str = "") -> None:
    """Write a new token into a file that only its owner reads, unless the file is there."""
    with contextlib.suppress(FileExistsError):
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{prefix}{secrets.token_urlsafe(32)}\n")
