"""Turns: one run of a group at a time uses the group's devices.

    turns = open_turns("lease://tuneloop/a100", who="run-a")        # or a directory of the store
    with turns.acquire() as held:
        ...                       # held.number: the fencing token; held.check() raises Retryable once the turn is lost

All that a group knows is one small document (`Document`), changed by compare-and-swap alone: a Lease or an object in
the store (`tuneloop.sharing.places`). There is no server. Who wants a turn queues up and, when the turn is free or its
holder silent, takes it: the number goes up by one.

Clocks of two machines are never compared (the rule of client-go's leader election). A holder is silent once an observer
has seen the same `beat` for `patience` seconds of its own clock. The holder counts from before it sent its last
accepted beat, and gives up after `SAFE` of `patience`: before anybody else can take the turn, unless the speeds of two
clocks differ by more than that leaves. Those who wait beat too, so that a dead one holds nobody up."""

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
from tuneloop.sharing.document import Document, Policy, Refused

SAFE = 2 / 3
"""Of `patience`: how long a beat is good for."""
BEATS = 6
"""Within `patience`."""
log = logging.getLogger("tuneloop.turns")


class Silence:
    """Finds the seats that are silent, by the clock of the observer."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, document: Document, now: float) -> set[str]:
        """List the tickets whose beat has stayed the same for `patience`; the document was read at `now` or before."""
        seats = [seat for seat in (document.holder, *document.waiting) if seat]
        before = self._seen
        self._seen = {
            seat.ticket: known
            if (known := before.get(seat.ticket, (-1, now)))[0] == seat.beat
            else (seat.beat, now)
            for seat in seats
        }
        return {
            ticket for ticket, (_, since) in self._seen.items() if now - since >= document.patience
        }


class Place(Protocol):
    """Where the document of one group is kept."""

    def read(self) -> tuple[Document, Any]:
        """Read the document, empty if there is none, and what `write` needs to know that nobody else wrote since."""

    def write(self, document: Document, seen: Any) -> None:
        """Replace what was `seen`. Raises Conflict where somebody else did, Retryable where the place is in trouble."""


class Turns:
    """A group's turns, for one run, with the group's `policy` and `patience`: seconds until a silent seat is lost."""

    def __init__(
        self, place: Place, group: str, *, who: str, policy: Policy = "fifo", patience: float = 30.0
    ) -> None:
        self.place, self.group, self.who, self.policy, self.patience = (
            place,
            group,
            who,
            policy,
            patience,
        )

    def read(self) -> Document:
        """Read the group's document as it is now."""
        return self.place.read()[0]

    def change(self, how: Callable[[Document], Document]) -> Document:
        """Apply `how` by compare-and-swap, as often as others come first; what it raises goes through."""
        while True:
            document, seen = self.place.read()
            if (changed := how(document)) == document:
                return document
            try:
                self.place.write(changed, seen)
                return changed
            except Conflict:
                time.sleep(random.uniform(0, 0.05))

    @contextlib.contextmanager
    def acquire(
        self,
        timeout: float | None = None,
        *,
        stop: threading.Event | None = None,
        file: Path | None = None,
    ) -> "Iterator[Held]":
        """Wait for a turn (at most `timeout` seconds, and until `stop`), hold it, and end it, whatever happens. `file`
        keeps the grant for the process that uses the devices; when that releases its lease (`tuneloop.core.fencing`),
        the turn ends. Raises Retryable where no turn came, UserError where the group has another policy or patience."""
        ticket = f"{self.who}.{os.urandom(6).hex()}"
        try:
            held = self.wait(ticket, timeout, stop or threading.Event())
            with held.renewing(file):
                yield held
        finally:
            self.quit(ticket)

    def wait(self, ticket: str, timeout: float | None, stop: threading.Event) -> "Held":
        """Queue up as `ticket` until its turn has come; the seat is the caller's to give back. Raises as `acquire`."""
        silence, started, beaten = Silence(), read_clock(), read_clock()
        document = self.change(lambda now: self.agreed(now).ask(ticket, self.who, time.time()))
        while True:
            with contextlib.suppress(
                Retryable
            ):  # an API server that is away: those who wait go on waiting
                before = read_clock()
                document = self.read()
                if (
                    document.holder and document.holder.ticket == ticket
                ):  # taken before; the answer was lost
                    return Held(self, ticket, document.number, before).beat()
                number = self._take(
                    ticket, document, silence.look(document, read_clock()) - {ticket}
                )
                if number is not None:
                    return Held(self, ticket, number, before)
                if document.seat(ticket) is None or before - beaten > self.patience / 3:
                    self.change(lambda now: now.ask(ticket, self.who, time.time()).beat(ticket))
                    beaten = before
            if timeout is not None and read_clock() - started > timeout:
                holder = document.holder.who if document.holder else "nobody"
                raise Unavailable(
                    f"turns: {self.group}: no turn within {timeout:g} s; {holder} has it"
                )
            if stop.wait(compute_poll_interval(self.patience)):
                raise Interrupted(f"turns: {self.group}: stopped while waiting")

    def _take(self, ticket: str, seen: Document, silent: set[str]) -> int | None:
        """Take the turn if it can be had, and return its number: most of the time there is nothing to write."""
        try:
            seen.take(ticket, silent)
            return self.change(
                lambda now: now.take(ticket, silent & _unmoved(seen, now), time.time())
            ).number
        except Refused:
            return None

    def resume(self, standing: Grant, stop: threading.Event) -> "Held":
        """Go on holding a turn whose holder started anew. A place in trouble is asked again while the turn is safe.
        Raises Retryable where it was lost, or `stop` was set."""
        held = Held(self, standing.ticket, standing.number, standing.renewed)
        while True:
            try:
                return held.beat()
            except Retryable:
                if held.lost.is_set() or stop.wait(compute_poll_interval(self.patience)):
                    raise

    def quit(self, ticket: str) -> None:
        """Give a seat back; where that fails, others find it silent."""
        try:
            self.change(lambda document: document.quit(ticket))
        except Retryable as error:
            log.warning(
                "turn of %s is not given back, others wait %g s: %s", self.who, self.patience, error
            )

    def leave(self) -> None:
        """Give back all seats of the run, for one that is known to have ended."""
        self.change(lambda document: document.leave(self.who))

    def agreed(self, document: Document) -> Document:
        """Give an idle document this run's policy and patience. Raises UserError where the group has others."""
        own = {"policy": self.policy, "patience": self.patience}
        if document.idle:
            return document.model_copy(update=own)
        for name, value in own.items():
            if (theirs := getattr(document, name)) != value:
                remedy = f"the runs of group {self.group} say {theirs!r}: say the same, or take another group"
                raise UserError(f"cluster.share.{name}", value, remedy)
        return document


def compute_poll_interval(patience: float) -> float:
    """Compute the seconds between two polls of a waiter."""
    return min(1.0, patience / 10)


def _unmoved(before: Document, now: Document) -> set[str]:
    """Return the tickets that have not beaten between two readings."""
    seats = [seat for seat in (before.holder, *before.waiting) if seat]
    return {
        seat.ticket for seat in seats if (then := now.seat(seat.ticket)) and then.beat == seat.beat
    }


class Held:
    """A turn that one has: `number` is its fencing token; `lost` is set once it may be somebody else's."""

    def __init__(self, turns: Turns, ticket: str, number: int, renewed: float) -> None:
        self.turns, self.ticket, self.number, self.renewed = turns, ticket, number, renewed
        self.lost = threading.Event()

    @property
    def grant(self) -> Grant:
        """What `tuneloop.core.fencing` needs to know."""
        until = -1.0 if self.lost.is_set() else self.renewed + SAFE * self.turns.patience
        group = self.turns.group
        return Grant(
            group=group, number=self.number, ticket=self.ticket, renewed=self.renewed, until=until
        )

    def check(self) -> None:
        """Make sure of the turn, by this machine's clock alone. Raises Retryable where it was lost."""
        if self.lost.is_set() or read_clock() >= self.grant.until:
            self.lost.set()
            raise Unavailable(f"turn {self.number} of group {self.turns.group} was lost")

    def beat(self) -> "Held":
        """Renew the turn, once. Raises Retryable where it was lost, or the place is in trouble."""
        self.check()
        before = read_clock()

        def mine(document: Document) -> Document:
            if document.holder is None or (document.holder.ticket, document.number) != (
                self.ticket,
                self.number,
            ):
                raise Refused(f"turn {self.number} is over: now is {document.number}")
            return document.beat(self.ticket)

        try:
            self.turns.change(mine)
        except Refused as error:
            self.lost.set()
            raise Unavailable(f"turns: {self.turns.group}: {error}") from error
        self.renewed = before
        return self

    @contextlib.contextmanager
    def renewing(self, file: Path | None = None) -> Iterator[None]:
        """Renew on another thread until the end, or until the turn is lost or released; `file` as in `acquire`."""

        def tell() -> None:
            if file:
                write_lease_grant(file, self.grant)

        def renew() -> None:
            if self.lost.is_set():
                return
            try:
                self.beat()
            except (
                Exception
            ) as error:  # in trouble: again in a moment, until the clock says that it is too late
                log.warning("%s", error)
            tell()

        def look() -> None:
            if file and is_lease_released(file) and not self.lost.is_set():
                self.lost.set()
                self.turns.quit(self.ticket)

        tell()
        with (
            repeat_in_background(renew, self.turns.patience / BEATS),
            repeat_in_background(look, 0.2),
        ):
            yield
