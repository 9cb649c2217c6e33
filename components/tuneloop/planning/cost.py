"""How many hours a workflow takes, and what its accelerators cost, by the seconds of its stages."""

import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from tuneloop.core.json_types import JsonMapping
from tuneloop.planning.counts import Counts, count_runs
from tuneloop.planning.plan import find_process
from tuneloop.runs.run_record import Run
from tuneloop.workflow.plan import RunPlan, ServerPlan, StagePlan, read_plan

REQUEUE_S = 10.0
"""Seconds between two pods that follow one another: Argo looks at a workflow again so long after a pod has ended (its
controller's ``DEFAULT_REQUEUE_TIME``, which an admin may lower; measured on Argo 3.7.6)."""


def read_seconds(run: Run) -> dict[str, float]:
    """Return stage → the median of the seconds that it took in `run`."""
    seconds: dict[str, list[float]] = {}
    for entry in run.entries:
        seconds.setdefault(entry.manifest.stage.replace("_", "-"), []).append(entry.seconds)
    return {stage: statistics.median(took) for stage, took in seconds.items()}


@dataclass
class Usage:
    """Seconds of a workflow, one stage after another, and what is known of them.

    Attributes:
        total_s: of the whole workflow.
        device_s: seconds times accelerators.
        terms: how `total_s` comes about.
        unknown: stages of unknown seconds.
        unknown_devices: those of them that hold accelerators.
    """

    total_s: float
    device_s: float = 0.0
    terms: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    unknown_devices: list[str] = field(default_factory=list)


def compute_usage(plan: RunPlan, counts: Counts, seconds: Mapping[str, float]) -> Usage:
    """Add up the `seconds` of stages, by their templates."""
    usage = Usage(total_s=REQUEUE_S * counts.total)
    server_devices = 0
    for name, count in counts.stages.items():
        pod = find_process(plan, name)
        if isinstance(pod, ServerPlan):
            server_devices += pod.resources.accelerators * pod.replicas
        if not isinstance(pod, StagePlan):
            continue
        devices = pod.resources.accelerators * pod.nodes
        stage_s = seconds.get(pod.template)
        if stage_s:
            usage.total_s += count * stage_s
            usage.device_s += count * stage_s * devices
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
    how: str,
    price: float | None,
) -> Iterator[str]:
    """Yield the lines that state a workflow's hours, and their cost.

    Args:
        workflow: as it is rendered.
        seconds: of each stage, by its template.
        bound: ``at most`` or ``about``.
        how: how the seconds came about.
        price: of an accelerator hour; None: the cost is left out.
    """
    plan = read_plan(workflow)
    counts = count_runs(workflow, plan)
    usage = compute_usage(plan, counts, seconds)
    without = ""
    if usage.unknown:
        without = f", without {', '.join(usage.unknown)}, of which it says nothing"
    hours = f"hours: {bound} {usage.total_s / 3600:.3g}, {how}, one stage after another"
    yield f"{hours}: {', '.join(usage.terms)}{without}"
    pause = f"{REQUEUE_S:g} s for each of at most {counts.total} pods"
    yield f"  of these {pause}, until Argo looks at the workflow again"
    device_hours = usage.device_s / 3600
    text = f"accelerator hours: {bound} {device_hours:.3g}"
    if price is not None:
        text += f" × {price:g} = {device_hours * price:.4g}"
    if usage.unknown_devices:
        text += f", without {', '.join(usage.unknown_devices)}"
    yield text
