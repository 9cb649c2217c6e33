"""Waiting for other threads and processes, and ports for them, on a machine that may be busy with much else."""

from __future__ import annotations

import inspect
import random
import socket
import subprocess
import time
import traceback
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
LIMIT_S = 300.0
"""Seconds after which what was to happen will not happen any more, however busy the machine is."""


def until(
    done: Callable[[], T],
    seconds: float = LIMIT_S,
    child: subprocess.Popen[Any] | None = None,
    *,
    pause: float = 0.01,
) -> T:
    """What `done` returns, once that is true. All that is asserted afterwards of others' state belongs into `done`.

    Args:
        pause: seconds between two looks.
        child: without which it will never come true: fails when that process has ended.
    """
    deadline = time.monotonic() + seconds
    while not (result := done()):
        assert time.monotonic() < deadline, (
            f"did not happen within {seconds:.0f} s: {describe_wait(done)}"
        )
        assert child is None or child.poll() is None or done(), (
            f"the process ended: {child.communicate()}"
        )
        time.sleep(pause)
    return result


def describe_wait(done: Callable[[], object]) -> str:
    """Return the last line of the caller that waits, and what it waits for, on one line: CI keeps little else."""
    callers = [frame for frame in traceback.extract_stack() if frame.filename != __file__]
    waiting = [frame for frame in callers if "/tests/" in frame.filename][-1]
    code = getattr(done, "__code__", None)
    variables = inspect.getclosurevars(done).nonlocals if code else {}
    shown = ", ".join(f"{name}={value!r:.300}" for name, value in variables.items())
    return f"{waiting.filename}:{waiting.lineno} {waiting.line} ({shown})"


def free_port() -> int:
    """A port that nobody listens at, below those that Linux deals out to connections and to who asks for port 0.

    Between the choice and its use it can thus be taken only by another call of this, from the same 15 000.
    """
    while True:
        port = random.SystemRandom().randrange(15_000, 30_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
