"""How often the templates of a workflow run at most.

This follows from the workflow's graph, and from how its plan divides the loop among pods. Counts
are upper bounds where the graph decides while it runs (``when``, loops that may stop early).

All other modules of `planning/` read these counts, by `PlannedPods`. They go by the graph as it is
rendered, so that a graph of another shape counts right, too. What they have to recognize in it is:
a template that calls itself (the loop), daemons, and two programs by their commands
(`tuneloop.cluster.continue_run` and `RESERVES`): a third step that runs once in each workflow of a
run needs a line in `count_pods`. `tests/unit/planning/test_plan.py` tests it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tuneloop.core.json_types import JsonMapping
from tuneloop.workflow.manifest import list_calls, read_parameters
from tuneloop.workflow.plan import LoopPlan, RunPlan

RESERVES = "tuneloop.cluster.reservations"
"""The program of the step with which each workflow of a run begins, where runs share claims
(`extensions/sharing/claim_steps.py`)."""
UNLIMITED = 1 << 30
"""Iterations of a workflow that states no limit."""


@dataclass(frozen=True)
class RunCounts:
    """How often the templates of a workflow run at most, without retries, in the order of the
    graph.

    Attributes:
        pods: template → number of its pods.
        stages: the same, but in place of the template whose pods run iterations it has each stage
            that they run → how often it runs.
        iteration_pods: how many pods run iterations; 0 where each stage has a pod.
    """

    pods: Counter[str]
    stages: Counter[str]
    iteration_pods: int = 0

    @property
    def total(self) -> int:
        """All pods."""
        return self.pods.total()


def count_runs(workflow: JsonMapping, plan: RunPlan) -> RunCounts:
    """Count the pods and the stages of a workflow that carries this plan."""
    pods = count_pods(workflow)
    loop = plan.loop
    if not loop or not loop.pod:
        return RunCounts(pods, pods)
    iterations = count_iterations(workflow)
    template = loop.pod.template
    stages: Counter[str] = Counter()
    # Counters keep the order in which keys come: the stages stand where their pod does.
    for name, count in pods.items():
        if name != template:
            stages[name] += count
            continue
        for stage in loop.stages:
            stages[stage] += iterations
        if loop.evaluate_every:
            stages[loop.check.stage] += iterations // loop.evaluate_every
    iteration_pods = count_iteration_pods(loop, iterations)
    pods[template] = iteration_pods
    return RunCounts(
        pods=pods,
        stages=stages,
        iteration_pods=iteration_pods,
    )


def count_iteration_pods(loop: LoopPlan, iterations: int) -> int:
    """Count the pods that run so many iterations; one that decides this itself runs at least
    one.
    """
    if loop.iterations_per_pod == "auto":
        return iterations
    return math.ceil(iterations / loop.iterations_per_pod)


def count_pods(workflow: JsonMapping) -> Counter[str]:
    """Count the pods of each template, as if each pod of iterations ran one iteration. Templates
    that are graphs are not counted."""
    templates = index_templates(workflow)
    iterations = count_iterations(workflow)
    counts: Counter[str] = Counter()

    def add_calls(name: str, times: int, callers: Sequence[str]) -> None:
        """Add the pods of a template that runs so many times, called by the graphs `callers`."""
        calls = list_calls(templates[name])
        if not calls:
            counts[name] += times
            return
        rounds = 1
        condition: str | None = None
        for call in calls:
            # A graph that calls itself is a loop, and goes on by this condition.
            if call.get("template") == name:
                rounds = iterations
                condition = call.get("when")
        graphs = [*callers, name]
        for call in calls:
            target = call["template"]
            if target in graphs:
                continue
            call_times = times * rounds
            if condition and call.get("when") == condition:
                # It belongs to the next round, and the last round has no next one.
                call_times -= times
            add_calls(target, call_times, graphs)

    add_calls(workflow["spec"]["entrypoint"], 1, [])
    # A long loop continues in further workflows, which start their servers and claims anew.
    workflows = math.ceil(iterations / read_parameter(workflow, "per-workflow", UNLIMITED))
    for name in counts:
        template = templates[name]
        command = template.get("container", {}).get("command", ())
        if "tuneloop.cluster.continue_run" in command:
            # Each workflow but the last one starts the next.
            counts[name] = workflows - 1
        elif template.get("daemon") or RESERVES in command:
            counts[name] *= workflows
    handler = workflow["spec"].get("onExit")
    if handler:
        # It may be a graph of several templates (`argo/template.py: add_exit_handler`).
        add_calls(handler, workflows, [])
    # The sign drops what runs zero times.
    return +counts


def index_templates(workflow: JsonMapping) -> dict[str, JsonMapping]:
    """Return the templates of a workflow by name."""
    return {template["name"]: template for template in workflow["spec"]["templates"]}


def count_iterations(workflow: JsonMapping) -> int:
    """Return the most iterations of a run's loop, in all its workflows; 1 where it has no loop. The
    names of the parameters are those of `argo/pipeline.py: read_limits`."""
    # A fork begins with a later one (`runs/forking.py: begin_workflow`).
    first = read_parameter(workflow, "iteration", 1)
    return read_parameter(workflow, "iterations", 1) - first + 1


def read_parameter(workflow: JsonMapping, name: str, default: int) -> int:
    """Return a parameter of the workflow that is a number, or `default` where it has none."""
    return int(read_parameters(workflow["spec"]).get(name, default))
