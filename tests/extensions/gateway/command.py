"""The command that serves a gateway for tests."""

import sys
from pathlib import Path


def build_gateway_command(home: Path, *flags: str) -> list[str]:
    """Return the command of a gateway on a free port, for sessions on this machine.

    Args:
        home: folder of its store, and of the file `token` that callers read.
        flags: further options.
    """
    command = [sys.executable, "-m", "tuneloop.cli", "gateway", "--local", "--port", "0"]
    command += ["--store", str(home / "store"), "--token-file", str(home / "token")]
    command += flags
    return command
