"""The room that nodes have for pods of runs.

A pod goes where its requests, node selector and tolerations allow it. Its affinity, topology and
host ports are not looked at: a field has to be in `PodShape` (`cluster/pod_shapes.py:
list_pod_shapes`) before it can count here. `cluster/capacity.py` warns by it; tests are in
`tests/unit/cluster/test_capacity.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from tuneloop.cluster.pod_requests import Amounts, add_amounts
from tuneloop.cluster.pod_shapes import PodShape
from tuneloop.cluster.problems import ABSENT, UNSEEN, find_object
from tuneloop.core.json_types import JsonMapping
from tuneloop.kube.connection import Connection
from tuneloop.workflow.quantities import parse_resource_quantity
from tuneloop.workflow.settings import RUN_LABEL

MANY_NODES = 50
"""From so many nodes on, what other pods request is not read: it is much, and changes all the time."""


@dataclass
class NodeRoom:
    """A node, and what it has beside pods that are of no run.

    Attributes:
        name: of the node.
        labels: of the node.
        taints: those that keep pods away: key, value, effect.
        free: resource → amount.
    """

    name: str
    labels: JsonMapping
    taints: Sequence[Any]
    free: Amounts = field(default_factory=dict)

    def admits(self, shape: PodShape) -> bool:
        """Return whether the node's labels and taints let a pod run there."""
        is_selected = all(
            self.labels.get(key) == value for key, value in shape.node_selector.items()
        )
        return is_selected and all(_is_tolerated(taint, shape) for taint in self.taints)

    def can_hold(self, shape: PodShape) -> bool:
        """Return whether one pod has room there."""
        requests = shape.sum("requests")
        # A node says nothing of a resource that it does not have.
        has_room = all(
            self.free.get(key, Decimal(0)) >= amount for key, amount in requests.items() if amount
        )
        return has_room and self.admits(shape)


def _is_tolerated(taint: Any, shape: PodShape) -> bool:
    """Return whether a pod tolerates a taint that keeps others away."""
    for toleration in shape.tolerations:
        has_effect = toleration.get("effect") in (None, "", taint.effect)
        has_key = toleration.get("key") in (None, "", taint.key)
        has_value = toleration.get("operator") == "Exists" or (toleration.get("value") or "") == (
            taint.value or ""
        )
        if has_effect and has_key and has_value:
            return True
    return False


def find_node_rooms(cluster: Connection) -> list[NodeRoom]:
    """Find the nodes that take pods, and their room; none where the account may not list nodes, or
    they do not say what they have.
    """
    nodes = find_object(cluster.core.list_node, _request_timeout=30)
    if nodes in (ABSENT, UNSEEN):
        return []
    rooms: dict[str, NodeRoom] = {}
    for node in nodes.items:
        if not node.status.allocatable or (node.spec and node.spec.unschedulable):
            continue
        taints = (node.spec.taints if node.spec else None) or ()
        rooms[node.metadata.name] = NodeRoom(
            name=node.metadata.name,
            labels=node.metadata.labels or {},
            taints=[taint for taint in taints if taint.effect in ("NoSchedule", "NoExecute")],
            free={
                key: parse_resource_quantity(quantity)
                for key, quantity in node.status.allocatable.items()
            },
        )
    if len(rooms) < MANY_NODES:
        _subtract_other_pods(cluster, rooms)
    return list(rooms.values())


def _subtract_other_pods(cluster: Connection, rooms: dict[str, NodeRoom]) -> None:
    """Subtract what pods request that are of no run, and so stay."""
    pods = find_object(
        cluster.core.list_pod_for_all_namespaces,
        field_selector="status.phase!=Succeeded,status.phase!=Failed",
        label_selector=f"!{RUN_LABEL}",
        _request_timeout=30,
    )
    for pod in () if pods in (ABSENT, UNSEEN) else pods.items:
        room = rooms.get(pod.spec.node_name or "")
        if room is None:
            continue
        for container in pod.spec.containers:
            requests = (container.resources and container.resources.requests) or {}
            for key, quantity in requests.items():
                add_amounts(room.free, {key: -parse_resource_quantity(quantity)})


def pack_pods(shapes: Sequence[PodShape], rooms: Sequence[NodeRoom]) -> bool:
    """Return whether all these pods have room on nodes at a time, the largest first."""
    # The rooms themselves are asked again, for other pods.
    remaining = [
        NodeRoom(name=room.name, labels=room.labels, taints=room.taints, free=dict(room.free))
        for room in rooms
    ]
    total: Amounts = {}
    for node in rooms:
        add_amounts(total, node.free)

    def measure(shape: PodShape) -> Decimal:
        """Return the largest share of what is free in all rooms, of any resource."""
        shares = [Decimal(0)]
        for key, amount in shape.sum("requests").items():
            if total.get(key):
                shares.append(amount / total[key])
        return max(shares)

    for shape in sorted(shapes, key=measure, reverse=True):
        for _ in range(shape.count):
            room = next((room for room in remaining if room.can_hold(shape)), None)
            if room is None:
                return False
            add_amounts(room.free, {key: -value for key, value in shape.sum("requests").items()})
    return True
