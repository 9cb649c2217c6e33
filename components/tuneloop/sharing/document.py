"""The document of a group of runs that says whose turn it is, and how it changes; without clock or storage."""

from collections.abc import Callable, Collection
from typing import Literal

from pydantic import BaseModel, Field

Policy = Literal["fifo", "lrs"]
POLICIES: tuple[Policy, ...] = ("fifo", "lrs")
KNOWN = 100
"""Runs whose last turn is remembered."""


class Refused(RuntimeError):
    """What was asked of the document is not to be had: the turn is another's, or was lost."""


class Seat(BaseModel, frozen=True):
    """One attempt to have a turn, from its asking to its end. `since` is when it asked, or was served (Unix seconds,
    for people alone); `beat` goes up as long as it lives."""

    ticket: str
    who: str
    since: float = 0.0
    beat: int = 0


class Document(BaseModel, frozen=True):
    """The state of a group; each function returns a new one. The first to come sets `policy` and `patience` (seconds).

    Attributes:
        number: of the turn that was taken last; the holder's fencing token, which never goes back.
        served: run → number of its last turn; of one that had none yet, the number when it first asked.
    """

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
        """List those who wait in the order of service. fifo: who asked first. lrs: whose run had its last turn least
        recently; a new run counts as served when it asked. Each passes another at most once, so nobody starves."""
        if self.policy == "fifo":
            return self.waiting
        return tuple(sorted(self.waiting, key=lambda seat: self.served.get(seat.who, self.number)))

    def seat(self, ticket: str) -> Seat | None:
        """Find the seat of `ticket`: as holder, or among those who wait."""
        seats = (self.holder, *self.waiting)
        return next((seat for seat in seats if seat is not None and seat.ticket == ticket), None)

    def ask(self, ticket: str, who: str, since: float = 0.0) -> "Document":
        """Queue up; nothing changes for one that sits already."""
        if self.seat(ticket):
            return self
        served = {who: self.number, **self.served}
        waiting = (*self.waiting, Seat(ticket=ticket, who=who, since=since))
        return self.model_copy(update={"waiting": waiting, "served": served})

    def beat(self, ticket: str) -> "Document":
        """Show that one lives. Raises Refused where it has no seat (any more)."""
        if self.seat(ticket) is None:
            raise Refused(f"{ticket} has lost its place")
        return self._each(lambda seat: seat.model_copy(update={"beat": seat.beat + (seat.ticket == ticket)}))

    def take(self, ticket: str, silent: Collection[str] = (), since: float = 0.0) -> "Document":
        """Begin a turn; `silent` tickets lose their seats. Raises Refused where another has the turn or is before."""
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
        return self.model_copy(update={"number": number, "holder": holder, "waiting": waiting, "served": served})

    def quit(self, ticket: str) -> "Document":
        """End a turn, or wait no longer; nothing changes for one that has no seat."""
        return self._each(lambda seat: None if seat.ticket == ticket else seat)

    def leave(self, who: str) -> "Document":
        """Take from a run all that it holds and waits for."""
        return self._each(lambda seat: None if seat.who == who else seat)

    def _each(self, how: Callable[[Seat], Seat | None]) -> "Document":
        waiting = tuple(filter(None, map(how, self.waiting)))
        return self.model_copy(update={"holder": self.holder and how(self.holder), "waiting": waiting})
