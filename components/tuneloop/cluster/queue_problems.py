"""Find queues that would never admit a workflow's requests: Kueue leaves its pods waiting, and reports nothing."""

import json
import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from decimal import Decimal

from tuneloop.argo.colocation import parse_resource_quantity
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
from tuneloop.workflow.settings import PRIORITY_LABEL, QUEUE, QUEUE_LABEL, SAMPLER_QUEUE

KUEUE = ("kueue.x-k8s.io", "v1beta2")
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""The label of every namespace that has its name."""
Amounts = dict[str, Decimal]
"""Resource name → amount, in cores, bytes or pieces."""


def find_queue_problems(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Find queues that would never admit the requests of a workflow's templates."""
    labels = find_queued_templates(workflow)
    behind: dict[str, JsonObject] = {}
    for name in list_queues(workflow):
        if (found := find_object(cluster.get, *KUEUE, "localqueues", name)) is ABSENT:
            said = (
                f"is not a LocalQueue of namespace {cluster.namespace}: stages would wait for ever"
            )
            other = f", or --set cluster.sampler.queue={QUEUE}" if name == SAMPLER_QUEUE else ""
            yield Problem("queue", name, said, APPLY, f" (or yours){other}, or {INSTALL}")
        elif found is not UNSEEN:
            behind.setdefault(found["spec"]["clusterQueue"], {})[name] = found
    for name, queues in behind.items():
        yield from _cluster_queue(cluster, workflow, name, queues)
    for priority in sorted(
        {each[PRIORITY_LABEL] for each in labels.values() if PRIORITY_LABEL in each}
    ):
        if is_absent(
            cluster.custom.get_cluster_custom_object, *KUEUE, "workloadpriorityclasses", priority
        ):
            found = f"is not a WorkloadPriorityClass of {cluster.context}"
            yield Problem("priority", priority, found, APPLY, " (or yours)")


def _cluster_queue(
    cluster: Connection,
    workflow: JsonMapping,
    name: str,
    queues: Mapping[str, JsonMapping],
) -> Iterator[UserError]:
    found = find_object(cluster.custom.get_cluster_custom_object, *KUEUE, "clusterqueues", name)
    if found is ABSENT:
        said = f"is of the ClusterQueue {name}, which does not exist"
        yield Problem("queue", ", ".join(queues), said, APPLY, " (or yours)")
        return
    for queue, local in queues.items():
        for condition in local.get("status", {}).get("conditions", ()):
            if condition["type"] == "Active" and condition["status"] != "True":
                command = f"kubectl get clusterqueue {name} -o yaml"
                yield Problem(
                    "queue", queue, f"admits nothing: {condition['message']}", command, " says why"
                )
    if found is not UNSEEN:
        yield from _admitted(cluster, found["spec"].get("namespaceSelector"), name)
        yield from find_quota_problems(workflow, found["spec"], queues, name)


def find_queue_warnings(cluster: Connection, workflow: JsonMapping) -> Iterator[Problem]:
    """Find rollout servers that are admitted one by one, or that hold quota which stages wait for. A server holds its
    quota for the whole run: the servers of several runs can hold all of it, so that no stage is admitted."""
    held: set[str] = set()
    waited: set[str] = set()
    servers = count_servers(workflow)
    for name, labels in find_queued_templates(workflow).items():
        (held if name in servers else waited).add(labels[QUEUE_LABEL])
        if (count := servers.get(name, 1)) > 1:
            found = "are admitted one by one: several runs can each get some of their servers, and wait for the others"
            otherwise = " shows the quota, which must suffice for all (docs/cluster.md, The queue)"
            yield Problem("engine.replicas", count, found, "kubectl get clusterqueues", otherwise)
    for server in sorted(held):
        own = _list_quotas(cluster, server, "borrowingLimit")
        if any(own & _list_quotas(cluster, stage, "lendingLimit") for stage in waited):
            found = "gives rollout servers quota that stages wait for, as long as their runs last: "
            found += "the servers of several runs can hold all of it, and no run makes progress"
            command = f"tuneloop … --set cluster.sampler.queue={SAMPLER_QUEUE}"
            yield Problem("queue", server, found, command, " (docs/cluster.md, The queue)")


def count_servers(workflow: JsonMapping) -> dict[str, int]:
    """Count the pods of each daemon's template that a graph has at a time."""
    templates = workflow["spec"]["templates"]
    called = [Counter(call["template"] for call in list_calls(template)) for template in templates]
    return {
        t["name"]: max(1, *(each[t["name"]] for each in called))
        for t in templates
        if t.get("daemon")
    }


def _list_quotas(cluster: Connection, queue: str, limit: str) -> set[str]:
    """List the sources of a LocalQueue's quota: its ClusterQueue, and the cohort unless every `limit` is 0."""
    if (local := find_object(cluster.get, *KUEUE, "localqueues", queue)) in (ABSENT, UNSEEN):
        return set()
    name = local["spec"]["clusterQueue"]
    found = find_object(cluster.custom.get_cluster_custom_object, *KUEUE, "clusterqueues", name)
    spec = {} if found in (ABSENT, UNSEEN) else found["spec"]
    flavors = [flavor for group in spec.get("resourceGroups", ()) for flavor in group["flavors"]]
    some = any(
        parse_resource_quantity(each.get(limit, 1))
        for flavor in flavors
        for each in flavor["resources"]
    )
    return {name, *([f"cohort {spec['cohortName']}"] if some and spec.get("cohortName") else [])}


def _admitted(cluster: Connection, selector: JsonMapping | None, name: str) -> Iterator[UserError]:
    """Check that a ClusterQueue selects the namespace: else its pods wait for ever, although its LocalQueue is active.
    Expressions other than ``In`` count as satisfied."""
    namespace = find_object(cluster.core.read_namespace, cluster.namespace)
    if namespace in (ABSENT, UNSEEN):
        return
    labels = namespace.metadata.labels or {}
    wanted = {key: [value] for key, value in ((selector or {}).get("matchLabels") or {}).items()}
    wanted |= {
        e["key"]: e["values"]
        for e in (selector or {}).get("matchExpressions") or ()
        if e["operator"] == "In"
    }
    if selector is None or any(labels.get(key) not in values for key, values in wanted.items()):
        names = sorted({*wanted.get(NAMESPACE_LABEL, ()), cluster.namespace})
        value = {"matchExpressions": [{"key": NAMESPACE_LABEL, "operator": "In", "values": names}]}
        patch = [{"op": "add", "path": "/spec/namespaceSelector", "value": value}]
        command = (
            f"kubectl patch clusterqueue {name} --type=json -p {shlex.quote(json.dumps(patch))}"
        )
        yield Problem(
            "ClusterQueue", name, f"does not admit namespace {cluster.namespace}", command
        )


def find_quota_problems(
    workflow: JsonMapping,
    spec: JsonMapping,
    queues: Collection[str],
    cluster_queue: str,
) -> Iterator[UserError]:
    """Find requests of templates in `queues` that exceed a ClusterQueue's quota (`spec`) without its servers' part."""
    if spec.get("cohortName") or spec.get(
        "cohort"
    ):  # it may borrow quota that other queues do not use
        return
    quota = _largest(spec)
    command = f"kubectl edit clusterqueue {cluster_queue}"
    waiting = {
        name
        for name, labels in find_queued_templates(workflow).items()
        if labels[QUEUE_LABEL] in queues
    }
    own = [template for template in workflow["spec"]["templates"] if template["name"] in waiting]
    argos = json.loads(workflow["spec"].get("podSpecPatch") or "{}").get("containers", ())
    servers = count_servers(workflow)  # a daemon keeps its quota while other pods run
    held = _sum(
        compute_pod_requests(each, argos)
        for each in own
        for _ in range(servers.get(each["name"], 0))
    )
    for template in own:
        alone = compute_pod_requests(template, argos)
        wanted = held if template.get("daemon") else _sum((alone, held))
        for resource, amount in sorted(wanted.items()):
            if resource not in quota:
                found = f"ClusterQueue {cluster_queue} has no quota for it"
                yield Problem(template["name"], f"{resource}: {amount}", found, command)
            elif amount > quota[resource]:
                found = (
                    f"is more than ClusterQueue {cluster_queue} can ever give ({quota[resource]})"
                )
                beside = "" if wanted == alone else " with the run's servers"
                otherwise = ", or lower it" + (" or set cluster.sampler.queue" if beside else "")
                yield Problem(
                    template["name"], f"{resource}: {amount}{beside}", found, command, otherwise
                )


def _largest(spec: JsonMapping) -> Amounts:
    """Compute the largest quota of each resource among the flavors of a ClusterQueue."""
    best: Amounts = {}
    for group in spec.get("resourceGroups", ()):
        for flavor in group["flavors"]:
            for resource in flavor["resources"]:
                name = resource["name"]
                amount = parse_resource_quantity(resource["nominalQuota"])
                best[name] = max(amount, best.get(name, Decimal(0)))
    return best


def compute_pod_requests(template: JsonMapping, beside: Iterable[JsonMapping] = ()) -> Amounts:
    """Compute the resources that the pod of a template requests; a limit without a request counts as one. `beside`
    are the containers that Argo adds to a pod of its own, but not to those of a job."""
    if job := parse_applied_object(template):
        jobs = [
            each["template"]["spec"] for each in job["spec"]["replicatedJobs"]
        ]  # Kueue admits all pods together
        pods = (
            (each["parallelism"], one)
            for each in jobs
            for one in each["template"]["spec"]["containers"]
        )
        counted = ((count, compute_pod_requests({"container": one})) for count, one in pods)
        return _sum({name: count * amount for name, amount in of.items()} for count, of in counted)
    ours = [
        *template.get("sidecars", ()),
        *template.get("initContainers", ()),
    ]  # they run as long as the pod
    asked = []
    for container in (template.get("container") or template.get("script") or {}, *ours, *beside):
        resources = container.get("resources") or {}
        asked.append({**(resources.get("limits") or {}), **(resources.get("requests") or {})})
    return _sum(
        {k: parse_resource_quantity(v) for k, v in each.items() if "{{" not in str(v)}
        for each in asked
    )


def _sum(amounts: Iterable[Amounts]) -> Amounts:
    total: Amounts = {}
    for each in amounts:
        for name, amount in each.items():
            total[name] = total.get(name, Decimal(0)) + amount
    return total
