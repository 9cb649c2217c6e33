"""Check that this process still holds its device lease, without a request to any other process.

The sidecar of the pod, or the local executor, holds the lease for this process. At every renewal it
writes the time until which the lease is valid, by this machine's clock, into the file that
``TUNELOOP_LEASE`` names. `tuneloop.sharing.leases` says why no other run can hold the lease before
that time. So a process that was paused, or whose sidecar lost the network, learns from its own
clock that the lease has expired, before it commits anything.

The same check stands before every commit (`Draft.commit`, `collect_provenance`), and before the
pointer of weights moves (`weights/pointer.py`). Only pods of runs that share devices have the
variable, from `extensions/sharing/lease_sidecar.py`, and workers of the gateway; without it
everything here does nothing.
"""

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
"""Environment variable that names the file with the `Grant` of this process."""
RELEASED = ".released"
"""Suffix of a file beside the grant's: it asks the sidecar, or the local executor, to release the
lease."""
STOP_FRACTION = 0.25
"""The last fraction of a renewal's validity: a stage that reaches it without another renewal is
asked to stop. A renewal comes four times within its validity (`sharing/leases.py: BEATS`), so one
or two of them may be lost. A fraction above a half would stop a stage for a single one."""
POLL_S = 0.2
"""Seconds between two looks at the file of the lease. It is small, and on this node."""


class Grant(BaseModel, frozen=True):
    """A device lease, as its file describes it. Those who hold leases write it:
    `sharing/leases.py`, and `sharing/sidecar.py` of one that was refused or released.

    Attributes:
        number: the fencing token, which is higher than that of every earlier lease of the group.
        ticket: names the attempt that holds it.
        renewed, until: when it was last renewed, and when that renewal expires, in seconds of
            `read_clock`.
        refused: why the lease will never be granted; else empty.
    """

    group: str
    number: int
    ticket: str
    renewed: float
    until: float
    refused: str = ""


def read_clock() -> float:
    """Return seconds of a clock of this machine that never jumps and runs on while the machine
    sleeps.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def read_lease_grant() -> Grant | None:
    """Read the lease grant of this process; None if it needs none.

    Raises:
        Unavailable: the file cannot be read.
        UserError: the lease was refused.
    """
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    try:
        grant = Grant.model_validate_json(Path(path).read_bytes())
    except (OSError, ValueError) as error:
        raise Unavailable(
            f"lease: {path} cannot be read ({error}): who holds it has ended"
        ) from error
    if grant.refused:
        raise UserError("lease", grant.group, grant.refused)
    return grant


def check_lease() -> dict[str, object]:
    """Check that this process holds its device lease, or released it in time.

    Returns:
        What the manifest records of the lease; nothing if this process needs none.

    Raises:
        Unavailable: the lease was lost, or is unreadable; nothing may be committed then.
        UserError: the lease was refused.
    """
    grant = read_lease_grant()
    if grant is None:
        return {}
    overdue_s = read_clock() - grant.until
    if overdue_s >= 0 and not is_lease_released():
        lease = f"lease {grant.number} of group {grant.group}"
        raise Unavailable(f"{lease} was lost {overdue_s:.1f} s ago; nothing is committed")
    return {"group": grant.group, "number": grant.number, "ticket": grant.ticket}


def release_lease() -> None:
    """Release the device lease of this process, so that others hold it while this one commits.

    Raises as `check_lease`.
    """
    grant = read_lease_grant()
    if grant and check_lease() and not is_lease_released():
        request = Path(os.environ[VARIABLE]).with_suffix(RELEASED)
        request.touch()
        # This process may have been paused between the check and the request.
        if read_clock() >= grant.until:
            request.unlink()
            check_lease()


def is_lease_released(grant: Path | None = None) -> bool:
    """Return whether the lease with this file of its grant, by default that of this process, was
    released.
    """
    return (grant or Path(os.environ[VARIABLE])).with_suffix(RELEASED).exists()


def write_lease_grant(path: Path, grant: Grant) -> None:
    """Write a lease grant to `path` atomically."""
    staged = path.with_name(f".{path.name}")
    staged.write_text(grant.model_dump_json())
    os.replace(staged, path)


@contextmanager
def watch_lease() -> Iterator[None]:
    """End this process with exit code 75 when its device lease is lost, after a SIGTERM shortly
    before.
    """
    finished = threading.Event()
    if os.environ.get(VARIABLE):
        threading.Thread(target=_watch, args=(finished,), daemon=True, name="lease").start()
    try:
        yield
    finally:
        finished.set()


def _watch(finished: threading.Event) -> None:
    """Look at the lease on a thread until the stage has `finished`: ask it to stop in time, and end this
    process once the lease is over or lost.
    """
    is_stopping = False
    while not finished.wait(POLL_S):
        try:
            grant = read_lease_grant()
        except (Retryable, UserError) as error:
            _end(error)
        # Without a lease this thread would not run.
        assert grant is not None
        # Nobody renews a released lease, so this is asked after the grant was read.
        if is_lease_released():
            return
        remaining_s = grant.until - read_clock()
        if remaining_s <= 0:
            _end(Unavailable(f"lease {grant.number} of group {grant.group} was lost"))
        if not is_stopping and remaining_s < STOP_FRACTION * (grant.until - grant.renewed):
            is_stopping = True
            os.kill(os.getpid(), signal.SIGTERM)


def _end(error: Retryable | UserError) -> NoReturn:
    """End at once: another run may get the devices at any moment."""
    os._exit(report_error(error))
