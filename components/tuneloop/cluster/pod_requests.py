"""What the pods of a workflow request, and how many servers it has at a time.

Which pods a template has is read by `workflow/argo_pod.py: list_pods`: of jobs it knows the JobSet
alone. Tests: `tests/unit/argo/test_pods.py` and `test_jobset.py`.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.argo_pod import list_pods
from tuneloop.workflow.manifest import list_calls
from tuneloop.workflow.quantities import parse_resource_quantity

Amounts = dict[str, Decimal]
"""Resource name → amount, in cores, bytes or pieces."""
BYTES = ("memory", "ephemeral-storage")
"""Resources whose amount is in bytes."""


def format_amount(resource: str, amount: Decimal) -> str:
    """Format an amount with its resource for people, as in ``cpu 1.02`` or ``memory 6.3Gi``."""
    if resource.rpartition(".")[2] in BYTES:
        return f"{resource} {amount / 2**30:.2f}".rstrip("0").rstrip(".") + "Gi"
    return f"{resource} {amount.normalize():f}"


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


def compute_pod_requests(template: JsonMapping, spec: JsonMapping | None = None) -> Amounts:
    """Compute the resources that the pod of a template requests, or all pods of its job.

    Args:
        template: of a workflow.
        spec: of the workflow, which patches all its pods; None: it patches none.

    Returns:
        Resource → amount. A limit without a request counts as one, as for Kubernetes.
    """
    total: Amounts = {}
    # Kueue admits all pods of a JobSet together. `argo/jobset.py` renders one replica of each
    # replicated job.
    for pod, count in list_pods(spec or {}, template):
        requests = sum_pod(pod["containers"], pod.get("initContainers") or (), "requests")
        add_amounts(total, requests, count)
    return total


def sum_pod(
    containers: Sequence[JsonMapping], init_containers: Sequence[JsonMapping], kind: str
) -> Amounts:
    """Sum the requests or the limits of a pod's containers; a resource without any is left out."""
    total: Amounts = {}
    for container in containers:
        add_amounts(total, read_amounts(container, kind))
    for container in init_containers:
        # A sidecar runs as long as the pod.
        if container.get("restartPolicy") == "Always":
            add_amounts(total, read_amounts(container, kind))
    # The pod has room for the largest of those that run before.
    for container in init_containers:
        for resource, amount in read_amounts(container, kind).items():
            total[resource] = max(amount, total.get(resource, amount))
    return total


def read_quantities(container: JsonMapping, kind: str) -> JsonObject:
    """Read the requests or the limits of a container. A limit without a request is one."""
    resources = container.get("resources") or {}
    quantities: JsonObject = dict(resources.get("limits") or {})
    if kind == "requests":
        quantities |= resources.get("requests") or {}
    return quantities


def read_amounts(container: JsonMapping, kind: str) -> Amounts:
    """Read the amounts of `read_quantities`, as far as they are known before the run."""
    amounts: Amounts = {}
    for resource, quantity in read_quantities(container, kind).items():
        if "{{" not in str(quantity):
            amounts[resource] = parse_resource_quantity(quantity)
        else:
            # An expression chooses between texts: a retry may have the largest. It is that of
            # ``memory_on_retry`` in `argo/pod_fields.py`.
            choices = re.findall(r"'([\d.][\w.+-]*)'", str(quantity))
            if choices:
                amounts[resource] = max(parse_resource_quantity(choice) for choice in choices)
    return amounts


def add_amounts(total: Amounts, amounts: Mapping[str, Decimal], count: int = 1) -> None:
    """Add `count` times `amounts` to `total`."""
    for name, amount in amounts.items():
        total[name] = total.get(name, Decimal(0)) + count * amount
