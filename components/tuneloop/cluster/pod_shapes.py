"""The pods of a workflow as the API server will see them: all containers, with Argo's own, and what
a namespace's LimitRanges add.

`cluster/capacity.py` and `cluster/node_room.py` go by it. Tests:
`tests/unit/cluster/test_capacity.py`, `tests/extensions/sharing/test_claims.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

from tuneloop.cluster.pod_requests import (
    Amounts,
    count_servers,
    read_quantities,
    sum_pod,
)
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.argo_pod import list_pods
from tuneloop.workflow.quantities import parse_resource_quantity

KINDS = ("requests", "limits")


@dataclass(frozen=True)
class PodShape:
    """What a pod of a template asks for.

    Attributes:
        template: its name.
        containers: those that run at the same time; each has ``name`` and ``resources``.
        init_containers: those that run before, one after another.
        count: how many such pods there are at a time: of a server, or of a job.
        is_server: whether it runs as long as the run.
        node_selector: labels of its nodes.
        tolerations: of taints, as in Kubernetes.
    """

    template: str
    containers: Sequence[JsonMapping]
    init_containers: Sequence[JsonMapping] = ()
    count: int = 1
    is_server: bool = False
    node_selector: JsonMapping = field(default_factory=dict)
    tolerations: Sequence[JsonMapping] = ()

    @property
    def all_containers(self) -> list[JsonMapping]:
        """The containers of the pod, in no order that matters."""
        return list(self.containers) + list(self.init_containers)

    def sum(self, kind: str) -> Amounts:
        """Sum the requests or the limits of one pod; a resource without any is left out."""
        return sum_pod(self.containers, self.init_containers, kind)

    def list_lacking(self, kind: str, resource: str) -> list[str]:
        """List the containers that have no request, or no limit, of a resource."""
        return [
            item["name"]
            for item in self.all_containers
            if resource not in read_quantities(item, kind)
        ]


def list_pod_shapes(workflow: JsonMapping) -> list[PodShape]:
    """List the pods of a workflow's templates.

    A pod has the fields that `workflow/argo_pod.py: build_argo_pod` copies, and no others: another
    one that is read here is copied there first.
    """
    spec = workflow["spec"]
    servers = count_servers(workflow) if spec.get("templates") else {}
    shapes: list[PodShape] = []
    for template in spec.get("templates", ()):
        name = template["name"]
        for pod, count in list_pods(spec, template):
            shape = PodShape(
                template=name,
                containers=pod["containers"],
                init_containers=pod.get("initContainers") or (),
                count=servers.get(name, count),
                is_server=name in servers,
                node_selector=pod.get("nodeSelector") or {},
                tolerations=pod.get("tolerations") or (),
            )
            shapes.append(shape)
    return shapes


@dataclass
class ContainerLimits:
    """What the LimitRanges of a namespace say about a container.

    Their minima, ratios, and limits of a whole pod are not read.

    Attributes:
        name: of the LimitRange, or of several.
        default_limits, default_requests: for containers that have none.
        maximum: the most that a container may have.
    """

    name: str = ""
    default_limits: JsonObject = field(default_factory=dict)
    default_requests: JsonObject = field(default_factory=dict)
    maximum: dict[str, Decimal] = field(default_factory=dict)

    def add(self, limit_range: Any) -> None:
        """Add a LimitRange of the API."""
        for item in limit_range.spec.limits:
            if item.type != "Container":
                continue
            self.name = ", ".join(filter(None, (self.name, limit_range.metadata.name)))
            self.default_limits |= item.default or {}
            self.default_requests |= item.default_request or {}
            for resource, quantity in (item.max or {}).items():
                amount = parse_resource_quantity(quantity)
                self.maximum[resource] = min(amount, self.maximum.get(resource, amount))

    def complete(self, shape: PodShape) -> PodShape:
        """Return the pod as the API server completes it."""
        return replace(
            shape,
            containers=[self._complete(item) for item in shape.containers],
            init_containers=[self._complete(item) for item in shape.init_containers],
        )

    def _complete(self, container: JsonMapping) -> JsonObject:
        """Return a container with the defaults of what it does not say."""
        resources = container.get("resources") or {}
        limits = self.default_limits | (resources.get("limits") or {})
        # Without a request, the limit that a container has itself counts, and not the default.
        own_limits = resources.get("limits") or {}
        requests = self.default_requests | own_limits | (resources.get("requests") or {})
        return dict(container) | {"resources": {"limits": limits, "requests": requests}}
