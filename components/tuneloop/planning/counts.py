"""How often the templates of a workflow run at most: from its graph, and from how its plan divides the loop among pods.

Counts are upper bounds where the graph decides while it runs (``when``, loops that may stop early)."""

from collections import Counter
from dataclasses import dataclass, field

from tuneloop.argo.claims import TAKE
from tuneloop.core.json_types import JsonMapping
from tuneloop.workflow.manifest import list_calls
from tuneloop.workflow.plan import LoopPlan, RunPlan

UNLIMITED = 1 << 30
"""Iterations of a workflow that states no limit."""


@dataclass(frozen=True)
class Counts:
    """How often the templates of a workflow run at most, without retries, in the order of the graph.

    Attributes:
        pods: template → pods.
        stages: the same, but with the runs of the stages in place of the pods that run iterations.
        iteration_pods: how many pods run iterations.
    """

    pods: Counter[str] = field(default_factory=Counter)
    stages: Counter[str] = field(default_factory=Counter)
    iteration_pods: int = 0

    @property
    def total(self) -> int:
        """All pods."""
        return self.pods.total()


def count_runs(workflow: JsonMapping, plan: RunPlan) -> Counts:
    """Count the pods and the stages of a workflow that carries this plan."""
    pods = count_pods(workflow)
    loop = plan.loop
    if not loop or not loop.pod:
        return Counts(pods, pods)
    iterations = count_iterations(workflow)
    template = loop.pod.template
    stages: Counter[str] = Counter()
    for name, count in pods.items():
        if name != template:
            stages[name] += count
            continue
        for stage in loop.stages:
            stages[stage] += iterations
        if loop.evaluate_every:
            stages[loop.check.stage] += iterations // loop.evaluate_every
    pods[template] = count_iteration_pods(loop, iterations)
    return Counts(pods, stages, pods[template])


def count_iteration_pods(loop: LoopPlan, iterations: int) -> int:
    """Count the pods that run so many iterations; one that decides this itself runs at least one."""
    if loop.iterations_per_pod == "auto":
        return iterations
    return -(-iterations // loop.iterations_per_pod)


def count_pods(workflow: JsonMapping) -> Counter[str]:
    """Count template → pods, as if each pod of iterations ran one."""
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    iterations = count_iterations(workflow)
    counts: Counter[str] = Counter()

    def count(name: str, times: int, above: tuple[str, ...]) -> None:
        tasks = list_calls(templates[name])
        if not tasks:
            counts[name] += times
            return
        again = next((task for task in tasks if task.get("template") == name), {})
        rounds = iterations if again else 1
        for task in tasks:
            if task["template"] in (*above, name):
                continue
            # What has the condition of the next round belongs to it, and the last round has no next one.
            is_ahead = "when" in again and task.get("when") == again["when"]
            count(task["template"], times * (rounds - is_ahead), (*above, name))

    count(workflow["spec"]["entrypoint"], 1, ())
    workflows = -(-iterations // read_parameter(workflow, "per-workflow", UNLIMITED))
    for name in counts:
        template = templates[name]
        command = template.get("container", {}).get("command", ())
        if "tuneloop.cluster.continue_run" in command:
            # Each workflow but the last one starts the next.
            counts[name] = workflows - 1
        elif template.get("daemon") or name == TAKE:
            counts[name] *= workflows
    handler = workflow["spec"].get("onExit")
    if handler:
        counts[handler] = workflows
    return +counts


def count_iterations(workflow: JsonMapping) -> int:
    """Count the iterations of a workflow's loop at most; 1 where it has none."""
    return read_parameter(workflow, "iterations", 1)


def read_parameter(workflow: JsonMapping, name: str, default: int) -> int:
    """Return a parameter of the workflow that is a number, or `default` where it has none."""
    for parameter in workflow["spec"].get("arguments", {}).get("parameters", ()):
        if parameter["name"] == name and "value" in parameter:
            return int(parameter["value"])
    return default
