"""A run and its fleet of rollout servers, in steps of five seconds: `AutoscalingRule` beside fixed numbers.

An iteration samples completions, then trains while the fleet has nothing to do. A replica takes a while to start, and
works on as many completions at a time as it has slots; one that is taken away loses what it had, which is asked for
again. Nobody counts requests while no replica is ready.
"""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuneloop.extensions.fleets.autoscaling_rule import AutoscalingRule, Iteration

if TYPE_CHECKING:
    from collections.abc import Sequence

Decide = Callable[[float, int, int, float, int, "Iteration | None"], int]
STEP, INTERVAL = 5, 15
"""Seconds of a step, and between two looks of the rule."""
WINDOW = 600
"""Seconds of its window: longer than the tail of sampling and the training behind it."""


@dataclass(frozen=True)
class Trace:
    """A run: of each iteration the seconds that its completions take, and those of training.

    Attributes:
        boot: seconds that a replica takes to start.
        slots: completions that it works on at a time.
        trainer: devices of the trainer; a replica has one.
    """

    completions: Sequence[Sequence[int]]
    training: int
    boot: int = 60
    slots: int = 32
    trainer: int = 2


@dataclass
class Outcome:
    """What came of it: seconds until the run ended, device-seconds, idle ones of these, (when, replicas) decided."""

    seconds: int = 0
    devices: int = 0
    trainer_idle: int = 0
    sampler_idle: int = 0
    decided: list[tuple[int, int]] = field(default_factory=list)


def draw_trace() -> Trace:
    """Draw 24 iterations: 1024 completions of 40 s in the mean, with a long tail, and 240 s of training."""
    rng = random.Random(0)

    def draw_seconds() -> int:
        return min(160, STEP * max(1, round(rng.lognormvariate(math.log(40) - 0.32, 0.8) / STEP)))

    return Trace([[draw_seconds() for _ in range(1024)] for _ in range(24)], training=240)


def keep(number: int) -> Decide:
    """A fixed number of replicas."""
    return lambda *_: number


def follow(rule: AutoscalingRule, *, idle: bool = True) -> Decide:
    """The rule, with the run's idle times or without them."""
    return lambda now, replicas, ready, requests, clients, last: rule.decide(
        now, replicas, ready, requests, clients, last if idle else None
    )


class _Fleet:
    """Replicas: from when each is ready, and when each of its completions ends."""

    def __init__(self, trace: Trace) -> None:
        self.trace, self.replicas = trace, list[tuple[int, list[tuple[int, int]]]]()
        self.waiting: list[int] = []

    def step(self, now: int) -> None:
        for at, (ready, running) in enumerate(self.replicas):
            running = [(end, seconds) for end, seconds in running if end > now]
            while now >= ready and self.waiting and len(running) < self.trace.slots:
                seconds = self.waiting.pop()
                running.append((now + seconds, seconds))
            self.replicas[at] = ready, running

    def scale(self, now: int, number: int) -> None:
        while len(self.replicas) > number:
            self.waiting += [seconds for _, seconds in self.replicas.pop()[1]]
        while len(self.replicas) < number:
            self.replicas.append((now + self.trace.boot, []))

    def running(self) -> int:
        return sum(len(running) for _, running in self.replicas)

    def ready(self, now: int) -> int:
        return sum(now >= ready for ready, _ in self.replicas)


def simulate_run(trace: Trace, decide: Decide, *, after: int = 1800) -> Outcome:
    """Run `trace` on an empty fleet, and look on for `after` seconds more, in which nobody asks."""
    fleet, made, now = _Fleet(trace), Outcome(), 0
    iteration = began = sampled = 0
    last: Iteration | None = None
    fleet.waiting = list(trace.completions[0])
    while made.seconds == 0 or now < made.seconds + after:
        going = made.seconds == 0
        if now % INTERVAL == 0:
            ready = fleet.ready(now)
            requests = fleet.running() + len(fleet.waiting) if ready else 0
            wanted = decide(
                float(now), len(fleet.replicas), ready, float(requests), int(going), last
            )
            if wanted != len(fleet.replicas):
                made.decided.append((now, wanted))
            fleet.scale(now, wanted)
        fleet.step(now)
        sampling = bool(fleet.waiting or fleet.running())
        if going:
            made.trainer_idle += STEP * trace.trainer * sampling
            made.sampler_idle += 0 if sampling else STEP * len(fleet.replicas)
            sampled = now if sampling else sampled
            if not sampling and now - sampled >= trace.training:
                last = Iteration(float(began), float(sampled - began), float(now - sampled))
                iteration, began = iteration + 1, now
                made.seconds = now if iteration == len(trace.completions) else 0
                fleet.waiting = list(trace.completions[iteration]) if not made.seconds else []
        made.devices += STEP * (len(fleet.replicas) + trace.trainer * (made.seconds == 0))
        now += STEP
    return made


@functools.cache
def tabulate() -> dict[str, Outcome]:
    """The same run with one replica, with eight, by requests alone, and by idle times, too."""
    trace = draw_trace()
    rules = [AutoscalingRule(0, 8, trace.slots, WINDOW, trace.trainer) for _ in range(2)]
    ways = {
        "1 replica": keep(1),
        "8 replicas": keep(8),
        "by requests": follow(rules[0], idle=False),
    }
    ways["by requests and idle times"] = follow(rules[1])
    return {name: simulate_run(trace, decide) for name, decide in ways.items()}
