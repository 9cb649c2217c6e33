"""What happens to runs on a cluster: which fault at which moment of which stage, drawn from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.certify.held import MOMENTS, WORK

INPUTS: Mapping[str, str] = {
    "sft": "",
    "evaluate-before": "sft",
    "iterations/1/rollout": "sft",
    "iterations/1/reward": "iterations/1/rollout",
    "iterations/1/policy-update": "iterations/1/reward",
    "evaluate-after": "iterations/1/policy-update",
    "export": "iterations/1/policy-update",
}
"""The stages of a run in their order, by their outputs below it; and of each an artifact that it reads."""
STAGES = tuple(INPUTS)


@dataclass(frozen=True)
class ClusterKind:
    """A kind of fault.

    Attributes:
        moments: of a stage, at which it can happen.
        reads: it happens to what the stage reads, so not to the first one.
    """

    name: str
    moments: tuple[str, ...] = MOMENTS
    reads: bool = False


TORN, REMOVED = "input's manifest torn", "input's manifest removed"
STOPPED = "stopped and submitted again"
PREEMPTED, HOGGED = "preempted by Kueue", "out of memory"
CLUSTER_KINDS = (
    ClusterKind(TORN, (WORK,), reads=True),
    ClusterKind(REMOVED, (WORK,), reads=True),
    ClusterKind(STOPPED),
    ClusterKind("pod deleted (SIGTERM)"),
    ClusterKind("pod deleted without grace"),
    ClusterKind("process killed (SIGKILL)"),
    ClusterKind(HOGGED),
    ClusterKind("duplicate pod"),
    ClusterKind("Argo's controller killed"),
    ClusterKind("object store killed"),
    ClusterKind("object store away for 10 s"),
    ClusterKind("Workflow changed meanwhile (409)"),
    ClusterKind("Argo's executor refused (403)"),
    ClusterKind("node cordoned, pod evicted"),
    ClusterKind(PREEMPTED),
)
"""Those first that need a resubmission, so that runs share them evenly."""


@dataclass(frozen=True)
class ClusterInjection:
    """One fault at one moment of a stage of a run.

    Attributes:
        index: its number in the plan.
        run: the number of the run that it happens to.
        stage: the stage's output below the run.
    """

    index: int
    run: int
    kind: str
    stage: str
    moment: str

    def __str__(self) -> str:
        return f"{self.index}: {self.kind}, {self.stage} {self.moment}, run {self.run}"


def make_cluster_plan(count: int, seed: int) -> list[ClusterInjection]:
    """Draw `count` injections: of each kind as many, but for one, and at most one a stage of a run."""
    chance = random.Random(seed)
    runs = math.ceil(count / len(STAGES))
    rounds = [
        chance.sample(CLUSTER_KINDS, len(CLUSTER_KINDS))
        for _ in range(math.ceil(count / len(CLUSTER_KINDS)))
    ]
    kinds = sorted([kind for each in rounds for kind in each][:count], key=CLUSTER_KINDS.index)
    free = {run: chance.sample(STAGES, len(STAGES)) for run in range(runs)}
    moments = {kind.name: _repeat(kind.moments, chance) for kind in CLUSTER_KINDS}
    drawn = []
    for number, kind in enumerate(kinds):
        run = number % runs
        stage = next(stage for stage in free[run] if INPUTS[stage] or not kind.reads)
        free[run].remove(stage)
        drawn.append((run, STAGES.index(stage), kind.name, next(moments[kind.name])))
    plan = enumerate(sorted(drawn))
    return [
        ClusterInjection(index, run, kind, STAGES[at], moment)
        for index, (run, at, kind, moment) in plan
    ]


def _repeat(moments: tuple[str, ...], chance: random.Random) -> Iterator[str]:
    while True:
        yield from chance.sample(moments, len(moments))
