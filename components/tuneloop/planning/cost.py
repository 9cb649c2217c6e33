"""How many hours a workflow takes, and what its accelerators cost, by the seconds of its stages."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tuneloop.planning.plan import REQUEUE, count_all_pods, count_pods
from tuneloop.runs.run_record import Run
from tuneloop.workflow.manifest import list_calls
from tuneloop.workflow.pod_loop import expand_pod
from tuneloop.workflow.rendered_stages import read_stage


def read_seconds(run: Run) -> dict[str, float]:
    """Return stage → the median of the seconds that it took in `run`."""
    seconds: dict[str, list[float]] = {}
    for entry in run.entries:
        seconds.setdefault(entry.manifest.stage.replace("_", "-"), []).append(entry.seconds)
    return {stage: statistics.median(took) for stage, took in seconds.items()}


def count_replicas(templates: Mapping[str, Mapping[str, Any]]) -> Counter[str]:
    """Count how often the template that calls it most calls each: of a server its replicas."""
    calls = Counter[str]()
    for template in templates.values():
        calls |= Counter(task["template"] for task in list_calls(template))
    return calls


def estimate_cost(
    workflow: Mapping[str, Any],
    seconds: Mapping[str, float],
    bound: str,
    how: str,
    price: float | None,
) -> Iterator[str]:
    """Yield lines: a workflow's hours, by the `seconds` of its stages, and their cost at `price` a device hour.
    `bound`: ``at most`` or ``about``; `how` the seconds came about."""
    unfolded, grain = expand_pod(workflow)
    templates = {template["name"]: template for template in unfolded["spec"]["templates"]}
    pods = count_pods(unfolded)
    held = 0.0
    parts: list[str] = []
    unknown: dict[str, int] = {}
    every = count_all_pods(unfolded, grain, pods)[0]
    servers = 0
    calls = count_replicas(templates)
    total = REQUEUE * every
    for name, count in pods.items():
        stage = read_stage(templates[name])
        devices = stage.accelerators * stage.nodes
        if stage.serves:
            servers += devices * calls[name]
        elif stage.component and (each := seconds.get(name)):
            total += count * each
            held += count * each * devices
            parts.append(f"{name} {count} × {each:.3g} s")
        elif stage.component:
            unknown[name] = devices
    held += servers * total  # from its first pod to its last at most
    without = f", without {', '.join(unknown)}, of which it says nothing" if unknown else ""
    yield f"hours: {bound} {total / 3600:.3g}, {how}, one stage after another: {', '.join(parts)}{without}"
    yield f"  of these {REQUEUE:g} s for each of at most {every} pods, until Argo looks at the workflow again"
    text = f"accelerator hours: {bound} {held / 3600:.3g}"
    without = (
        f", without {', '.join(left)}"
        if (left := [name for name, devices in unknown.items() if devices])
        else ""
    )
    yield (
        text + (f" × {price:g} = {held / 3600 * price:.4g}" if price is not None else "") + without
    )
