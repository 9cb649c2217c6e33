"""Iterations of a loop as one pod runs them, stage after stage.

They are what `tuneloop.local.iterations` is given: `workflow/plan.py: LoopPlan.build_pod_loop`
makes them, `argo/loop.py` passes them as JSON in the pod's arguments, and `kfp/iterations.py` runs
them, too. Models are closed (``extra="forbid"``): a field that is added needs the same version of
tuneloop in the image.
"""

import math
from typing import Literal

from pydantic import BaseModel

PROGRAM = "tuneloop.local.iterations"
"""The module that a pod of several iterations runs; `argo/loop.py` renders its command."""
PerPod = int | Literal["auto"]
"""Iterations that a pod runs; 0: each stage has a pod of its own; auto: the pod decides
(`count_iterations`).
"""
BEARABLE = 0.1
"""The fraction of a loop's time that may be spent between pods and while they start. Only pods
whose length is ``auto`` ask for it (`local/iterations.py: PodLength`)."""


def count_iterations(lost_s: float, iteration_s: float) -> int:
    """Compute how many iterations a pod must run for a new pod to cost little.

    Args:
        lost_s: seconds that a new pod costs.
        iteration_s: seconds that an iteration takes.

    Returns:
        At least one: the smallest n for which the lost seconds are at most the fraction `BEARABLE`
        of the time from pod to pod, that is n ≥ lost · (1 / BEARABLE - 1) / iteration.
    """
    return max(1, math.ceil(lost_s * (1 / BEARABLE - 1) / iteration_s))


class StageCall(BaseModel, frozen=True, extra="forbid"):
    """A stage that a pod runs.

    Attributes:
        name: the step's, under which the stage commits in the iteration.
        command: starts the stage; a single process runs in the pod's own.
        flags: those that are the same in each iteration.
        wires: flag → value, as in `tuneloop.workflow.loop.Step`.
        output: the flag for the URL where the stage commits.
    """

    name: str
    command: list[str]
    flags: list[str]
    wires: dict[str, str]
    output: str


class PodLoop(BaseModel, frozen=True, extra="forbid"):
    """The steps of an iteration, in `tuneloop.workflow.loop.Loop`'s terms.

    `check` runs after each `evaluate_every` of them.
    """

    steps: list[StageCall]
    carry: dict[str, str]
    reward: str
    check: StageCall | None = None
    evaluate_every: int = 0
