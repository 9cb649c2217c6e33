"""Compare what a run asks for with the ResourceQuotas and LimitRanges of its namespace, and with the
room on the nodes.

Kueue's quota is checked in `tuneloop.cluster.queue_problems`. What is never possible is a problem.
What may have to wait, or what several runs can lock, is a warning: the cluster may grow.

`find_capacity_problems` is an entry of `cluster/preflight.py: CHECKS`; `find_capacity_warnings` is
called by `cluster/submission.py: Submission.check` and `cluster/doctor.py: check_argo_capacity`.
"""

from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

from tuneloop.cluster.node_room import NodeRoom, find_node_rooms, pack_pods
from tuneloop.cluster.pod_requests import Amounts, add_amounts, format_amount, read_amounts
from tuneloop.cluster.pod_shapes import KINDS, ContainerLimits, PodShape, list_pod_shapes
from tuneloop.cluster.problems import ABSENT, UNSEEN, Problem, find_object
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.kube.connection import Connection
from tuneloop.workflow.quantities import parse_resource_quantity

PODS = "pods"
"""The key of a ResourceQuota that counts pods."""
FEW_RUNS = 4
"""A lock is warned of where the servers and a stage of fewer runs than this fit at a time: so many
runs of one kind with servers at a time are rare."""
# The parts of the messages about nodes.
NO_AUTOSCALER = "unless the cluster adds nodes by itself,"
SHOW_NODES = "kubectl describe nodes"
LOWER = " shows what they hold; lower cluster.ROLE.cpu or cluster.ROLE.memory, or add a node"
SCOPES = {"NotTerminating", "NotBestEffort"}
"""The scopes of a ResourceQuota that hold for all pods of a run. A quota with any other scope is
not looked at."""


def find_capacity_problems(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Find what the ResourceQuotas and LimitRanges of the namespace never allow."""
    limits = read_container_limits(cluster)
    shapes = list_pod_shapes(workflow)
    for shape in shapes:
        yield from _check_container_limits(cluster, limits, shape)
    completed = [limits.complete(shape) for shape in shapes]
    peak = compute_peak(completed)
    for quota in _list_quotas(cluster):
        hard = _read_hard(quota)
        yield from _check_quota_coverage(cluster, quota, hard, completed)
        for key, amount in peak.items():
            if key in hard and amount > hard[key]:
                yield Problem(
                    "quota",
                    quota.metadata.name,
                    f"allows {format_amount(key, hard[key])}, and the run asks for"
                    f" {format_amount(key, amount)} at a time ({_describe_peak(completed)})",
                    command=f"kubectl -n {cluster.namespace} describe resourcequota"
                    f" {quota.metadata.name}",
                    otherwise=", or lower cluster.ROLE.cpu or cluster.ROLE.memory",
                )


def find_capacity_warnings(cluster: Connection, workflow: JsonMapping) -> Iterator[Problem]:
    """Find where a run would wait for room, and where several runs would wait for one another."""
    limits = read_container_limits(cluster)
    shapes = [limits.complete(shape) for shape in list_pod_shapes(workflow)]
    if not shapes:
        return
    peak = compute_peak(shapes)
    for quota in _list_quotas(cluster):
        name = quota.metadata.name
        hard = _read_hard(quota)
        used = _read_amounts((quota.status and quota.status.used) or {})
        command = f"kubectl -n {cluster.namespace} describe resourcequota {name}"
        for key, amount in peak.items():
            # What is never possible is a problem, and is said there.
            if key not in hard or amount > hard[key]:
                continue
            free = hard[key] - used.get(key, Decimal(0))
            if free < amount:
                yield Problem(
                    "quota",
                    name,
                    f"has {format_amount(key, free)} of {format_amount(key, hard[key])} left, and the"
                    f" run asks for {format_amount(key, amount)} at a time: its pods wait until"
                    " others end",
                    command=command,
                )
        lock = describe_lock(shapes, hard)
        if lock:
            yield Problem("quota", name, lock, command=command, otherwise=" shows who uses it")
    rooms = find_node_rooms(cluster)
    if rooms:
        yield from _check_nodes(cluster, shapes, rooms)


def read_container_limits(cluster: Connection) -> ContainerLimits:
    """Read what the LimitRanges of the namespace say about containers."""
    limits = ContainerLimits()
    ranges = find_object(cluster.core.list_namespaced_limit_range, cluster.namespace)
    for limit_range in () if ranges in (ABSENT, UNSEEN) else ranges.items:
        limits.add(limit_range)
    return limits


def _list_quotas(cluster: Connection) -> list[Any]:
    """List the ResourceQuotas of the namespace that count the pods of a run."""
    quotas = find_object(cluster.core.list_namespaced_resource_quota, cluster.namespace)
    if quotas in (ABSENT, UNSEEN):
        return []
    return [
        quota
        for quota in quotas.items
        if set(quota.spec.scopes or ()) <= SCOPES and not quota.spec.scope_selector
    ]


def _read_hard(quota: Any) -> Amounts:
    """Read the limits of a ResourceQuota that pods count on: ``limits.cpu``, ``pods``."""
    return _read_amounts(quota.spec.hard or {})


def _read_amounts(quantities: Mapping[str, str]) -> Amounts:
    """Read quantities of a ResourceQuota, under the key that `compute_peak` has for each.

    Keys that no pod counts on, such as ``services`` or ``persistentvolumeclaims``, are left out.
    """
    amounts: Amounts = {}
    for key, quantity in quantities.items():
        # A name alone means requests.
        if key in ("cpu", "memory", "ephemeral-storage"):
            key = f"requests.{key}"
        elif key == "count/pods":
            key = PODS
        if key == PODS or key.startswith(("requests.", "limits.")):
            amounts[key] = parse_resource_quantity(quantity)
    return amounts


def _check_container_limits(
    cluster: Connection, limits: ContainerLimits, shape: PodShape
) -> Iterator[Problem]:
    """Check a pod against the LimitRanges: what is above a maximum, or above a default limit."""
    completed = limits.complete(shape)
    command = f"kubectl -n {cluster.namespace} describe limitrange {limits.name}"
    for container in completed.all_containers:
        requests = read_amounts(container, "requests")
        container_limits = read_amounts(container, "limits")
        subject = f"{shape.template}, container {container['name']}"
        for resource, amount in requests.items():
            limit = container_limits.get(resource, amount)
            maximum = limits.maximum.get(resource)
            if amount > limit:
                yield Problem(
                    subject,
                    format_amount(resource, amount),
                    f"is requested, and LimitRange {limits.name} gives it a limit of"
                    f" {format_amount(resource, limit)}",
                    command="tuneloop … --set cluster.limits=true",
                    otherwise=" gives it one of its own",
                )
            elif maximum is not None and limit > maximum:
                yield Problem(
                    subject,
                    format_amount(resource, limit),
                    f"is more than LimitRange {limits.name} allows a container"
                    f" ({format_amount(resource, maximum)})",
                    command=command,
                    otherwise=", or lower it",
                )


def _check_quota_coverage(
    cluster: Connection, quota: Any, hard: Amounts, shapes: Sequence[PodShape]
) -> Iterator[Problem]:
    """Check that every container has what a ResourceQuota counts: else no pod is created."""
    for key in sorted(hard):
        kind, _, resource = key.partition(".")
        # A quota of an extended resource does not ask for it.
        if kind not in KINDS or resource not in ("cpu", "memory"):
            continue
        lacking: list[str] = []
        for shape in shapes:
            containers = shape.list_lacking(kind, resource)
            if containers:
                lacking.append(f"{shape.template} ({', '.join(containers)})")
        if lacking:
            yield Problem(
                "quota",
                quota.metadata.name,
                f"asks every container for {key}, and some have none: {'; '.join(lacking)}",
                command="tuneloop … --set cluster.limits=true",
                otherwise=", or an admin creates a LimitRange with defaults in namespace"
                f" {cluster.namespace}",
            )


def compute_peak(shapes: Sequence[PodShape]) -> Amounts:
    """Compute the most that a run has at a time: all its servers, and its largest stage.

    Returns:
        ``requests.cpu``, ``limits.memory``, ``pods`` and the like → amount.
    """
    servers: Amounts = {}
    # Of each resource by itself: stages run one after another, and a batch ends before the next one.
    largest: Amounts = {}
    for shape in shapes:
        amounts = count_pod(shape)
        if shape.is_server:
            add_amounts(servers, amounts)
            continue
        for key, amount in amounts.items():
            largest[key] = max(amount, largest.get(key, amount))
    add_amounts(servers, largest)
    return servers


def count_pod(shape: PodShape) -> Amounts:
    """Count what the pods of a template use of a ResourceQuota."""
    amounts: Amounts = {PODS: Decimal(shape.count)}
    for kind in KINDS:
        for resource, amount in shape.sum(kind).items():
            amounts[f"{kind}.{resource}"] = amount * shape.count
    return amounts


def _describe_peak(shapes: Sequence[PodShape]) -> str:
    """Describe what runs at a time."""
    servers = [shape.template for shape in shapes if shape.is_server]
    return f"{', '.join(servers)} beside its largest stage" if servers else "its largest stage"


def describe_lock(shapes: Sequence[PodShape], total: Amounts) -> str:
    """Describe how the servers of several runs of this kind can hold all of `total`; empty: they
    cannot, or only those of many runs (`FEW_RUNS`).

    Args:
        shapes: the pods of one run.
        total: what there is, under the keys of `compute_peak`; other keys are ignored.

    Returns:
        The end of a sentence that begins with the quota, or with the number of nodes.
    """
    servers = compute_peak([shape for shape in shapes if shape.is_server])
    stages = compute_peak([shape for shape in shapes if not shape.is_server])
    run_counts: dict[str, int] = {}
    server_counts: list[int] = []
    for key, server in servers.items():
        if key in total and server:
            stage = stages.get(key, Decimal(0))
            run_counts[key] = max(0, int((total[key] - stage) / server))
            server_counts.append(int(total[key] / server))
    if not run_counts:
        return ""
    key = min(run_counts, key=lambda name: (run_counts[name], name))
    runs = run_counts[key]
    # Where the servers of one more run do not fit either, that run only waits.
    most_servers = min(server_counts)
    if most_servers <= runs or not 0 < runs < FEW_RUNS:
        return ""
    stage = stages.get(key, Decimal(0))
    return (
        f"has room for {runs} at a time of runs like this one, and for the servers of {most_servers}"
        f" ({format_amount(key, total[key])}; of a run, its servers"
        f" {format_amount(key, servers[key])}, its largest stage {format_amount(key, stage)}):"
        " the servers of more runs hold all of it, and no run makes progress"
    )


def _check_nodes(
    cluster: Connection, shapes: Sequence[PodShape], rooms: Sequence[NodeRoom]
) -> Iterator[Problem]:
    """Check that nodes have room for each pod, for a run's servers beside a stage, and for as many
    runs as have room for their servers.
    """
    problem = _check_each_pod(shapes, rooms) or _check_pods_together(cluster, shapes, rooms)
    if problem:
        yield problem
        return
    total: Amounts = {}
    for room in rooms:
        add_amounts(total, {f"requests.{key}": amount for key, amount in room.free.items()})
    lock = describe_lock(shapes, total)
    if lock:
        yield Problem(
            "nodes",
            len(rooms),
            lock,
            command="kubectl get clusterqueues",
            otherwise=" shows the quota of servers: keep it below what the nodes have",
        )


def _check_each_pod(shapes: Sequence[PodShape], rooms: Sequence[NodeRoom]) -> Problem | None:
    """Find the pods for which no node has room, even alone."""
    misfits = [shape for shape in shapes if not any(room.can_hold(shape) for room in rooms)]
    if not misfits:
        return None
    largest: Amounts = {}
    for shape in misfits:
        for resource, amount in shape.sum("requests").items():
            largest[resource] = max(amount, largest.get(resource, amount))
    return Problem(
        ", ".join(shape.template for shape in misfits),
        _format_amounts(largest),
        f"fits on none of {len(rooms)} nodes ({_describe_largest(rooms, largest)}):"
        f" {NO_AUTOSCALER} such a pod waits for ever",
        command=SHOW_NODES,
        otherwise=LOWER,
    )


def _check_pods_together(
    cluster: Connection, shapes: Sequence[PodShape], rooms: Sequence[NodeRoom]
) -> Problem | None:
    """Find a stage for which nodes have no room beside the run's servers."""
    servers = [shape for shape in shapes if shape.is_server]
    for shape in shapes:
        pods = servers if shape.is_server else [*servers, shape]
        if pack_pods(pods, rooms):
            continue
        amounts: Amounts = {}
        for pod in pods:
            add_amounts(amounts, pod.sum("requests"), pod.count)
        return Problem(
            "cluster",
            cluster.context,
            f"{' and '.join(pod.template for pod in pods)} run at a time and ask for"
            f" {_format_amounts(amounts)}, which nodes do not have beside other pods"
            f" ({_describe_total(rooms, amounts)}): {NO_AUTOSCALER} the run waits for ever",
            command=SHOW_NODES,
            otherwise=LOWER,
        )
    return None


def _format_amounts(amounts: Amounts) -> str:
    """Format amounts of several resources."""
    return ", ".join(format_amount(resource, amounts[resource]) for resource in sorted(amounts))


def _describe_largest(rooms: Sequence[NodeRoom], amounts: Amounts) -> str:
    """Describe the most that a node has free of each resource of `amounts`."""
    texts: list[str] = []
    for resource in sorted(amounts):
        free = max(room.free.get(resource, Decimal(0)) for room in rooms)
        texts.append(f"at most {format_amount(resource, free)}")
    return ", ".join(texts)


def _describe_total(rooms: Sequence[NodeRoom], amounts: Amounts) -> str:
    """Describe what all nodes together have free of each resource of `amounts`."""
    total: Amounts = {}
    for resource in amounts:
        total[resource] = sum((room.free.get(resource, Decimal(0)) for room in rooms), Decimal(0))
    return f"{_format_amounts(total)} on {len(rooms)} nodes"
