"""Runs that take turns on devices, event by event: a simulation, pure and deterministic.

A run is a graph of tasks. A task whose predecessors have ended waits `lead` seconds (its pod is being made), asks for
the turn of its device, if it has one, and holds it for `seconds`. `tuneloop.sharing.lease_queue.LeaseQueue` says whose
turn it is, as in real runs. What runs took with devices of their own tells what they will take otherwise, as far as a
task's seconds do not depend on what runs on other devices."""

import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from tuneloop.core.artifacts import Role
from tuneloop.sharing.lease_queue import LeaseQueue, Policy


@dataclass(frozen=True)
class Task:
    """A stage of an iteration.

    Attributes:
        seconds: that it holds its device, or works without one.
        lead: seconds before that, in which it is being started and holds nothing.
        after: indices of the tasks of its run that end before it starts.
        role: what the stage is in the loop; a trainer ends an iteration.
    """

    stage: str
    iteration: int
    seconds: float
    device: str = ""
    lead: float = 0.0
    after: tuple[int, ...] = ()
    role: Role | None = None


@dataclass(frozen=True)
class Rules:
    """How devices are shared.

    Attributes:
        turns: device → the turn that its users take; one that is not named, anybody uses at any time.
        swap: seconds without work when a turn goes to another run: the state of one is moved out, of the other in.
        handover: seconds until one who waits has seen that the turn is free.
    """

    turns: Mapping[str, str] = field(default_factory=dict)
    policy: Policy = "fifo"
    swap: float = 0.0
    handover: float = 0.0


@dataclass(frozen=True)
class Span:
    """A task as it was carried out, in seconds from the start: it `asked` for its turn, `began` to work, `ended`."""

    run: str
    task: Task
    asked: float
    began: float
    ended: float


@dataclass(frozen=True)
class Schedule:
    """The result of a simulation: `spans` in the order in which they began."""

    spans: tuple[Span, ...]

    @property
    def total(self) -> float:
        """Seconds until the last run has ended."""
        return max((span.ended for span in self.spans), default=0.0)

    def busy(self, device: str) -> float:
        """Sum the seconds in which `device` worked."""
        return sum(span.ended - span.began for span in self.spans if span.task.device == device)

    @property
    def steps(self) -> list[float]:
        """Seconds from the end of one iteration to that of the next, run after run."""
        ends: dict[str, list[float]] = {}
        for span in self.spans:
            if span.task.role == "trainer":
                ends.setdefault(span.run, []).append(span.ended)
        return [after - before for each in ends.values() for before, after in pairwise(each)]


def simulate_runs(runs: Mapping[str, Sequence[Task]], rules: Rules | None = None) -> Schedule:
    """Simulate `runs` (name → tasks) from 0 s on. Tasks that ask at the same time queue in the order of `runs`."""
    simulation = _Simulation(list(runs), [list(tasks) for tasks in runs.values()], rules or Rules())
    return Schedule(tuple(sorted(simulation.spans(), key=lambda span: span.began)))


class _Simulation:
    """What has happened so far. An event is (when, number of the run, of its task, whether that ends then, or asks)."""

    def __init__(self, names: list[str], tasks: list[list[Task]], rules: Rules) -> None:
        self.names, self.tasks, self.rules = names, tasks, rules
        self.turns = {turn: LeaseQueue(policy=rules.policy) for turn in rules.turns.values()}
        self.resident: dict[str, int] = {}
        self.asked: dict[str, tuple[float, int, int]] = {}
        self.left = [[len(task.after) for task in each] for each in tasks]
        self.events: list[tuple[float, int, int, bool]] = []
        for run, each in enumerate(tasks):
            for index, task in enumerate(each):
                if not task.after:
                    heapq.heappush(self.events, (task.lead, run, index, False))

    def spans(self) -> Iterable[Span]:
        while self.events:
            now = self.events[0][0]
            while (
                self.events and self.events[0][0] == now
            ):  # all that happens now, before anybody is served
                _, run, index, ends = heapq.heappop(self.events)
                turn = self.rules.turns.get(self.tasks[run][index].device)
                if ends:
                    self.end(now, run, index, turn)
                elif turn is None:
                    yield self.start(now, run, index, now)
                else:
                    ticket = f"{run}.{index}"
                    self.asked[ticket] = now, run, index
                    self.turns[turn] = self.turns[turn].add_waiter(ticket, self.names[run])
            yield from self.serve(now)

    def serve(self, now: float) -> Iterable[Span]:
        """Give every free turn to the next who waits for it."""
        for turn, document in self.turns.items():
            if document.holder is None and document.waiting:
                ticket = document.list_waiters()[0].ticket
                self.turns[turn] = document.grant(ticket)
                asked, run, index = self.asked[ticket]
                moved = self.resident.get(turn, run) != run
                self.resident[turn] = run
                yield self.start(
                    asked,
                    run,
                    index,
                    now + self.rules.swap * moved + self.rules.handover * (now > asked),
                )

    def start(self, asked: float, run: int, index: int, now: float) -> Span:
        task = self.tasks[run][index]
        heapq.heappush(self.events, (now + task.seconds, run, index, True))
        return Span(self.names[run], task, asked, now, now + task.seconds)

    def end(self, now: float, run: int, index: int, turn: str | None) -> None:
        if turn is not None:
            self.turns[turn] = self.turns[turn].release(f"{run}.{index}")
        for follower, task in enumerate(self.tasks[run]):
            if index in task.after:
                self.left[run][follower] -= 1
                if not self.left[run][follower]:
                    heapq.heappush(self.events, (now + task.lead, run, follower, False))


def compute_percentile(values: Sequence[float], share: float) -> float:
    """Compute the smallest of `values` that a `share` of them does not exceed (nearest rank)."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
