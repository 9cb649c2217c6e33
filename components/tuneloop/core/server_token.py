"""The token of a run's rollout servers: a file that servers and clients read anew for each request.

Each line is a token that a server accepts, and a client sends the first. So a token is rotated
without refused requests: add the new one as a second line, make it the first, remove the old one.
"""

import contextlib
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "TUNELOOP_TOKEN_FILE"
"""Environment variable of servers and clients that names the file: set by `argo/pod_fields.py`,
`kfp/rollout_server.py`, the gateway and the manifests of the sandbox and the sampler. Clients of the
sandbox service name its file by another one (`workflow/settings.py: SANDBOX_TOKEN`).

If the file never existed, no token is required or sent."""
_PATHS_READ: set[str] = set()
"""The files that this process has read: a server whose file is gone does not become an open one."""


def read_tokens(variable: str = VARIABLE) -> Sequence[str]:
    """Read the tokens that a server accepts.

    A file that is empty (while it is replaced), or was deleted after it was read, gives a random
    token that no client has. So requests are refused, and their clients try again.

    Returns:
        No token if the server requires none.
    """
    path = os.environ.get(variable, "")
    tokens: list[str] = []
    with contextlib.suppress(FileNotFoundError):
        if path:
            tokens = Path(path).read_text().split()
            _PATHS_READ.add(path)
    if not tokens and path in _PATHS_READ:
        tokens = [secrets.token_urlsafe(32)]
    return tokens


def build_token_headers(variable: str = VARIABLE) -> dict[str, str]:
    """Return the headers of a client's request, with its token if there is one."""
    tokens = read_tokens(variable)
    return {"Authorization": f"Bearer {tokens[0]}"} if tokens else {}


def create_token_file(path: Path, prefix: str = "") -> None:
    """Write a new token into a file that only its owner reads, unless the file exists."""
    with contextlib.suppress(FileExistsError):
        # The mode is set when the file is created: nobody else can open it before.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(f"{prefix}{secrets.token_urlsafe(32)}\n")
