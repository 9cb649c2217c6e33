"""What the pods of a workflow request, and how many servers it has at a time."""

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from decimal import Decimal

from tuneloop.argo.quantities import parse_resource_quantity
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.manifest import list_calls, parse_applied_object
from tuneloop.workflow.pod_settings import MAIN
from tuneloop.workflow.strategic_merge import apply_patch

Amounts = dict[str, Decimal]
"""Resource name → amount, in cores, bytes or pieces."""
BYTES = ("memory", "ephemeral-storage")
"""Resources whose amount is in bytes."""


def format_amount(resource: str, amount: Decimal) -> str:
    """Format an amount with its resource for people, as in ``cpu 1.02`` or ``memory 6.3Gi``."""
    if resource.rpartition(".")[2] in BYTES:
        return f"{resource} {amount / 2**30:.2f}".rstrip("0").rstrip(".") + "Gi"
    return f"{resource} {amount.normalize():f}"


def read_added_containers(workflow: JsonMapping) -> list[JsonObject]:
    """Read the containers that Argo adds to a pod: their resources are set by a patch."""
    patch = json.loads(workflow["spec"].get("podSpecPatch") or "{}")
    return list(patch.get("containers", ()))


def count_servers(workflow: JsonMapping) -> dict[str, int]:
    """Count the pods of each daemon's template that a graph has at a time."""
    templates = workflow["spec"]["templates"]
    graphs = [Counter(call["template"] for call in list_calls(template)) for template in templates]
    counts: dict[str, int] = {}
    for template in templates:
        if template.get("daemon"):
            name = template["name"]
            # A template that nothing calls is the entrypoint of its workflow.
            counts[name] = max([1] + [calls[name] for calls in graphs])
    return counts


def compute_pod_requests(template: JsonMapping, added: Iterable[JsonMapping] = ()) -> Amounts:
    """Compute the resources that the pod of a template requests, or all pods of its job.

    Args:
        template: of a workflow.
        added: the containers that Argo adds to a pod of its own, but not to those of a job.

    Returns:
        Resource → amount. A limit without a request counts as one, as for Kubernetes.
    """
    total: Amounts = {}
    job = parse_applied_object(template)
    if job:
        # Kueue admits all pods of a JobSet together. `argo/jobset.py` renders one replica of each
        # replicated job.
        for replicated in job["spec"]["replicatedJobs"]:
            spec = replicated["template"]["spec"]
            for container in spec["template"]["spec"]["containers"]:
                requests = compute_pod_requests({"container": container})
                add_amounts(total, requests, spec["parallelism"])
        return total
    patch = json.loads(template.get("podSpecPatch") or "{}")
    container = template.get("container") or template.get("script") or {}
    for item in patch.get("containers", ()):
        if item["name"] == MAIN:
            container = apply_patch(container, item, "Container")
    containers = [container]
    # Init containers of a template are sidecars, too: they run as long as the pod.
    for items in (template.get("sidecars", ()), template.get("initContainers", ()), added):
        containers.extend(items)
    for container in containers:
        resources = container.get("resources") or {}
        quantities = dict(resources.get("limits") or {})
        quantities.update(resources.get("requests") or {})
        for name, quantity in quantities.items():
            # A parameter is known only in the run.
            if "{{" not in str(quantity):
                add_amounts(total, {name: parse_resource_quantity(quantity)})
    return total


def add_amounts(total: Amounts, amounts: Mapping[str, Decimal], count: int = 1) -> None:
    """Add `count` times `amounts` to `total`."""
    for name, amount in amounts.items():
        total[name] = total.get(name, Decimal(0)) + count * amount
