"""How many hours a workflow takes, and what its accelerators cost, by the seconds of its stages.

`tuneloop plan` prints it, by the seconds of an earlier run (`--measured`) or of
`planning/arithmetic.py` (`--device`).
"""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tuneloop.core.json_types import JsonMapping
from tuneloop.core.wording import format_count
from tuneloop.planning.pods import PlannedPods, list_planned_pods
from tuneloop.runs.run_record import Run
from tuneloop.workflow.plan import ServerPlan, StagePlan, read_plan

REQUEUE_S = 10.0
"""Seconds between two pods that follow one another.

Argo's controller looks at a workflow again after so long. It is the controller's variable
``DEFAULT_REQUEUE_TIME``, which an admin may lower; measured on Argo 3.7.6.
"""


def read_seconds(run: Run) -> dict[str, float]:
    """Return template of a stage → the median of the seconds that it took in `run`. All artifacts
    of a stage count together, under whatever names its tasks were drawn."""
    seconds: dict[str, list[float]] = {}
    for entry in run.entries:
        # A plan names stages by their templates.
        template = entry.manifest.stage.replace("_", "-")
        seconds.setdefault(template, []).append(entry.seconds)
    return {stage: statistics.median(samples) for stage, samples in seconds.items()}


@dataclass
class Usage:
    """Seconds of a workflow, one stage after another, and what is known of them.

    Attributes:
        total_s: of the whole workflow.
        device_s: seconds times accelerators.
        terms: how `total_s` comes about, a text for each stage.
        unknown: stages whose seconds are not known; they are not in the sums.
        unknown_devices: those of `unknown` that hold accelerators.
    """

    total_s: float
    device_s: float = 0.0
    terms: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unknown_devices: list[str] = field(default_factory=list)


def compute_usage(pods: PlannedPods, seconds: Mapping[str, float]) -> Usage:
    """Add up the `seconds` of stages, by their templates. Pods that are neither stages nor servers,
    such as the step ``continue``, count only as pauses (`REQUEUE_S`)."""
    usage = Usage(total_s=REQUEUE_S * pods.counts.total)
    server_devices = 0
    for name, pod in pods.by_template.items():
        devices = pod.resources.accelerators
        if isinstance(pod, ServerPlan):
            server_devices += devices * pod.replicas
        if not isinstance(pod, StagePlan):
            continue
        devices *= pod.nodes
        count = pods.counts.stages[name]
        # A JobSet runs under another name than its stage.
        stage_s = seconds.get(pod.template)
        if stage_s:
            work_s = count * stage_s
            usage.total_s += work_s
            usage.device_s += work_s * devices
            usage.terms.append(f"{name} {count} × {stage_s:.3g} s")
            continue
        usage.unknown.append(name)
        if devices:
            usage.unknown_devices.append(name)
    # Servers live from the first pod to the last at most.
    usage.device_s += server_devices * usage.total_s
    return usage


def estimate_cost(
    workflow: JsonMapping,
    seconds: Mapping[str, float],
    bound: str,
    source: str,
    price: float | None,
) -> Iterator[str]:
    """Yield the lines that state a workflow's hours, and their cost.

    Args:
        workflow: as it is rendered.
        seconds: of each stage, by its template.
        bound: ``at most`` or ``about``.
        source: where the seconds come from, in words.
        price: of an accelerator hour; None: the cost is left out.

    Raises:
        UserError: the workflow carries no plan.
    """
    pods = list_planned_pods(workflow, read_plan(workflow))
    usage = compute_usage(pods, seconds)
    hours = usage.total_s / 3600
    line = f"hours: {bound} {hours:.3g}, {source}, one stage after another: "
    line += ", ".join(usage.terms)
    if usage.unknown:
        unknown = ", ".join(usage.unknown)
        line += f", without {unknown}, of which it says nothing"
    yield line
    pause = f"{REQUEUE_S:g} s for each of at most {format_count(pods.counts.total, 'pod')}"
    yield f"  of these {pause}, until Argo looks at the workflow again"
    device_hours = usage.device_s / 3600
    line = f"accelerator hours: {bound} {device_hours:.3g}"
    if price is not None:
        cost = device_hours * price
        line += f" × {price:g} = {cost:.4g}"
    # An unknown stage without accelerators does not change the price.
    if usage.unknown_devices:
        unknown = ", ".join(usage.unknown_devices)
        line += f", without {unknown}"
    yield line
