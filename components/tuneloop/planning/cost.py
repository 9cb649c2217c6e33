"""How many hours a workflow takes at most, and what its accelerators cost, by the seconds of a recorded run."""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from tuneloop.planning.plan import REQUEUE, count_all_pods, count_pods
from tuneloop.runs.run_record import Run
from tuneloop.workflow.manifest import list_calls
from tuneloop.workflow.pod_loop import expand_pod
from tuneloop.workflow.rendered_stages import read_stage


def estimate_cost(workflow: Mapping[str, Any], run: Run, price: float | None) -> Iterator[str]:
    """Yield lines: a workflow's hours, by what its stages took in `run`, and their cost at `price` a device hour."""
    seconds: dict[str, list[float]] = {}
    for entry in run.entries:
        seconds.setdefault(entry.manifest.stage.replace("_", "-"), []).append(entry.seconds)
    unfolded, grain = expand_pod(workflow)
    templates = {template["name"]: template for template in unfolded["spec"]["templates"]}
    pods, held, parts, unknown = count_pods(unfolded), 0.0, list[str](), list[str]()
    every, servers = count_all_pods(unfolded, grain, pods)[0], 0
    calls = Counter[str]()  # of a template, where most are: the replicas of a server
    for template in templates.values():
        calls |= Counter(task["template"] for task in list_calls(template))
    total = REQUEUE * every
    for name, count in pods.items():
        stage = read_stage(templates[name])
        devices = stage.accelerators * stage.nodes
        if stage.serves:
            servers += devices * calls[name]
        elif stage.component and (took := seconds.get(name)):
            each = statistics.median(took)
            total += count * each
            held += count * each * devices
            parts.append(f"{name} {count} × {each:.3g} s")
        elif stage.component:
            unknown.append(name)
    held += servers * total  # from its first pod to its last at most
    without = f", without {', '.join(unknown)}, which {run.name} did not run" if unknown else ""
    yield f"hours: at most {total / 3600:.3g}, as {run.name} took, one stage after another: {', '.join(parts)}{without}"
    yield f"  of these {REQUEUE:g} s for each of at most {every} pods, until Argo looks at the workflow again"
    text = f"accelerator hours: at most {held / 3600:.3g}"
    yield text + (f" × {price:g} = {held / 3600 * price:.4g}" if price is not None else "")
