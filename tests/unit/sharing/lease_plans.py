"""The ways in which runs can use devices, compared: alone, overlapped, one after the other, by turns. What each run
takes is given as its `Task`s, iteration by iteration; a plan says what waits for what. By turns, runs may take longer
than one after the other; overlapped, a loop may take longer than the plain one."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tests.unit.sharing.lease_simulation import (
    Rules,
    Schedule,
    Task,
    compute_percentile,
    simulate_runs,
)
from tuneloop.sharing.lease_queue import POLICIES

ALONE, OVERLAPPED, SERIAL = "alone", "asynchronous", "one-after-another"
SHARED = tuple(f"shared-{policy}" for policy in POLICIES)
PLANS = (ALONE, OVERLAPPED, SERIAL, *SHARED)
ROLES = ("trainer", "sampler")
GROUP = dict.fromkeys(ROLES, "group")
"""Role → turn: all devices are one run's at a time."""
APART = dict(zip(ROLES, ROLES))
"""Role → turn: one run trains while another samples."""


@dataclass(frozen=True)
class Plan:
    """The result of a plan. `accelerators` are held all the time; `together`: both roles use the same devices."""

    name: str
    runs: int
    iterations: int
    accelerators: int
    together: bool
    schedules: tuple[Schedule, ...]

    @property
    def total(self) -> float:
        """Seconds until the last run has ended."""
        return sum(schedule.total for schedule in self.schedules)

    @property
    def steps(self) -> list[float]:
        """Seconds from the end of one iteration to that of the next, run after run."""
        return [step for schedule in self.schedules for step in schedule.steps]

    @property
    def mean(self) -> float:
        """Of `steps`, seconds."""
        return statistics.fmean(self.steps)

    @property
    def p95(self) -> float:
        """Of `steps`, seconds; nearest rank."""
        return compute_percentile(self.steps, 0.95)

    @property
    def throughput(self) -> float:
        """Iterations a second and accelerator."""
        return self.iterations / self.total / self.accelerators

    def idle(self, role: str) -> float:
        """Return the share of the total in which the devices of `role` did not work."""
        worked = (
            schedule.busy(each)
            for each in (ROLES if self.together else (role,))
            for schedule in self.schedules
        )
        return 1 - sum(worked) / self.total


def in_turn(tasks: Sequence[Task]) -> list[Task]:
    """Order the loop as it is by default: every task after the one before."""
    return [
        dataclasses.replace(task, after=(index - 1,) if index else ())
        for index, task in enumerate(tasks)
    ]


def overlap_tasks(tasks: Sequence[Task]) -> list[Task]:
    """Order the loop as with `loop.asynchronous`: batch k+1 beside the update on batch k, then both are waited for."""
    ordered: list[Task] = []

    def chain(some: Sequence[Task], after: tuple[int, ...]) -> tuple[int, ...]:
        for task in some:
            ordered.append(dataclasses.replace(task, after=after))
            after = (len(ordered) - 1,)
        return after

    parts: list[
        tuple[list[Task], ...]
    ] = []  # of each iteration: those that make its batch, the update, those after it
    for some in (list(of_one) for _, of_one in groupby(tasks, key=lambda task: task.iteration)):
        at = next(index for index, task in enumerate(some) if task.role == "trainer")
        parts.append((some[:at], [some[at]], some[at + 1 :]))
    over = chain(parts[0][0], ())
    for (_, update, check), (ahead, *_) in zip(parts, [*parts[1:], ([], [], [])]):
        both = chain(update, over), chain(ahead, over) if ahead else ()
        over = chain(check, both[0] + both[1])
    return ordered


def compare_plans(
    runs: Mapping[str, Sequence[Task]],
    accelerators: Mapping[str, int],
    together: bool,
    rules: Rules,
) -> dict[str, Plan]:
    """Return every plan by name; `alone` and `asynchronous` are of the first run.

    Args:
        runs: name → its tasks in the order of the loop, at least two iterations.
        accelerators: role → how many devices it has.
        together: whether one set of devices serves both roles, wherever the two do not work at once.
        rules: of the plans by turns, but for the policy.
    """
    serial = {name: in_turn(tasks) for name, tasks in runs.items()}
    everyone, one, both = list(runs), list(runs)[:1], sum(accelerators.values())
    count = max(accelerators.values()) if together else both

    def plan(name: str, of: Sequence[str], *schedules: Schedule) -> Plan:
        iterations = sum(len({task.iteration for task in runs[run]}) for run in of)
        apart = name == OVERLAPPED or not together
        return Plan(name, len(of), iterations, both if apart else count, not apart, schedules)

    return {
        ALONE: plan(ALONE, one, simulate_runs({run: serial[run] for run in one})),
        OVERLAPPED: plan(
            OVERLAPPED, one, simulate_runs({run: overlap_tasks(runs[run]) for run in one})
        ),
        SERIAL: plan(SERIAL, everyone, *(simulate_runs({run: serial[run]}) for run in everyone)),
        **{
            name: plan(
                name, everyone, simulate_runs(serial, dataclasses.replace(rules, policy=policy))
            )
            for name, policy in zip(SHARED, POLICIES)
        },
    }
