"""Proof that this process may still use what it took a turn for, checked without asking anybody.

The sidecar of the pod, or the local executor, holds the turn for this process. With every renewal it writes into the
file that ``TUNELOOP_TURN`` names until when the turn is safe, by the clock of this machine (`tuneloop.sharing.turns`
says why nobody else can have the turn before). So a process that was stopped, or whose holder lost the network, finds
out by its own clock that it is late, before it commits anything."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from pydantic import BaseModel

from tuneloop.core.errors import Retryable, Unavailable, UserError, report_error

VARIABLE = "TUNELOOP_TURN"
RELEASED = ".released"
"""Suffix of the file, beside the grant's, that tells who holds the lease to give it back."""
SOFT = 0.25
"""Of what a renewal is good for, the last part: a stage that gets so far is told to stop."""


class Grant(BaseModel, frozen=True):
    """A turn as its file says.

    Attributes:
        number: the fencing token: above that of every turn that the group had before.
        ticket: names the attempt that holds it.
        renewed, until: when it was last confirmed, and how long that is good for, in seconds of `read_clock`.
        refused: why there will be no turn.
    """

    group: str
    number: int
    ticket: str
    renewed: float
    until: float
    refused: str = ""


def read_clock() -> float:
    """Return seconds of a clock of this machine that never jumps and runs on while the machine sleeps."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def read_lease_grant() -> Grant | None:
    """Read the lease grant of this process, if it needs one. Raises Retryable: it is unreadable; UserError: refused."""
    if not (path := os.environ.get(VARIABLE)):
        return None
    try:
        found = Grant.model_validate_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise Unavailable(f"turn: {path} cannot be read ({error}): who holds it has ended") from error
    if found.refused:
        raise UserError("turn", found.group, found.refused)
    return found


def check_lease() -> dict[str, object]:
    """Check that this process holds its device lease, or released it in time; return what the manifest records of it.
    Raises Retryable: the turn was lost; nothing may be committed; UserError: as `read_lease_grant`."""
    if (held := read_lease_grant()) is None:
        return {}
    if (late := read_clock() - held.until) >= 0 and not is_lease_released():
        raise Unavailable(f"turn {held.number} of group {held.group} was lost {late:.1f} s ago; nothing is committed")
    return {"group": held.group, "number": held.number, "ticket": held.ticket}


def release_lease() -> None:
    """Release the device lease of this process: others have the turn while it commits. Raises as `check_lease`."""
    held = read_lease_grant()
    if held and check_lease() and not is_lease_released():
        mark = Path(os.environ[VARIABLE]).with_suffix(RELEASED)
        mark.touch()
        if read_clock() >= held.until:  # this process stood still in between
            mark.unlink()
            check_lease()


def is_lease_released(grant: Path | None = None) -> bool:
    """Return whether the lease with this file of its grant, by default that of this process, was released."""
    return (grant or Path(os.environ[VARIABLE])).with_suffix(RELEASED).exists()


def write_lease_grant(path: Path, held: Grant) -> None:
    """Write a lease grant to `path` atomically."""
    staged = path.with_name(f".{path.name}")
    staged.write_text(held.model_dump_json())
    os.replace(staged, path)


@contextmanager
def watch_lease() -> Iterator[None]:
    """End this process with exit code 75 when its device lease is lost, after a SIGTERM shortly before."""
    over = threading.Event()
    if os.environ.get(VARIABLE):
        threading.Thread(target=_watch, args=(over,), daemon=True, name="turn").start()
    try:
        yield
    finally:
        over.set()


def _watch(over: threading.Event) -> None:
    told = False
    while not over.wait(0.2):
        try:
            held = read_lease_grant()
        except (Retryable, UserError) as error:
            _end(error)
        assert held is not None  # or this thread would not run
        if is_lease_released():  # asked after the grant was read, which nobody renews from then on
            return
        left = held.until - read_clock()
        if left <= 0:
            _end(Unavailable(f"turn {held.number} of group {held.group} was lost"))
        if not told and left < SOFT * (held.until - held.renewed):
            told = True
            os.kill(os.getpid(), signal.SIGTERM)


def _end(error: Retryable | UserError) -> NoReturn:
    """End at once: the device may be somebody else's in a moment."""
    os._exit(report_error(error))
