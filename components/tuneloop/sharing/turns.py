"""Turns: one run of a group at a time uses the group's devices.

    turns = open_turns("lease://tuneloop/a100", who="run-a")        # or a directory of the store
    with turns.acquire() as held:
        ...                       # held.number: the fencing token; held.check() raises Retryable once the turn is lost

All that a group knows is one small document (`Document`), changed by compare-and-swap alone: a Lease of the Kubernetes
API (`tuneloop.sharing.lease`) or an object in the store (`tuneloop.sharing.file`). Who wants a turn queues up and, when
the turn is free or its holder silent, takes it: the number goes up by one. There is no server.

Clocks of two machines are never compared (the rule of client-go's leader election). A holder is silent once an
observer has seen the same `beat` for `patience` seconds of its own clock. The holder itself counts from before it sent
its last beat that was accepted, and gives up after `SAFE` of `patience`: before anybody else can take the turn, as long
as two clocks differ in speed by less than that leaves. Those who wait beat too, so that a dead one holds nobody up.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field

from tuneloop.core.errors import Interrupted, Retryable, Unavailable, UserError
from tuneloop.core.fencing import Grant, clock
from tuneloop.core.store import Conflict

Policy = Literal["fifo", "lrs"]
POLICIES: tuple[Policy, ...] = ("fifo", "lrs")
SAFE = 2 / 3
"""Of `patience`: how long a beat is good for."""
BEATS = 6
"""Within `patience`."""
KNOWN = 100
"""Runs whose last turn is remembered."""

log = logging.getLogger("tuneloop.turns")


class Refused(RuntimeError):
    """What was asked of the document is not to be had: the turn is another's, or was lost."""


class Seat(BaseModel):
    """One attempt to have a turn, from its asking to its end.

    Attributes:
        ticket: names the attempt; never used again.
        who: the run.
        since: when it asked, or was served; Unix seconds, for people alone.
        beat: goes up as long as it lives.
    """

    model_config = ConfigDict(frozen=True)
    ticket: str
    who: str
    since: float = 0.0
    beat: int = 0


class Document(BaseModel):
    """What a group knows; every function below gives a new one.

    Attributes:
        number: of the turn that was taken last; the holder's fencing token, which never goes back.
        holder: whose turn it is.
        waiting: in the order of asking.
        served: run → number of its last turn; of one that had none yet, the number when it first asked.
        policy, patience: of the group; the first to come sets them.
    """

    model_config = ConfigDict(frozen=True)
    number: int = 0
    holder: Seat | None = None
    waiting: tuple[Seat, ...] = ()
    served: dict[str, int] = Field(default_factory=dict)
    policy: Policy = "fifo"
    patience: float = 30.0

    @property
    def idle(self) -> bool:
        """Whether nobody has a turn, and nobody wants one."""
        return self.holder is None and not self.waiting

    def order(self) -> tuple[Seat, ...]:
        """Those who wait, in the order in which they will be served.

        fifo: who asked first. lrs: whose run had its last turn least recently; a run that is new counts as served when
        it asked, so that newcomers pass nobody. Each passes another at most once, so nobody starves.
        """
        if self.policy == "fifo":
            return self.waiting
        return tuple(sorted(self.waiting, key=lambda seat: self.served.get(seat.who, self.number)))

    def seat(self, ticket: str) -> Seat | None:
        """Where `ticket` sits: as holder, or among those who wait."""
        seats = (self.holder, *self.waiting)
        return next((seat for seat in seats if seat is not None and seat.ticket == ticket), None)

    def ask(self, ticket: str, who: str, since: float = 0.0) -> Document:
        """Queue up; nothing changes for one that sits already."""
        if self.seat(ticket):
            return self
        served = {who: self.number, **self.served}
        return self._but(waiting=(*self.waiting, Seat(ticket=ticket, who=who, since=since)), served=served)

    def beat(self, ticket: str) -> Document:
        """Show that one lives.

        Raises:
            Refused: it has no seat (any more).
        """
        if self.seat(ticket) is None:
            raise Refused(f"{ticket} has lost its place")
        return self._but(
            holder=_beaten(self.holder, ticket) if self.holder else None,
            waiting=tuple(_beaten(seat, ticket) for seat in self.waiting),
        )

    def take(self, ticket: str, silent: Collection[str] = (), since: float = 0.0) -> Document:
        """Begin a turn. Tickets that are `silent` lose their seats.

        Raises:
            Refused: somebody lives who has the turn, or is to be served before.
        """
        seat = next((seat for seat in self.waiting if seat.ticket == ticket), None)
        if seat is None:
            raise Refused(f"{ticket} does not wait")
        if self.holder is not None and self.holder.ticket not in silent:
            raise Refused(f"it is the turn of {self.holder.who}")
        first = next(each for each in self.order() if each == seat or each.ticket not in silent)
        if first != seat:
            raise Refused(f"{first.who} is to be served before")
        number = self.number + 1
        waiting = tuple(each for each in self.waiting if each != seat and each.ticket not in silent)
        served = dict(sorted({**self.served, seat.who: number}.items(), key=lambda item: item[1])[-KNOWN:])
        holder = seat.model_copy(update={"since": since, "beat": seat.beat + 1})
        return self._but(number=number, holder=holder, waiting=waiting, served=served)

    def quit(self, ticket: str) -> Document:
        """End a turn, or wait no longer; nothing changes for one that has no seat."""
        kept = self.holder if self.holder and self.holder.ticket != ticket else None
        return self._but(holder=kept, waiting=tuple(seat for seat in self.waiting if seat.ticket != ticket))

    def leave(self, who: str) -> Document:
        """Take from a run all that it holds and waits for."""
        kept = self.holder if self.holder and self.holder.who != who else None
        return self._but(holder=kept, waiting=tuple(seat for seat in self.waiting if seat.who != who))

    def _but(self, **changed: Any) -> Document:
        return self.model_copy(update=changed)


def _beaten(seat: Seat, ticket: str) -> Seat:
    return seat.model_copy(update={"beat": seat.beat + 1}) if seat.ticket == ticket else seat


class Silence:
    """Who is silent, by the clock of who looks."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def look(self, document: Document, now: float) -> set[str]:
        """The tickets whose beat has stayed the same for `patience`; `now` is when the document was read, or later."""
        seats = [seat for seat in (document.holder, *document.waiting) if seat]
        before = self._seen
        self._seen = {
            seat.ticket: known if (known := before.get(seat.ticket, (-1, now)))[0] == seat.beat else (seat.beat, now)
            for seat in seats
        }
        return {ticket for ticket, (_, since) in self._seen.items() if now - since >= document.patience}


class Place(Protocol):
    """Where the document of one group is kept."""

    def read(self) -> tuple[Document, Any]:
        """The document, an empty one if there is none, and what `write` needs to know that nobody else wrote since."""

    def write(self, document: Document, seen: Any) -> None:
        """Replace what was `seen`.

        Raises:
            Conflict: somebody else did.
            Retryable: the place is in trouble.
        """


class Turns:
    """The turns of a group, for one run.

    Args:
        place: where its document is.
        group: its name, for people.
        who: the run.
        policy, patience: who is served next, and the seconds after which a silent one has lost its seat; the same for
            all of a group.
    """

    def __init__(self, place: Place, group: str, *, who: str, policy: Policy = "fifo", patience: float = 30.0) -> None:
        self.place, self.group, self.who, self.policy, self.patience = place, group, who, policy, patience

    def read(self) -> Document:
        """The group's document as it is now."""
        return self.place.read()[0]

    def change(self, how: Callable[[Document], Document]) -> Document:
        """Apply `how` by compare-and-swap, as often as others come first; what it raises goes through."""
        while True:
            document, seen = self.place.read()
            changed = how(document)
            if changed == document:
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
        told: Callable[[Grant], None] | None = None,
    ) -> Iterator[Held]:
        """Wait for a turn, hold it, and end it, whatever happens.

        Args:
            timeout: seconds to wait at most.
            stop: set it to wait no longer.
            told: called with what is known of the turn when it begins, and at each renewal.

        Raises:
            Retryable: it did not come in time, or `stop` was set.
            UserError: the group has another policy or patience.
        """
        ticket = f"{self.who}.{os.urandom(6).hex()}"
        try:
            held = self.wait(ticket, timeout, stop or threading.Event())
            with held.renewing(told):
                yield held
        finally:
            self.quit(ticket)

    def wait(self, ticket: str, timeout: float | None, stop: threading.Event) -> Held:
        """Queue up as `ticket` until its turn has come; the seat is the caller's to give back. Raises as `acquire`."""
        silence, started, beaten = Silence(), clock(), clock()
        document = self.change(lambda now: self.agreed(now).ask(ticket, self.who, time.time()))
        while True:
            with contextlib.suppress(Retryable):  # an API server that is away: those who wait go on waiting
                before = clock()
                document = self.read()
                if document.holder and document.holder.ticket == ticket:  # taken before; the answer was lost
                    return Held(self, ticket, document.number, before).beat()
                number = self._take(ticket, document, silence.look(document, clock()) - {ticket})
                if number is not None:
                    return Held(self, ticket, number, before)
                if document.seat(ticket) is None or before - beaten > self.patience / 3:
                    self.change(lambda now: now.ask(ticket, self.who, time.time()).beat(ticket))
                    beaten = before
            if timeout is not None and clock() - started > timeout:
                holder = document.holder.who if document.holder else "nobody"
                raise Unavailable(f"turns: {self.group}: no turn within {timeout:g} s; {holder} has it")
            if stop.wait(pause(self.patience)):
                raise Interrupted(f"turns: {self.group}: stopped while waiting")

    def _take(self, ticket: str, seen: Document, silent: set[str]) -> int | None:
        """The number of the turn, if it can be had: most of the time there is nothing to write."""
        try:
            seen.take(ticket, silent)
            return self.change(lambda now: now.take(ticket, silent & _unmoved(seen, now), time.time())).number
        except Refused:
            return None

    def resume(self, standing: Grant, stop: threading.Event) -> Held:
        """Go on holding a turn whose holder started anew. A place in trouble is asked again while the turn is safe.

        Raises:
            Retryable: it was lost, or `stop` was set.
        """
        held = Held(self, standing.ticket, standing.number, standing.renewed)
        while True:
            try:
                return held.beat()
            except Retryable:
                if held.lost.is_set() or stop.wait(pause(self.patience)):
                    raise

    def quit(self, ticket: str) -> None:
        """Give a seat back; where that fails, others find it silent."""
        try:
            self.change(lambda document: document.quit(ticket))
        except Retryable as error:
            log.warning("turn of %s is not given back, others wait %g s: %s", self.who, self.patience, error)

    def leave(self) -> None:
        """Give back all seats of the run, for one that is known to have ended."""
        self.change(lambda document: document.leave(self.who))

    def agreed(self, document: Document) -> Document:
        """The document of a group whose policy and patience are this run's: an idle one takes them.

        Raises:
            UserError: the group has others.
        """
        own = {"policy": self.policy, "patience": self.patience}
        if document.idle:
            return document.model_copy(update=own)
        for name, value in own.items():
            if (theirs := getattr(document, name)) != value:
                remedy = f"the runs of group {self.group} say {theirs!r}: say the same, or take another group"
                raise UserError(f"cluster.share.{name}", value, remedy)
        return document


def pause(patience: float) -> float:
    """Seconds between two looks of one who waits."""
    return min(1.0, patience / 10)


def _unmoved(before: Document, now: Document) -> set[str]:
    """The tickets that have not beaten between two readings."""
    seats = [seat for seat in (before.holder, *before.waiting) if seat]
    return {seat.ticket for seat in seats if (then := now.seat(seat.ticket)) and then.beat == seat.beat}


class Held:
    """A turn that one has.

    Attributes:
        number: the fencing token.
        ticket: names the attempt.
        lost: set once the turn may be somebody else's.
    """

    def __init__(self, turns: Turns, ticket: str, number: int, renewed: float) -> None:
        self.turns, self.ticket, self.number, self.renewed = turns, ticket, number, renewed
        self.lost = threading.Event()

    @property
    def grant(self) -> Grant:
        """What `tuneloop.core.fencing` needs to know."""
        until = -1.0 if self.lost.is_set() else self.renewed + SAFE * self.turns.patience
        about = {"group": self.turns.group, "number": self.number, "ticket": self.ticket}
        return Grant(renewed=self.renewed, until=until, **about)

    def check(self) -> None:
        """Make sure of the turn, by this machine's clock alone.

        Raises:
            Retryable: it was lost.
        """
        if self.lost.is_set() or clock() >= self.grant.until:
            self.lost.set()
            raise Unavailable(f"turn {self.number} of group {self.turns.group} was lost")

    def beat(self) -> Held:
        """Renew the turn, once.

        Raises:
            Retryable: it was lost, or the place is in trouble.
        """
        self.check()
        before = clock()

        def mine(document: Document) -> Document:
            if document.holder is None or (document.holder.ticket, document.number) != (self.ticket, self.number):
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
    def renewing(self, told: Callable[[Grant], None] | None = None) -> Iterator[None]:
        """Renew on another thread until the end, or until the turn is lost."""
        tell = told or (lambda grant: None)
        over = threading.Event()
        tell(self.grant)

        def renew() -> None:
            while not over.wait(self.turns.patience / BEATS) and not self.lost.is_set():
                try:
                    self.beat()
                except Exception as error:  # in trouble: again in a moment, until the clock says that it is too late
                    log.warning("%s", error)
                tell(self.grant)

        thread = threading.Thread(target=renew, daemon=True, name="turn")
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


def open_turns(url: str, *, who: str, policy: Policy = "fifo", patience: float = 30.0) -> Turns:
    """The turns of the group at `url`, for the run `who`.

    Args:
        url: ``lease://namespace/group``, or a URL of the store whose last part is the group's name.
        policy, patience: as `Turns`.

    Raises:
        UserError: no URL of these kinds, no such policy, or a patience too short to beat in.
    """
    if policy not in POLICIES:
        raise UserError("policy", policy, f"use one of {', '.join(POLICIES)}")
    if patience < 1:
        raise UserError("patience", patience, "seconds, at least 1: a holder shows six times within it that it lives")
    if url.startswith("lease://"):
        from tuneloop.kube.connection import connect
        from tuneloop.sharing.lease import Lease

        namespace, _, group = url.removeprefix("lease://").partition("/")
        if not namespace or not group or "/" in group:
            raise UserError("turns", url, "write lease://namespace/group")
        return Turns(Lease(connect(namespace), group), group, who=who, policy=policy, patience=patience)
    from tuneloop.sharing.file import File

    group = url.rstrip("/").rpartition("/")[2]
    return Turns(File(url), group, who=who, policy=policy, patience=patience)
