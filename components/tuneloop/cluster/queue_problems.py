"""Find queues that would never admit a workflow's requests: Kueue leaves its pods waiting, and
reports nothing.
"""

import json
import shlex
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from tuneloop.argo.quantities import parse_resource_quantity
from tuneloop.cluster.problems import (
    ABSENT,
    APPLY,
    INSTALL,
    UNSEEN,
    Problem,
    find_object,
    is_absent,
)
from tuneloop.cluster.run_workflows import find_queued_templates, list_queues
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kube.connection import Connection
from tuneloop.workflow.manifest import list_calls, parse_applied_object
from tuneloop.workflow.pod_settings import MAIN
from tuneloop.workflow.settings import PRIORITY_LABEL, QUEUE, QUEUE_LABEL, SAMPLER_QUEUE
from tuneloop.workflow.strategic_merge import apply_patch

KUEUE = ("kueue.x-k8s.io", "v1beta2")
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""The label of every namespace that has its name."""
Amounts = dict[str, Decimal]
"""Resource name → amount, in cores, bytes or pieces."""


def find_queue_problems(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Find queues that would never admit the requests of a workflow's templates."""
    queues_by_source: dict[str, dict[str, JsonObject]] = defaultdict(dict)
    for name in list_queues(workflow):
        queue = find_object(cluster.get, *KUEUE, "localqueues", name)
        if queue is ABSENT:
            # The sampler's queue exists only where somebody has divided the quota.
            other = f", or --set cluster.sampler.queue={QUEUE}" if name == SAMPLER_QUEUE else ""
            yield Problem(
                "queue",
                name,
                f"is not a LocalQueue of namespace {cluster.namespace}: stages would wait for ever",
                command=APPLY,
                otherwise=f" (or yours){other}, or {INSTALL}",
            )
        elif queue is not UNSEEN:
            queues_by_source[queue["spec"]["clusterQueue"]][name] = queue
    for name, queues in queues_by_source.items():
        yield from _check_cluster_queue(cluster, workflow, name, queues)
    priorities: set[str] = set()
    for labels in find_queued_templates(workflow).values():
        if PRIORITY_LABEL in labels:
            priorities.add(labels[PRIORITY_LABEL])
    read_class = cluster.custom.get_cluster_custom_object
    for priority in sorted(priorities):
        if is_absent(read_class, *KUEUE, "workloadpriorityclasses", priority):
            finding = f"is not a WorkloadPriorityClass of {cluster.context}"
            yield Problem("priority", priority, finding, command=APPLY, otherwise=" (or yours)")


def _find_cluster_queue(cluster: Connection, name: str) -> Any:
    """Return the ClusterQueue of a name, or ABSENT, or UNSEEN."""
    read_queue = cluster.custom.get_cluster_custom_object
    return find_object(read_queue, *KUEUE, "clusterqueues", name)


def _check_cluster_queue(
    cluster: Connection,
    workflow: JsonMapping,
    name: str,
    queues: Mapping[str, JsonMapping],
) -> Iterator[UserError]:
    """Check the ClusterQueue `name`, from which the LocalQueues of a workflow have their quota."""
    cluster_queue = _find_cluster_queue(cluster, name)
    if cluster_queue is ABSENT:
        finding = f"is of the ClusterQueue {name}, which does not exist"
        yield Problem("queue", ", ".join(queues), finding, command=APPLY, otherwise=" (or yours)")
        return
    for queue_name, queue in queues.items():
        for condition in queue.get("status", {}).get("conditions", ()):
            if condition["type"] == "Active" and condition["status"] != "True":
                yield Problem(
                    "queue",
                    queue_name,
                    f"admits nothing: {condition['message']}",
                    command=f"kubectl get clusterqueue {name} -o yaml",
                    otherwise=" says why",
                )
    if cluster_queue is not UNSEEN:
        spec = cluster_queue["spec"]
        yield from _check_namespace(cluster, spec.get("namespaceSelector"), name)
        yield from find_quota_problems(workflow, spec, queues, name)


def find_queue_warnings(cluster: Connection, workflow: JsonMapping) -> Iterator[Problem]:
    """Find rollout servers that are admitted one by one, or hold quota which stages wait for.

    A server holds its quota for the whole run: the servers of several runs can hold all of it, so
    that no stage is admitted.
    """
    server_queues: set[str] = set()
    stage_queues: set[str] = set()
    servers = count_servers(workflow)
    for name, labels in find_queued_templates(workflow).items():
        queues = server_queues if name in servers else stage_queues
        queues.add(labels[QUEUE_LABEL])
        count = servers.get(name, 1)
        if count > 1:
            yield Problem(
                "engine.replicas",
                count,
                "are admitted one by one: several runs can each get some of their servers, and wait"
                " for the others",
                command="kubectl get clusterqueues",
                otherwise=" shows the quota, which must suffice for all (docs/cluster.md, The queue)",
            )
    for queue in sorted(server_queues):
        borrowed = _list_quotas(cluster, queue, "borrowingLimit")
        # A cohort passes quota on only if one side may borrow, and the other may lend.
        if any(borrowed & _list_quotas(cluster, other, "lendingLimit") for other in stage_queues):
            yield Problem(
                "queue",
                queue,
                "gives rollout servers quota that stages wait for, as long as their runs last: the"
                " servers of several runs can hold all of it, and no run makes progress",
                command=f"tuneloop … --set cluster.sampler.queue={SAMPLER_QUEUE}",
                otherwise=" (docs/cluster.md, The queue)",
            )


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


def _list_resources(spec: JsonMapping) -> Iterator[JsonMapping]:
    """Yield the quotas of a ClusterQueue, each of one resource in one flavor."""
    for group in spec.get("resourceGroups", ()):
        for flavor in group["flavors"]:
            yield from flavor["resources"]


def _list_quotas(cluster: Connection, queue_name: str, limit: str) -> set[str]:
    """List the sources of a LocalQueue's quota: its ClusterQueue, and the cohort unless every
    `limit` is 0.
    """
    queue = find_object(cluster.get, *KUEUE, "localqueues", queue_name)
    if queue in (ABSENT, UNSEEN):
        return set()
    name = queue["spec"]["clusterQueue"]
    sources = {name}
    cluster_queue = _find_cluster_queue(cluster, name)
    if cluster_queue in (ABSENT, UNSEEN):
        return sources
    spec = cluster_queue["spec"]
    # Without a limit everything may be borrowed or lent.
    amounts = [parse_resource_quantity(quota.get(limit, 1)) for quota in _list_resources(spec)]
    if spec.get("cohortName") and any(amounts):
        sources.add(f"cohort {spec['cohortName']}")
    return sources


def _check_namespace(
    cluster: Connection,
    selector: JsonMapping | None,
    name: str,
) -> Iterator[UserError]:
    """Check that a ClusterQueue selects the namespace: otherwise its pods wait for ever, although
    its LocalQueue is active.

    Expressions other than ``In`` count as satisfied.
    """
    namespace = find_object(cluster.core.read_namespace, cluster.namespace)
    if namespace in (ABSENT, UNSEEN):
        return
    labels = namespace.metadata.labels or {}
    values_by_label: dict[str, list[str]] = {}
    # An empty selector selects every namespace, and none at all selects nothing.
    if selector:
        for key, value in (selector.get("matchLabels") or {}).items():
            values_by_label[key] = [value]
        for expression in selector.get("matchExpressions") or ():
            if expression["operator"] == "In":
                values_by_label[expression["key"]] = expression["values"]
    is_selected = all(labels.get(key) in values for key, values in values_by_label.items())
    if selector is not None and is_selected:
        return
    names = sorted({cluster.namespace, *values_by_label.get(NAMESPACE_LABEL, ())})
    expression = {"key": NAMESPACE_LABEL, "operator": "In", "values": names}
    patch = {
        "op": "add",
        "path": "/spec/namespaceSelector",
        "value": {"matchExpressions": [expression]},
    }
    argument = shlex.quote(json.dumps([patch]))
    yield Problem(
        "ClusterQueue",
        name,
        f"does not admit namespace {cluster.namespace}",
        command=f"kubectl patch clusterqueue {name} --type=json -p {argument}",
    )


def find_quota_problems(
    workflow: JsonMapping,
    spec: JsonMapping,
    queues: Collection[str],
    cluster_queue: str,
) -> Iterator[UserError]:
    """Find stages whose requests exceed what a ClusterQueue's quota leaves beside the run's servers.

    Args:
        workflow: a prepared workflow.
        spec: of the ClusterQueue.
        queues: its LocalQueues, in which templates of the workflow wait.
        cluster_queue: its name.
    """
    # It may borrow quota that other queues do not use; `cohort` is the field of v1beta1.
    if spec.get("cohortName") or spec.get("cohort"):
        return
    quota = _compute_largest_quotas(spec)
    command = f"kubectl edit clusterqueue {cluster_queue}"
    labels_by_template = find_queued_templates(workflow)
    templates = [
        template
        for template in workflow["spec"]["templates"]
        if labels_by_template.get(template["name"], {}).get(QUEUE_LABEL) in queues
    ]
    patch = json.loads(workflow["spec"].get("podSpecPatch") or "{}")
    # The containers that Argo adds to a pod: their requests are set by a patch.
    added = patch.get("containers", ())
    # A server keeps its quota while other pods run.
    servers = count_servers(workflow)
    reserved: Amounts = {}
    for template in templates:
        for _ in range(servers.get(template["name"], 0)):
            _add(reserved, compute_pod_requests(template, added))
    for template in templates:
        alone = compute_pod_requests(template, added)
        total = dict(reserved)
        if not template.get("daemon"):
            _add(total, alone)
        suffix = "" if total == alone else " with the run's servers"
        for resource, amount in sorted(total.items()):
            if resource not in quota:
                yield Problem(
                    template["name"],
                    f"{resource}: {amount}",
                    f"ClusterQueue {cluster_queue} has no quota for it",
                    command=command,
                )
            elif amount > quota[resource]:
                yield Problem(
                    template["name"],
                    f"{resource}: {amount}{suffix}",
                    f"is more than ClusterQueue {cluster_queue} can ever give ({quota[resource]})",
                    command=command,
                    otherwise=", or lower it" + (" or set cluster.sampler.queue" if suffix else ""),
                )


def _compute_largest_quotas(spec: JsonMapping) -> Amounts:
    """Compute the largest quota of each resource among the flavors of a ClusterQueue."""
    # All of a pod's request for a resource comes from one flavor.
    largest: Amounts = {}
    for quota in _list_resources(spec):
        amount = parse_resource_quantity(quota["nominalQuota"])
        largest[quota["name"]] = max(amount, largest.get(quota["name"], amount))
    return largest


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
                _add(total, requests, spec["parallelism"])
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
                _add(total, {name: parse_resource_quantity(quantity)})
    return total


def _add(total: Amounts, amounts: Mapping[str, Decimal], count: int = 1) -> None:
    """Add `count` times `amounts` to `total`."""
    for name, amount in amounts.items():
        total[name] = total.get(name, Decimal(0)) + count * amount
