"""Check that this process still holds its device lease, without a request to any other process.

The sidecar of the pod, or the local executor, holds the lease for this process. At every renewal it writes the time
until which the lease is valid, by this machine's clock, into the file that ``TUNELOOP_LEASE`` names
(`tuneloop.sharing.leases` says why no other run can hold the lease before that time). So a process that was paused, or
whose sidecar lost the network, learns from its own clock that the lease has expired, before it commits anything."""

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

VARIABLE = "TUNELOOP_LEASE"
RELEASED = ".released"
"""Suffix of a file beside the grant's: it asks the sidecar, or the local executor, to release the lease."""
SOFT = 0.25
"""The last fraction of a renewal's validity: a stage that reaches it without another renewal is told to stop."""


class Grant(BaseModel, frozen=True):
    """A device lease, as its file describes it.

    Attributes:
        number: the fencing token, which is higher than that of every earlier lease of the group.
        ticket: names the attempt that holds it.
        renewed, until: when it was last renewed, and when that renewal expires, in seconds of `read_clock`.
        refused: why the lease will never be granted; else empty.
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
    """Read the lease grant of this process, if it needs one. Raises Retryable if unreadable, UserError if refused."""
    if not (path := os.environ.get(VARIABLE)):
        return None
    try:
        found = Grant.model_validate_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"lease: {path} cannot be read ({error}): who holds it has ended"
        ) from error
    if found.refused:
        raise UserError("lease", found.group, found.refused)
    return found


def check_lease() -> dict[str, object]:
    """Check that this process holds its device lease, or released it in time; return what the manifest records of it.
    Raises Retryable if the lease was lost: nothing may be committed then. Raises UserError as `read_lease_grant`."""
    if (held := read_lease_grant()) is None:
        return {}
    if (late := read_clock() - held.until) >= 0 and not is_lease_released():
        raise Unavailable(
            f"lease {held.number} of group {held.group} was lost {late:.1f} s ago; nothing is committed"
        )
    return {"group": held.group, "number": held.number, "ticket": held.ticket}


def release_lease() -> None:
    """Release the device lease of this process, so that others hold it while this commits. Raises as `check_lease`."""
    held = read_lease_grant()
    if held and check_lease() and not is_lease_released():
        mark = Path(os.environ[VARIABLE]).with_suffix(RELEASED)
        mark.touch()
        if read_clock() >= held.until:  # this process was paused in between
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
        threading.Thread(target=_watch, args=(over,), daemon=True, name="lease").start()
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
            _end(Unavailable(f"lease {held.number} of group {held.group} was lost"))
        if not told and left < SOFT * (held.until - held.renewed):
            told = True
            os.kill(os.getpid(), signal.SIGTERM)


def _end(error: Retryable | UserError) -> NoReturn:
    """End at once: another run may get the devices at any moment."""
    os._exit(report_error(error))
