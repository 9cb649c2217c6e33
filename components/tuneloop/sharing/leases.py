"""Device leases: one run of a group at a time uses the group's devices.

    group = open_lease_group("lease://tuneloop/a100", who="run-a")   # or a directory of the store
    with group.acquire() as lease:
        ...     # lease.number: the fencing token; lease.check() raises Retryable once it is lost

All that is known of a group is one small document, its `LeaseQueue`, which is changed by
compare-and-swap alone. It is kept in a Lease or in the store (`tuneloop.sharing.lease_storage`).
There is no server. A run that wants the lease queues up. When the lease is free, or its holder
silent, the run takes it, and the number goes up by one.

Clocks of two machines are never compared (the rule of client-go's leader election). A holder is
silent once an observer has seen the same `beat` for `patience` seconds of its own clock. The holder
counts from before it sent its last accepted beat, and gives up after `SAFE` of `patience`. That is
before any other run can take the lease, unless the speeds of two clocks differ by more than the
remaining time. Those who wait beat too, so that a dead one holds nobody up.

The sidecar of a pod (`sharing/sidecar.py`), the local executor (`extensions/sharing/pod.py`) and
the gateway's workers (`extensions/gateway/worker.py`) acquire leases; the stage itself only checks
the grant (`core/fencing.py`). The tests are `tests/unit/sharing/test_turns.py`,
`tests/extensions/sharing/test_turn.py` and `tests/local/test_turns.py`.
"""

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from tuneloop.core.errors import Interrupted, Retryable, Unavailable, UserError
from tuneloop.core.fencing import Grant, is_lease_released, read_clock, write_lease_grant
from tuneloop.core.store import Conflict
from tuneloop.core.threads import repeat_in_background
from tuneloop.sharing.lease_queue import LeaseQueue, LeaseRefused, Policy

SAFE = 2 / 3
"""The share of `patience` for which a beat is valid to its holder. The rest is the margin for
clocks of different speed: at 1 or more two runs could hold the lease.
"""
BEATS = 6
"""The number of beats within `patience`: with `SAFE` four within the time that one is valid, which
`core/fencing.py: STOP_FRACTION` counts on.
"""
_RELEASE_POLL_S = 0.2
"""Seconds between two looks for a stage's request to release (`core/fencing.py: RELEASED`)."""
log = logging.getLogger("tuneloop.leases")


class SilenceDetector:
    """Finds the requests that are silent, by the clock of the observer."""

    def __init__(self) -> None:
        # Ticket → its last beat, and when this observer first read that.
        self._beats: dict[str, tuple[int, float]] = {}

    def find_silent(self, queue: LeaseQueue, read_at: float) -> set[str]:
        """Return the tickets whose beat has stayed the same for `patience`.

        The queue was read at `read_at` (seconds of `read_clock`) or before.
        """
        previous = self._beats
        self._beats = {}
        silent: set[str] = set()
        for request in queue.requests:
            beat, first_read_at = previous.get(request.ticket, (request.beat, read_at))
            if beat != request.beat:
                first_read_at = read_at
            self._beats[request.ticket] = (request.beat, first_read_at)
            if read_at - first_read_at >= queue.patience:
                silent.add(request.ticket)
        return silent


class QueueStorage(Protocol):
    """Where the queue of one group is kept."""

    def read(self) -> tuple[LeaseQueue, Any]:
        """Read the queue, empty if there is none, and what `write` compares with.

        Raises:
            Retryable: the storage is unavailable.
        """

    def write(self, queue: LeaseQueue, previous: Any) -> None:
        """Replace the queue that was read with `previous`.

        Raises:
            Conflict: another process wrote since.
            Retryable: the storage is unavailable.
        """


class LeaseGroup:
    """A group whose runs share devices, as one run uses it.

    Attributes:
        storage: where the group's queue is.
        group: its name.
        who: the run.
        policy: which waiter is served next.
        patience: the seconds after which a silent request is lost.

    A further setting that all runs of a group share is compared in `apply_settings`, stored in
    `LeaseQueue`, and a flag of `sharing/sidecar.py`.
    """

    def __init__(
        self,
        storage: QueueStorage,
        group: str,
        *,
        who: str,
        policy: Policy = "fifo",
        patience: float = 30.0,
    ) -> None:
        self.storage = storage
        self.group = group
        self.who = who
        self.policy = policy
        self.patience = patience

    def read(self) -> LeaseQueue:
        """Read the group's queue as it is now. Raises as `QueueStorage.read`."""
        queue, _ = self.storage.read()
        return queue

    def update(self, change: Callable[[LeaseQueue], LeaseQueue]) -> LeaseQueue:
        """Apply `change` by compare-and-swap, as often as other processes come first.

        Raises:
            Retryable: the storage is unavailable.
            Exception: whatever `change` raises.
        """
        while True:
            queue, previous = self.storage.read()
            changed = change(queue)
            if changed == queue:
                return queue
            try:
                self.storage.write(changed, previous)
                return changed
            except Conflict:
                # A random pause, so that two processes do not meet again and again.
                time.sleep(random.uniform(0, 0.05))

    @contextlib.contextmanager
    def acquire(
        self,
        timeout: float | None = None,
        *,
        stop: threading.Event | None = None,
        file: Path | None = None,
    ) -> "Iterator[HeldLease]":
        """Wait for the lease, hold it while the block runs, and release it, whatever happens.

        Args:
            timeout: the seconds to wait at most; None: without a limit.
            stop: ends the wait when it is set.
            file: keeps the grant for the process that uses the devices. When that process releases
                its lease (`tuneloop.core.fencing`), the lease ends.

        Raises:
            Retryable: the lease was not granted.
            UserError: the group has another policy or patience.
        """
        ticket = f"{self.who}.{os.urandom(6).hex()}"
        try:
            lease = self.wait_for_grant(ticket, timeout, stop or threading.Event())
            with lease.renewing(file):
                yield lease
        finally:
            self.release(ticket)

    def wait_for_grant(
        self,
        ticket: str,
        timeout: float | None,
        stop: threading.Event,
    ) -> "HeldLease":
        """Queue up as `ticket` until the lease is granted.

        The caller has to release `ticket`, also after an error. Raises as `acquire`.
        """
        detector = SilenceDetector()
        started = read_clock()
        renewed_at = started
        queue = self.update(lambda queue: self._enqueue(self.apply_settings(queue), ticket))
        while True:
            # While the API server is away, those who wait go on waiting.
            with contextlib.suppress(Retryable):
                read_at = read_clock()
                queue = self.read()
                if queue.holder and queue.holder.ticket == ticket:
                    # It was granted before, and the answer was lost.
                    return HeldLease(self, ticket, queue.number, read_at).renew()
                silent = detector.find_silent(queue, read_clock()) - {ticket}
                number = self._try_grant(ticket, queue, silent)
                if number is not None:
                    return HeldLease(self, ticket, number, read_at)
                is_forgotten = queue.find_request(ticket) is None
                if is_forgotten or read_at - renewed_at > self.patience / 3:
                    self.update(lambda queue: self._enqueue(queue, ticket).renew(ticket))
                    renewed_at = read_at
            if timeout is not None and read_clock() - started > timeout:
                holder = queue.holder.who if queue.holder else "nobody"
                raise Unavailable(
                    f"lease: {self.group}: not granted within {timeout:g} s; {holder} holds it"
                )
            if stop.wait(compute_poll_interval(self.patience)):
                raise Interrupted(f"lease: {self.group}: stopped while waiting")

    def _enqueue(self, queue: LeaseQueue, ticket: str) -> LeaseQueue:
        """Return the queue in which `ticket` waits, if it was not in it."""
        return queue.add_waiter(ticket, self.who, time.time())

    def _try_grant(self, ticket: str, queue: LeaseQueue, silent: set[str]) -> int | None:
        """Take the lease if it can be granted, and return its number."""

        def grant(current: LeaseQueue) -> LeaseQueue:
            # A request that has beaten since it was found silent is alive.
            still_silent = silent & _find_unchanged(queue, current)
            return current.grant(ticket, still_silent, time.time())

        try:
            # By the queue that was read: most of the time there is nothing to write.
            queue.grant(ticket, silent)
            return self.update(grant).number
        except LeaseRefused:
            return None

    def resume(self, grant: Grant, stop: threading.Event) -> "HeldLease":
        """Go on holding a lease whose holder started anew.

        A storage that is unavailable is asked again while the lease is valid.

        Raises:
            Retryable: the lease was lost, or `stop` was set.
        """
        lease = HeldLease(
            self,
            grant.ticket,
            grant.number,
            grant.renewed,
        )
        while True:
            try:
                return lease.renew()
            except Retryable:
                if lease.lost.is_set() or stop.wait(compute_poll_interval(self.patience)):
                    raise

    def release(self, ticket: str) -> None:
        """Release the lease or the request `ticket`; if that fails, others find it silent."""
        try:
            self.update(lambda queue: queue.release(ticket))
        except Retryable as error:
            log.warning(
                "the lease of %s is not released, others wait %g s: %s",
                self.who,
                self.patience,
                error,
            )

    def release_all(self) -> None:
        """Release everything that the run holds or waits for, once it is known to have ended."""
        self.update(lambda queue: queue.release_run(self.who))

    def apply_settings(self, queue: LeaseQueue) -> LeaseQueue:
        """Give an idle queue this run's policy and patience.

        `extensions/sharing/preflight.py` calls it before a run is submitted.

        Raises:
            UserError: runs in the queue have others.
        """
        settings = {"policy": self.policy, "patience": self.patience}
        # The first run in an idle group decides.
        if queue.is_idle:
            return queue.model_copy(update=settings)
        group_settings = {"policy": queue.policy, "patience": queue.patience}
        for name, value in settings.items():
            group_value = group_settings[name]
            if group_value != value:
                raise UserError(
                    f"cluster.share.{name}",
                    value,
                    f"the runs of group {self.group} say {group_value!r}: say the same, or take"
                    " another group",
                )
        return queue


def compute_poll_interval(patience: float) -> float:
    """Compute the seconds between two polls of a waiter.

    They have to be far below `patience`: a waiter that polls more rarely beats too late.
    """
    return min(1.0, patience / 10)


def _find_unchanged(previous: LeaseQueue, current: LeaseQueue) -> set[str]:
    """Return the tickets that have not beaten between two readings."""
    unchanged: set[str] = set()
    for request in previous.requests:
        current_request = current.find_request(request.ticket)
        if current_request and current_request.beat == request.beat:
            unchanged.add(request.ticket)
    return unchanged


class HeldLease:
    """A lease that this process holds.

    Attributes:
        group: the group whose lease it is.
        ticket: the request that it was granted to.
        number: its fencing token.
        renewed: when it was last renewed, in seconds of `read_clock`.
        lost: set once another run may hold it.
    """

    def __init__(self, group: LeaseGroup, ticket: str, number: int, renewed: float) -> None:
        self.group = group
        self.ticket = ticket
        self.number = number
        self.renewed = renewed
        self.lost = threading.Event()

    @property
    def grant(self) -> Grant:
        """The grant that `core/fencing.py` checks in the stage's process."""
        until = self.renewed + SAFE * self.group.patience
        return Grant(
            group=self.group.group,
            number=self.number,
            ticket=self.ticket,
            renewed=self.renewed,
            until=-1.0 if self.lost.is_set() else until,
        )

    def check(self) -> None:
        """Check the lease by this machine's clock alone. Raises Retryable if it was lost."""
        if self.lost.is_set() or read_clock() >= self.grant.until:
            self.lost.set()
            raise Unavailable(f"lease {self.number} of group {self.group.group} was lost")

    def renew(self) -> "HeldLease":
        """Renew the lease, once.

        Raises:
            Retryable: it was lost, or the storage is unavailable.
        """
        self.check()
        # From before the request: others count from after it was written.
        sent_at = read_clock()
        try:
            self.group.update(self._renew_request)
        except LeaseRefused as error:
            self.lost.set()
            raise Unavailable(f"lease: {self.group.group}: {error}") from error
        self.renewed = sent_at
        return self

    def _renew_request(self, queue: LeaseQueue) -> LeaseQueue:
        """Return the queue with another beat of this lease. Raises LeaseRefused: it has ended."""
        # A ticket alone is not enough: it may have been granted the lease a second time.
        is_holder = queue.holder is not None and queue.holder.ticket == self.ticket
        if not is_holder or queue.number != self.number:
            raise LeaseRefused(f"lease {self.number} is over: the newest is {queue.number}")
        return queue.renew(self.ticket)

    @contextlib.contextmanager
    def renewing(self, file: Path | None = None) -> Iterator[None]:
        """Renew the lease on another thread while the block runs, unless it is lost or released.

        `file` is as in `LeaseGroup.acquire`.
        """

        def write_grant() -> None:
            if file:
                write_lease_grant(file, self.grant)

        def renew() -> None:
            if self.lost.is_set():
                return
            try:
                self.renew()
            except Exception as error:
                # It is tried again in a moment, until the clock says that it is too late.
                log.warning("%s", error)
            write_grant()

        def end_if_released() -> None:
            if file and is_lease_released(file) and not self.lost.is_set():
                self.lost.set()
                self.group.release(self.ticket)

        write_grant()
        with (
            repeat_in_background(renew, self.group.patience / BEATS),
            repeat_in_background(end_if_released, _RELEASE_POLL_S),
        ):
            yield
