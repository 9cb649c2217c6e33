"""Iterations of a loop as one pod runs them, stage after stage: what `tuneloop.local.iterations` is given."""

import math
from typing import Literal

from pydantic import BaseModel

from tuneloop.core.json_types import JsonMapping, JsonObject

PROGRAM = "tuneloop.local.iterations"
PerPod = int | Literal["auto"]
"""Iterations that a pod runs; 0: each stage has a pod of its own; auto: the pod decides (`count_iterations`)."""
BEARABLE = 0.1
"""The fraction of a loop's time that may be spent between pods and while they start."""


def count_iterations(lost_s: float, iteration_s: float) -> int:
    """Compute how many iterations a pod must run (at least one) so that the seconds that a new pod costs are at most
    the fraction `BEARABLE` of the time from pod to pod: n ≥ lost · (1 / BEARABLE - 1) / iteration."""
    return max(1, math.ceil(lost_s * (1 / BEARABLE - 1) / iteration_s))


class StageCall(BaseModel, frozen=True, extra="forbid"):
    """A stage that a pod runs: `name` is the step's, under which it commits in the iteration; `command` starts it (a
    single process of a stage runs in the pod's own); `flags` are the same in each iteration; `wires` maps flags to
    values as in `tuneloop.workflow.loop.Step`; `output` is the flag for the URL where it commits."""

    name: str
    command: list[str]
    flags: list[str]
    wires: dict[str, str]
    output: str


class PodLoop(BaseModel, frozen=True, extra="forbid"):
    """The steps of an iteration, in `tuneloop.workflow.loop.Loop`'s terms; `check` runs after each `evaluate_every`."""

    steps: list[StageCall]
    carry: dict[str, str]
    reward: str
    check: StageCall | None = None
    evaluate_every: int = 0


def find_pod(workflow: JsonMapping) -> JsonObject | None:
    """Return the template whose pod runs the stages of several iterations; None where each stage has a pod."""
    started = (
        (t, t.get("container", {}).get("command", ()))
        for t in workflow["spec"].get("templates") or ()
    )
    return next((template for template, command in started if PROGRAM in command), None)


def expand_pod(workflow: JsonMapping) -> tuple[JsonObject, PerPod]:
    """Return the workflow with a graph of the stages in place of the pod that runs them, and how many iterations that
    pod runs; 0: each stage has a pod of its own, and the workflow is unchanged."""
    if (pod := find_pod(workflow)) is None:
        return dict(workflow), 0
    container = pod["container"]
    words = container["args"]
    loop = PodLoop.model_validate_json(words[words.index("--loop") + 1])
    stages = [*loop.steps, *([loop.check] if loop.check else [])]
    shared = {key: container[key] for key in ("image", "resources") if key in container}
    inner = [
        {"name": s.name, "container": {**shared, "command": s.command, "args": s.flags}}
        for s in stages
    ]
    before = ["", *(stage.name for stage in stages)]  # one after the other
    tasks = [
        {"name": s.name, "template": s.name, "depends": above} for s, above in zip(stages, before)
    ]
    graph = {"name": pod["name"], "dag": {"tasks": tasks}}
    named = {stage.name for stage in stages}
    others = [
        graph if t is pod else t for t in workflow["spec"]["templates"] if t["name"] not in named
    ]
    unfolded = {**workflow, "spec": {**workflow["spec"], "templates": [*others, *inner]}}
    return unfolded, "auto" if "--auto" in words else int(words[words.index("--per-pod") + 1])
