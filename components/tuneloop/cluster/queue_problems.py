"""Find queues that would never admit a workflow's requests: Kueue leaves its pods waiting, and
reports nothing.

`find_queue_problems` is an entry of `cluster/preflight.py: CHECKS`, and is called by
`kfp/doctor.py`; `find_queue_warnings` is called by `cluster/submission.py: Submission.check` and
`cluster/doctor.py: check_argo_queue`. ResourceQuotas and nodes are checked in
`cluster/capacity.py`.
"""

import json
import shlex
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tuneloop.cluster.kueue import (
    GROUP,
    KueueApi,
    are_pods_held,
    find_kueue,
    list_local_queues,
)
from tuneloop.cluster.pod_requests import (
    Amounts,
    add_amounts,
    compute_pod_requests,
    count_servers,
    format_amount,
)
from tuneloop.cluster.problems import (
    ABSENT,
    ADMIN,
    INSTALL,
    NAMESPACES,
    UNSEEN,
    Problem,
    apply_manifests,
    find_object,
    is_absent,
)
from tuneloop.cluster.run_workflows import find_queued_templates, list_queues
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kube.connection import Connection
from tuneloop.workflow.manifest import parse_applied_object
from tuneloop.workflow.quantities import parse_resource_quantity
from tuneloop.workflow.settings import PRIORITY_LABEL, QUEUE, QUEUE_LABEL, SAMPLER_QUEUE

NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""The label of every namespace that has its name."""


UNQUEUED = "--set cluster.queue="
"""The setting by which nothing waits in a queue."""


def find_queue_problems(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Find queues that would never admit the requests of a workflow's templates, or that Kueue
    does not make its pods wait in.
    """
    names = list_queues(workflow)
    if not names:
        return
    api = find_kueue(cluster)
    if api is None:
        yield Problem(
            "queue",
            ", ".join(names),
            f"Kueue is not installed in {cluster.context} ({GROUP} is not served): pods would start"
            " at once, and nothing would order the runs",
            command=f"tuneloop … {UNQUEUED}",
            otherwise=f" runs without queues, or {INSTALL}",
        )
        return
    queues_by_source: dict[str, dict[str, JsonObject]] = defaultdict(dict)
    for name in names:
        queue = find_object(cluster.get, *api, "localqueues", name)
        if queue is ABSENT:
            yield _describe_missing_queue(cluster, api, name)
        elif queue is not UNSEEN:
            queues_by_source[queue["spec"]["clusterQueue"]][name] = queue
    for name, queues in queues_by_source.items():
        yield from _check_cluster_queue(cluster, api, workflow, name, queues)
    yield from _check_pods_wait(cluster, workflow)
    priorities: set[str] = set()
    for labels in find_queued_templates(workflow).values():
        if PRIORITY_LABEL in labels:
            priorities.add(labels[PRIORITY_LABEL])
    read_class = cluster.custom.get_cluster_custom_object
    for priority in sorted(priorities):
        if is_absent(read_class, *api, "workloadpriorityclasses", priority):
            finding = f"is not a WorkloadPriorityClass of {cluster.context}"
            yield Problem("priority", priority, finding, command=_apply_cluster_objects(cluster))


def _apply_cluster_objects(cluster: Connection) -> str:
    """Return the remedy where an object of Kueue is missing that only an admin may create."""
    if cluster.namespace == NAMESPACES["local"]:
        return f"{apply_manifests(cluster.namespace)} (or yours)"
    return ADMIN


def _describe_missing_queue(cluster: Connection, api: KueueApi, name: str) -> Problem:
    """Describe a LocalQueue that a workflow names and that does not exist."""
    finding = f"is not a LocalQueue of namespace {cluster.namespace}: stages would wait for ever"
    queues = list_local_queues(cluster, api)
    # The sampler's queue exists only where somebody has divided the quota.
    if name == SAMPLER_QUEUE and QUEUE in queues:
        other = f", or --set cluster.sampler.queue={QUEUE}"
    elif queues:
        other = f", or --set cluster.queue={queues[0]} (here are {', '.join(queues)})"
    else:
        other = f", or {INSTALL}"
    return Problem("queue", name, finding, command=_apply_cluster_objects(cluster), otherwise=other)


def _check_pods_wait(cluster: Connection, workflow: JsonMapping) -> Iterator[Problem]:
    """Check that Kueue makes the pods of queued templates wait; jobs are held by other means."""
    templates = {template["name"]: template for template in workflow["spec"].get("templates", ())}
    for name, labels in find_queued_templates(workflow).items():
        if parse_applied_object(templates[name]):
            continue
        if are_pods_held(cluster, labels[QUEUE_LABEL]) is False:
            yield Problem(
                "queue",
                labels[QUEUE_LABEL],
                f"Kueue does not make pods of namespace {cluster.namespace} wait: they would start at"
                " once, whatever the quota is. Its `pod` integration is off, or its"
                " managedJobsNamespaceSelector does not select the namespace",
                command="kubectl -n kueue-system edit configmap kueue-manager-config",
                otherwise=f" (integrations.frameworks: pod), or {UNQUEUED} to run without queues",
            )
        # One pod stands for all: the webhook asks for the namespace, not for the queue.
        return


def _find_cluster_queue(cluster: Connection, api: KueueApi, name: str) -> Any:
    """Return the ClusterQueue of a name, or ABSENT, or UNSEEN."""
    read_queue = cluster.custom.get_cluster_custom_object
    return find_object(read_queue, *api, "clusterqueues", name)


def _check_cluster_queue(
    cluster: Connection,
    api: KueueApi,
    workflow: JsonMapping,
    name: str,
    queues: Mapping[str, JsonMapping],
) -> Iterator[UserError]:
    """Check the ClusterQueue `name`, from which the LocalQueues of a workflow have their quota."""
    cluster_queue = _find_cluster_queue(cluster, api, name)
    if cluster_queue is ABSENT:
        finding = f"is of the ClusterQueue {name}, which does not exist"
        command = _apply_cluster_objects(cluster)
        yield Problem("queue", ", ".join(queues), finding, command=command)
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
    """Find queues that this account may not check, rollout servers that are admitted one by one,
    and servers that hold quota which stages wait for.

    A server holds its quota for the whole run: the servers of several runs can hold all of it, so
    that no stage is admitted.
    """
    queued = find_queued_templates(workflow)
    api = find_kueue(cluster) if queued else None
    if api is None:
        return
    yield from _find_unseen_queues(cluster, api, workflow)
    server_queues: set[str] = set()
    stage_queues: set[str] = set()
    servers = count_servers(workflow)
    for name, labels in queued.items():
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
        borrowed = _list_quotas(cluster, api, queue, "borrowingLimit")
        # A cohort passes quota on only if one side may borrow, and the other may lend.
        if any(
            borrowed & _list_quotas(cluster, api, other, "lendingLimit") for other in stage_queues
        ):
            yield Problem(
                "queue",
                queue,
                "gives rollout servers quota that stages wait for, as long as their runs last: the"
                " servers of several runs can hold all of it, and no run makes progress",
                command=_choose_server_queue(cluster, api, stage_queues),
                otherwise=" (docs/cluster.md, The queue)",
            )


def _choose_server_queue(cluster: Connection, api: KueueApi, stage_queues: Collection[str]) -> str:
    """Return the command that gives servers a queue of their own: one that is there, if any."""
    free = [name for name in list_local_queues(cluster, api) if name not in stage_queues]
    if not free and cluster.namespace != NAMESPACES["local"]:
        return f"a LocalQueue of another ClusterQueue is needed for servers: {ADMIN}"
    queue = SAMPLER_QUEUE if SAMPLER_QUEUE in free or not free else free[0]
    return f"tuneloop … --set cluster.sampler.queue={queue}"


def _find_unseen_queues(
    cluster: Connection, api: KueueApi, workflow: JsonMapping
) -> Iterator[Problem]:
    """Find queues of a workflow that this account may not read, and so not check."""
    largest: Amounts = {}
    for template in _list_queued(workflow):
        for resource, amount in compute_pod_requests(template, workflow["spec"]).items():
            largest[resource] = max(amount, largest.get(resource, amount))
    amounts = ", ".join(format_amount(name, largest[name]) for name in sorted(largest))
    for name in list_queues(workflow):
        queue = find_object(cluster.get, *api, "localqueues", name)
        if queue is UNSEEN:
            yield Problem(
                "queue",
                name,
                f"is not for this account to see: if namespace {cluster.namespace} has no such"
                " LocalQueue, the pods wait for ever",
                command=f"kubectl -n {cluster.namespace} create rolebinding tuneloop-queues"
                " --clusterrole=kueue-batch-user-role --user=ACCOUNT",
                otherwise=", by an admin, lets it look",
            )
        elif queue is not ABSENT:
            source = queue["spec"]["clusterQueue"]
            if _find_cluster_queue(cluster, api, source) is UNSEEN:
                yield Problem(
                    "queue",
                    name,
                    f"its ClusterQueue {source} is not for this account to see: a quota below"
                    f" {amounts} (the largest pod) would make the run wait for ever",
                    command=f"kubectl describe clusterqueue {source}",
                    otherwise=", by an admin, shows the quota",
                )


def _list_resources(spec: JsonMapping) -> Iterator[JsonMapping]:
    """Yield the quotas of a ClusterQueue, each of one resource in one flavor."""
    for group in spec.get("resourceGroups", ()):
        for flavor in group["flavors"]:
            yield from flavor["resources"]


def _list_quotas(cluster: Connection, api: KueueApi, queue_name: str, limit: str) -> set[str]:
    """List the sources of a LocalQueue's quota: its ClusterQueue, and the cohort unless every
    `limit` is 0.
    """
    queue = find_object(cluster.get, *api, "localqueues", queue_name)
    if queue in (ABSENT, UNSEEN):
        return set()
    name = queue["spec"]["clusterQueue"]
    sources = {name}
    cluster_queue = _find_cluster_queue(cluster, api, name)
    if cluster_queue in (ABSENT, UNSEEN):
        return sources
    spec = cluster_queue["spec"]
    # Without a limit everything may be borrowed or lent.
    amounts = [parse_resource_quantity(quota.get(limit, 1)) for quota in _list_resources(spec)]
    cohort = _read_cohort(spec)
    if cohort and any(amounts):
        sources.add(f"cohort {cohort}")
    return sources


def _read_cohort(spec: JsonMapping) -> str:
    """Read the cohort of a ClusterQueue; empty: none."""
    # `cohort` is the field of v1beta1.
    return str(spec.get("cohortName") or spec.get("cohort") or "")


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
    lacking = {
        key: values for key, values in values_by_label.items() if labels.get(key) not in values
    }
    if lacking and NAMESPACE_LABEL not in lacking:
        # The ClusterQueue stays as it is, and other namespaces with it.
        pairs = " ".join(f"{key}={values[0]}" for key, values in lacking.items())
        yield Problem(
            "ClusterQueue",
            name,
            f"does not admit namespace {cluster.namespace}",
            command=f"kubectl label namespace {cluster.namespace} {pairs}",
        )
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
    """Find stages whose requests exceed what a ClusterQueue's quota leaves beside the run's
    servers.

    Args:
        workflow: a prepared workflow.
        spec: of the ClusterQueue.
        queues: its LocalQueues, in which templates of the workflow wait.
        cluster_queue: its name.
    """
    # It may borrow quota that other queues do not use.
    if _read_cohort(spec):
        return
    quota = _compute_largest_quotas(spec)
    command = f"kubectl edit clusterqueue {cluster_queue}"
    labels_by_template = find_queued_templates(workflow)
    templates = [
        template
        for template in _list_queued(workflow)
        if labels_by_template[template["name"]][QUEUE_LABEL] in queues
    ]
    # A server keeps its quota while other pods run.
    servers = count_servers(workflow)
    reserved: Amounts = {}
    for template in templates:
        for _ in range(servers.get(template["name"], 0)):
            add_amounts(reserved, compute_pod_requests(template, workflow["spec"]))
    for template in templates:
        alone = compute_pod_requests(template, workflow["spec"])
        total = dict(reserved)
        if not template.get("daemon"):
            add_amounts(total, alone)
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


def _list_queued(workflow: JsonMapping) -> list[JsonMapping]:
    """List the templates whose pod or job waits in a queue."""
    labels_by_template = find_queued_templates(workflow)
    return [
        template
        for template in workflow["spec"].get("templates", ())
        if template["name"] in labels_by_template
    ]


def _compute_largest_quotas(spec: JsonMapping) -> Amounts:
    """Compute the largest quota of each resource among the flavors of a ClusterQueue."""
    # All of a pod's request for a resource comes from one flavor.
    largest: Amounts = {}
    for quota in _list_resources(spec):
        amount = parse_resource_quantity(quota["nominalQuota"])
        largest[quota["name"]] = max(amount, largest.get(quota["name"], amount))
    return largest
