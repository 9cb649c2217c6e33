"""The document that records who holds a group's device lease and who waits for it; it needs no clock and no storage."""

from collections.abc import Callable, Collection
from typing import Literal

from pydantic import BaseModel, Field

Policy = Literal["fifo", "lrs"]
POLICIES: tuple[Policy, ...] = ("fifo", "lrs")
KNOWN = 100
"""The number of runs whose last lease is remembered."""


class Refused(RuntimeError):
    """The request is refused: another run holds the device lease or is served first, or the ticket lost its place."""


class Seat(BaseModel, frozen=True):
    """One attempt to hold the device lease, from its request to its release. `since` is when it began to wait, or to
    hold the lease (Unix seconds, only for display); `beat` is a counter that goes up while the attempt is alive."""

    ticket: str
    who: str
    since: float = 0.0
    beat: int = 0


class Document(BaseModel, frozen=True):
    """The state of a group; each method returns a new one. The first run sets `policy` and `patience` (seconds).

    Attributes:
        number: number of the newest lease, which is the holder's fencing token; it never decreases.
        served: run → number of its last lease; if it has had none yet, the newest number when it first asked for one.
    """

    number: int = 0
    holder: Seat | None = None
    waiting: tuple[Seat, ...] = ()
    served: dict[str, int] = Field(default_factory=dict)
    policy: Policy = "fifo"
    patience: float = 30.0

    @property
    def idle(self) -> bool:
        """Whether no run holds the lease or waits for it."""
        return self.holder is None and not self.waiting

    def order(self) -> tuple[Seat, ...]:
        """List the waiters in the order of service. fifo: the earliest request first. lrs: the least recently served
        run first; a new run counts as served when it asked. No waiter overtakes another twice, so none starves."""
        if self.policy == "fifo":
            return self.waiting
        return tuple(sorted(self.waiting, key=lambda seat: self.served.get(seat.who, self.number)))

    def seat(self, ticket: str) -> Seat | None:
        """Find the seat of `ticket`: the holder's or a waiter's."""
        seats = (self.holder, *self.waiting)
        return next((seat for seat in seats if seat is not None and seat.ticket == ticket), None)

    def ask(self, ticket: str, who: str, since: float = 0.0) -> "Document":
        """Add `ticket` to the waiters, unless it has a seat already."""
        if self.seat(ticket):
            return self
        served = {who: self.number, **self.served}
        waiting = (*self.waiting, Seat(ticket=ticket, who=who, since=since))
        return self.model_copy(update={"waiting": waiting, "served": served})

    def beat(self, ticket: str) -> "Document":
        """Record that `ticket` is alive. Raises Refused if it has no seat, or has lost it."""
        if self.seat(ticket) is None:
            raise Refused(f"{ticket} has lost its place")
        return self._each(
            lambda seat: seat.model_copy(update={"beat": seat.beat + (seat.ticket == ticket)})
        )

    def take(self, ticket: str, silent: Collection[str] = (), since: float = 0.0) -> "Document":
        """Grant the lease; `silent` tickets lose their seats. Raises Refused if another holds it or is served first."""
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
        served = dict(
            sorted({**self.served, seat.who: number}.items(), key=lambda item: item[1])[-KNOWN:]
        )
        holder = seat.model_copy(update={"since": since, "beat": seat.beat + 1})
        return self.model_copy(
            update={"number": number, "holder": holder, "waiting": waiting, "served": served}
        )

    def quit(self, ticket: str) -> "Document":
        """Release the lease, or stop waiting for it; nothing changes if `ticket` has no seat."""
        return self._each(lambda seat: None if seat.ticket == ticket else seat)

    def leave(self, who: str) -> "Document":
        """Remove all seats of a run, whether it holds the lease or waits."""
        return self._each(lambda seat: None if seat.who == who else seat)

    def _each(self, how: Callable[[Seat], Seat | None]) -> "Document":
        waiting = tuple(filter(None, map(how, self.waiting)))
        return self.model_copy(
            update={"holder": self.holder and how(self.holder), "waiting": waiting}
        )
