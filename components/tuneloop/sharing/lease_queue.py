"""The queue of a group: who holds its device lease and who waits for it. No clock, no storage.

`sharing/leases.py` changes it and `sharing/lease_storage.py` stores it as JSON, which runs of other
releases read and write at the same time: a field that is added needs a default, and is lost
whenever an older release writes. `extensions/sharing/command.py` prints the queue. The tests are
`tests/unit/sharing/test_simulate.py`, `tests/unit/sharing/test_turns.py` and
`tests/unit/sharing/test_plans.py`.
"""

from collections.abc import Callable, Collection
from typing import Literal

from pydantic import BaseModel, Field

Policy = Literal["fifo", "lrs"]
"""Who is served next. `list_waiters` has a branch for ``fifo`` and takes any other for ``lrs``; the
setting lists both again, with a description (`extensions/sharing/settings.py: Share`).
"""
POLICIES: tuple[Policy, ...] = ("fifo", "lrs")
"""`Policy` for flags (`sharing/sidecar.py`), and for the check of `open_lease_group`."""
REMEMBERED_RUNS = 100
"""The number of runs whose last lease is remembered, so that the document stays small. A run that
is forgotten counts for ``lrs`` as one that is new.
"""


class LeaseRefused(RuntimeError):
    """The request is refused.

    Another run holds the device lease or is served first, or the ticket is not in the queue.
    """


class LeaseRequest(BaseModel, frozen=True):
    """One attempt to hold the device lease, from its request to its release.

    Attributes:
        ticket: names the attempt.
        who: the run.
        since: when it began to wait, or to hold the lease (Unix seconds, only for display).
        beat: a counter that goes up while the attempt is alive; other runs only look whether it has
            changed (`sharing/leases.py: SilenceDetector`).
    """

    ticket: str
    who: str
    since: float = 0.0
    beat: int = 0


class LeaseQueue(BaseModel, frozen=True):
    """The state of a group; each method returns a new one.

    Attributes:
        number: number of the newest lease, which is the holder's fencing token; it never decreases.
        holder: the request that was granted.
        waiting: the other requests, in the order in which they came.
        served: run → number of its last lease; if it has had none yet, the newest number when it
            first asked for one.
        policy, patience: as the first run sets them; `patience` is in seconds.
    """

    number: int = 0
    holder: LeaseRequest | None = None
    waiting: tuple[LeaseRequest, ...] = ()
    served: dict[str, int] = Field(default_factory=dict)
    policy: Policy = "fifo"
    patience: float = 30.0

    @property
    def is_idle(self) -> bool:
        """Whether no run holds the lease or waits for it."""
        return self.holder is None and not self.waiting

    @property
    def requests(self) -> list[LeaseRequest]:
        """The holder's request, if there is one, and those that wait."""
        requests = [self.holder] if self.holder else []
        requests += self.waiting
        return requests

    def list_waiters(self) -> tuple[LeaseRequest, ...]:
        """List the waiters in the order of service.

        fifo: the earliest request first. lrs: the least recently served run first, where a new run
        counts as served when it asked. No waiter overtakes another twice, so none starves.
        """
        if self.policy == "fifo":
            return self.waiting

        def find_last_service(request: LeaseRequest) -> int:
            return self.served.get(request.who, self.number)

        return tuple(sorted(self.waiting, key=find_last_service))

    def find_request(self, ticket: str) -> LeaseRequest | None:
        """Find the request of `ticket`: the holder's or a waiter's."""
        matching = [request for request in self.requests if request.ticket == ticket]
        return matching[0] if matching else None

    def add_waiter(self, ticket: str, who: str, since: float = 0.0) -> "LeaseQueue":
        """Add `ticket` to the waiters, unless it is in the queue already."""
        # A request whose answer was lost is sent again.
        if self.find_request(ticket):
            return self
        request = LeaseRequest(ticket=ticket, who=who, since=since)
        waiting = list(self.waiting)
        waiting.append(request)
        return self.model_copy(
            update={
                "waiting": tuple(waiting),
                # A run that has been served keeps its number.
                "served": {who: self.number} | self.served,
            }
        )

    def renew(self, ticket: str) -> "LeaseQueue":
        """Record that `ticket` is alive. Raises LeaseRefused if it is not in the queue."""
        if self.find_request(ticket) is None:
            raise LeaseRefused(f"{ticket} has lost its place in the queue")

        def renew_own(request: LeaseRequest) -> LeaseRequest:
            if request.ticket != ticket:
                return request
            return request.model_copy(update={"beat": request.beat + 1})

        return self._map_requests(renew_own)

    def grant(
        self,
        ticket: str,
        silent: Collection[str] = (),
        since: float = 0.0,
    ) -> "LeaseQueue":
        """Grant the lease to `ticket`; the tickets `silent` leave the queue.

        Raises:
            LeaseRefused: another one holds the lease or is served first, or `ticket` does not wait.
        """
        request = next((r for r in self.waiting if r.ticket == ticket), None)
        if request is None:
            raise LeaseRefused(f"{ticket} does not wait")
        # A silent holder has given up by its own clock, before an observer finds it silent.
        if self.holder is not None and self.holder.ticket not in silent:
            raise LeaseRefused(f"{self.holder.who} holds the lease")
        for waiter in self.list_waiters():
            if waiter == request:
                break
            if waiter.ticket not in silent:
                raise LeaseRefused(f"{waiter.who} is to be served before")

        number = self.number + 1
        served = self.served | {request.who: number}
        oldest_first = sorted(served.items(), key=lambda item: item[1])
        holder = request.model_copy(
            update={
                "since": since,
                "beat": request.beat + 1,
            }
        )
        # Waiters stay in the order in which they came, whatever the policy is.
        waiting = [r for r in self.waiting if r != request and r.ticket not in silent]
        return self.model_copy(
            update={
                "number": number,
                "holder": holder,
                "waiting": tuple(waiting),
                "served": dict(oldest_first[-REMEMBERED_RUNS:]),
            }
        )

    def release(self, ticket: str) -> "LeaseQueue":
        """Release the lease, or stop waiting for it; nothing changes for an unknown `ticket`."""
        return self._map_requests(lambda request: None if request.ticket == ticket else request)

    def release_run(self, who: str) -> "LeaseQueue":
        """Remove all requests of a run, whether it holds the lease or waits."""
        return self._map_requests(lambda request: None if request.who == who else request)

    def _map_requests(
        self,
        change: Callable[[LeaseRequest], LeaseRequest | None],
    ) -> "LeaseQueue":
        """Apply `change` to every request; None removes it."""
        # The object is frozen: a new one is written, over the one that was read.
        changed = [change(request) for request in self.waiting]
        return self.model_copy(
            update={
                "holder": self.holder and change(self.holder),
                "waiting": tuple(request for request in changed if request),
            }
        )
