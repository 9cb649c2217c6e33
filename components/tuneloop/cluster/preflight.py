"""What can be known to fail on a cluster before anything is created there: one line each, with the remedy.

Where the account may not look (403), a thing counts as present: the account that runs the workflow is another one.
"""

from __future__ import annotations

import itertools
import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from typing import Any

from tuneloop.argo.claims import find_placement_errors, share_of
from tuneloop.argo.colocation import check_colocation
from tuneloop.argo.lease_sidecar import find_lease_sidecar
from tuneloop.cluster.reservations import API, KINDS, list_claims
from tuneloop.cluster.run_workflows import find_queued_templates
from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.kube.api_errors import translate_api_errors
from tuneloop.kube.connection import WORKFLOWS, Connection
from tuneloop.sharing import lease
from tuneloop.sharing.sidecar import parse_arguments
from tuneloop.sharing.turns import Turns
from tuneloop.workflow.manifest import labels_of, parse_applied_object
from tuneloop.workflow.settings import GROUP_LABEL, PRIORITY_LABEL, QUEUE_LABEL

CLAIMS = KINDS["ResourceClaim"]
KUEUE = ("kueue.x-k8s.io", "v1beta2")
INSTALL = "manifests/third-party/README.md says how to install it"
APPLY = "kubectl apply -k manifests/overlays/local (or yours)"

LISTED = 50
"""The most images that a kubelet reports (``nodeStatusMaxImages``)."""

THEIRS = re.compile(r"""(?:^|")(?!tuneloop\.)([^\W\d]\w*(?:\.\w+)*:[^\W\d][\w.]*)(?:\\?"|$)""")
"""A dotted path to code that is not ours, as a whole argument or a string of its JSON, or of JSON in that."""

Amounts = dict[str, Decimal]
"""Resource name → amount, in cores, bytes or pieces."""


def check_cluster(cluster: Connection, workflow: Mapping[str, Any]) -> None:
    """Refuse a prepared workflow that cannot run on the cluster.

    Raises:
        UserError: the first of what `find_problems` finds; its notes are the others.
    """
    if problems := find_problems(cluster, workflow):
        for other in problems[1:]:
            problems[0].add_note(str(other))
        raise problems[0]


def find_problems(cluster: Connection, workflow: Mapping[str, Any]) -> list[UserError]:
    """Return what prevents a prepared workflow from running on the cluster; empty when nothing was found.

    Raises:
        UserError: the cluster does not answer, or the context is not allowed in at all.
        Retryable: the API server is in trouble.
    """
    with translate_api_errors(cluster):
        if missing := [*_namespace(cluster), *_installed(cluster, workflow)]:
            return missing
        return [
            *_allowed(cluster),
            *_references(cluster, workflow),
            *_images(cluster, workflow),
            *_queues(cluster, workflow),
            *_devices(cluster, workflow),
            *_turns(cluster, workflow),
            *_store(workflow),
        ]


def list_notices(workflow: Mapping[str, Any]) -> list[str]:
    """List what nobody can know from here: which of the user's own code each image has to have. One line an image."""
    wanted: dict[str, set[str]] = {}
    for container in (t["container"] for t in workflow["spec"].get("templates", ()) if "container" in t):
        paths = {path for word in container.get("args", ()) for path in THEIRS.findall(str(word))}
        modules = {name for flag, name in itertools.pairwise(container.get("command", ())) if flag == "-m"}
        paths |= {name for name in modules if not name.startswith("tuneloop.")}
        wanted.setdefault(container["image"], set()).update(paths)
    return [
        f"{', '.join(sorted(paths))}: has to be in image {image} (docs/cluster.md, Your own code)"
        for image, paths in sorted(wanted.items())
        if paths
    ]


def _namespace(cluster: Connection) -> Iterator[UserError]:
    if _absent(cluster.core.read_namespace, cluster.namespace, _request_timeout=10):
        remedy = f"does not exist in context {cluster.context}; {APPLY}, or choose --context or --namespace"
        yield UserError("namespace", cluster.namespace, remedy)


def _installed(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    group, version, plural = WORKFLOWS
    if _absent(cluster.custom.list_namespaced_custom_object, group, version, cluster.namespace, plural, limit=1):
        yield UserError(
            "cluster", cluster.context, f"has no Argo Workflows ({plural}.{group} is not defined); {INSTALL}"
        )
    for job in filter(None, map(parse_applied_object, workflow["spec"].get("templates", ()))):
        group, _, version = job["apiVersion"].partition("/")
        plural = f"{job['kind'].lower()}s"
        if _absent(cluster.custom.list_namespaced_custom_object, group, version, cluster.namespace, plural, limit=1):
            remedy = f"has no {job['kind']} ({plural}.{group} is not defined), which several nodes need; {INSTALL}"
            yield UserError("nodes", cluster.context, remedy)
            return


def _allowed(cluster: Connection) -> Iterator[UserError]:
    from kubernetes import client

    group, _, plural = WORKFLOWS
    asked = client.V1ResourceAttributes(namespace=cluster.namespace, verb="create", group=group, resource=plural)
    review = client.V1SelfSubjectAccessReview(spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=asked))
    if not cluster.auth.create_self_subject_access_review(review).status.allowed:
        remedy = (
            f"may not create workflows in namespace {cluster.namespace}; bind the role tuneloop-user to the account"
        )
        yield UserError("cluster", cluster.context, remedy)


def _references(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    """Yield accounts, secrets, config maps and claims that the workflow names and cannot do without."""
    read = {
        "service account": cluster.core.read_namespaced_service_account,
        "secret": cluster.core.read_namespaced_secret,
        "config map": cluster.core.read_namespaced_config_map,
        "claim": cluster.core.read_namespaced_persistent_volume_claim,
    }
    for kind, name in sorted(set(_named(workflow["spec"]))):
        if _absent(read[kind], name, cluster.namespace):
            yield UserError(kind, name, f"is missing in namespace {cluster.namespace}; create it, or {APPLY}")


def _named(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of every reference below `value` that is not optional."""
    if isinstance(value, list):
        for item in value:
            yield from _named(item)
    if not isinstance(value, dict):
        return
    kinds = {
        "secretKeyRef": "secret",
        "secretRef": "secret",
        "configMapKeyRef": "config map",
        "configMapRef": "config map",
    }
    for key, item in value.items():
        if key in kinds and not item.get("optional"):
            yield kinds[key], item["name"]
        elif key == "secret" and "secretName" in item and not item.get("optional"):
            yield "secret", item["secretName"]
        elif key == "persistentVolumeClaim":
            yield "claim", item["claimName"]
        elif key == "serviceAccountName" and "{{" not in item:
            yield "service account", item
        else:
            yield from _named(item)


def _devices(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    """Check the devices of a claim: one for an unknown class is taken, and its pods wait for ever."""
    yield from find_placement_errors(workflow)
    try:
        check_colocation(workflow)
    except UserError as error:
        yield error
    share = share_of(workflow)
    if not share or not share.device_class:
        return
    group, version = API
    read = cluster.custom.get_cluster_custom_object
    if _absent(cluster.custom.list_namespaced_custom_object, group, version, cluster.namespace, CLAIMS, limit=1):
        remedy = f"cluster {cluster.context} has no {CLAIMS}.{group}/{version}: it needs Kubernetes 1.34 or newer"
        yield UserError("cluster.share.device_class", share.device_class, remedy)
    elif _absent(read, group, version, "deviceclasses", share.device_class):
        remedy = f"is not a DeviceClass of {cluster.context}; see `kubectl get deviceclasses`; a DRA driver brings them"
        yield UserError("cluster.share.device_class", share.device_class, remedy)


def _turns(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    """Check the policy and patience of the group: a run that it refuses ends at the first stage that shares."""
    found = filter(None, map(find_lease_sidecar, workflow["spec"].get("templates", ())))
    wanted = {flags.group: flags for flags in (parse_arguments(each["args"]) for each in found)}
    places = {name: flags for flags in wanted.values() for name in _groups(cluster, workflow, flags)}
    for name, flags in places.items():
        place = lease.Lease(cluster, name)
        seen = _found(cluster.get, *lease.LEASES, place.name)
        if seen not in (ABSENT, UNSEEN):
            turns = Turns(place, name, who=flags.run, policy=flags.policy, patience=flags.patience)
            try:
                turns.agreed(lease.parse_lease(seen))
            except UserError as error:
                yield error


def _groups(cluster: Connection, workflow: Mapping[str, Any], flags: Namespace) -> list[str]:
    """List where turns go claim by claim all claims of the group: which one the run will reserve is not known yet."""
    if "{{" not in flags.group:
        return [flags.group]
    share = share_of(workflow)
    assert share, "the claim's name is written for those that share"
    found = _found(list_claims, cluster, f"{GROUP_LABEL}={share.group}")
    return [] if found in (ABSENT, UNSEEN) else [each["metadata"]["name"] for each in found]


def _images(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    """Check the images that name no registry: a node has what was built here, or nothing can pull it.

    What a registry has is not asked: the nodes' way to it, and their credentials, are the cluster's own.
    """
    nodes = _found(cluster.core.list_node, _request_timeout=30)
    if nodes is UNSEEN or any(len(node.status.images or ()) >= LISTED for node in nodes.items):
        return
    there = {name for node in nodes.items for image in node.status.images or () for name in image.names or ()}
    used = [t.get("container") or t.get("script") or {} for t in workflow["spec"]["templates"]]
    for image in sorted({each["image"] for each in used if "image" in each}):
        host = image.partition("/")[0] if "/" in image else ""
        if "{{" in image or "." in host or ":" in host or host == "localhost":
            continue
        if not any(f"{prefix}{image}" in there for prefix in ("", "docker.io/", "docker.io/library/", "localhost/")):
            remedy = "is on no node, and names no registry; load it into the nodes, or set cluster.images"
            yield UserError("image", image, f"{remedy} (docs/cluster.md)")


def _queues(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    """Check the queues: Kueue leaves a pod of an unknown one waiting for ever, and says so nowhere."""
    labels = find_queued_templates(workflow)
    for name in sorted({each[QUEUE_LABEL] for each in labels.values()}):
        found = _found(cluster.get, *KUEUE, "localqueues", name)
        if found is ABSENT:
            remedy = f"is not a LocalQueue of namespace {cluster.namespace}: pods would wait; {APPLY}, or {INSTALL}"
            yield UserError("queue", name, remedy)
        elif found is not UNSEEN:
            yield from _inactive(name, found)
            yield from _quota(cluster, workflow, name, found["spec"]["clusterQueue"])
    for priority in sorted({each[PRIORITY_LABEL] for each in labels.values() if PRIORITY_LABEL in each}):
        if _absent(cluster.custom.get_cluster_custom_object, *KUEUE, "workloadpriorityclasses", priority):
            yield UserError("priority", priority, f"is not a WorkloadPriorityClass of {cluster.context}; {APPLY}")


def _inactive(name: str, queue: Mapping[str, Any]) -> Iterator[UserError]:
    for condition in queue.get("status", {}).get("conditions", ()):
        if condition["type"] == "Active" and condition["status"] != "True":
            yield UserError("queue", name, f"admits nothing: {condition['message']}")


def _quota(cluster: Connection, workflow: Mapping[str, Any], queue: str, cluster_queue: str) -> Iterator[UserError]:
    found = _found(cluster.custom.get_cluster_custom_object, *KUEUE, "clusterqueues", cluster_queue)
    if found in (ABSENT, UNSEEN):  # an inactive LocalQueue says the first
        return
    spec = found["spec"]
    if spec.get("cohortName") or spec.get("cohort"):  # it may borrow what others leave
        return
    quota = _largest(spec)
    own = [
        t for t in workflow["spec"]["templates"] if labels_of(parse_applied_object(t) or t).get(QUEUE_LABEL) == queue
    ]
    # A daemon keeps its share while the others run.
    held = _sum(compute_pod_requests(template) for template in own if template.get("daemon"))
    for template in own:
        alone = compute_pod_requests(template)
        wanted = alone if template.get("daemon") else _sum((alone, held))
        for resource, amount in sorted(wanted.items()):
            if resource not in quota:
                yield UserError(
                    template["name"], f"{resource}: {amount}", f"ClusterQueue {cluster_queue} has no quota for it"
                )
            elif amount > quota[resource]:
                remedy = f"is more than ClusterQueue {cluster_queue} can ever give ({quota[resource]}); lower it"
                beside = "" if wanted == alone else " with the server beside it"
                yield UserError(template["name"], f"{resource}: {amount}{beside}", remedy)


def _largest(spec: Mapping[str, Any]) -> Amounts:
    """Compute what the best flavor of a ClusterQueue gives of each resource."""
    best: Amounts = {}
    for group in spec.get("resourceGroups", ()):
        for flavor in group["flavors"]:
            for resource in flavor["resources"]:
                name, amount = resource["name"], parse_resource_quantity(resource["nominalQuota"])
                best[name] = max(amount, best.get(name, Decimal(0)))
    return best


def compute_pod_requests(template: Mapping[str, Any]) -> Amounts:
    """Compute the resources that the pod of a template requests; a limit without a request counts as one."""
    if job := parse_applied_object(template):
        return _of_job(job)
    beside = [*template.get("sidecars", ()), *template.get("initContainers", ())]  # ours run as long as the pod
    containers = [template.get("container") or template.get("script") or {}, *beside]
    asked = []
    for container in containers:
        resources = container.get("resources") or {}
        asked.append({**(resources.get("limits") or {}), **(resources.get("requests") or {})})
    return _sum({k: parse_resource_quantity(v) for k, v in each.items() if "{{" not in str(v)} for each in asked)


def _of_job(jobset: Mapping[str, Any]) -> Amounts:
    """Compute what all pods of a JobSet ask for; Kueue admits them together."""
    jobs = [each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"]]
    pods = [(job["parallelism"], each) for job in jobs for each in job["template"]["spec"]["containers"]]
    return _sum({k: count * v for k, v in compute_pod_requests({"container": each}).items()} for count, each in pods)


def parse_resource_quantity(text: Any) -> Decimal:
    """Parse a Kubernetes quantity (``500m``, ``2Gi``, ``8``) into a number.

    Raises:
        UserError: it is not a quantity.
    """
    from kubernetes.utils import parse_quantity

    try:
        amount: Decimal = parse_quantity(str(text))
    except ValueError:
        raise UserError("quantity", text, "is not a Kubernetes quantity, as in 500m or 2Gi") from None
    return amount


def _sum(amounts: Iterable[Amounts]) -> Amounts:
    total: Amounts = {}
    for each in amounts:
        for name, amount in each.items():
            total[name] = total.get(name, Decimal(0)) + amount
    return total


def _store(workflow: Mapping[str, Any]) -> Iterator[UserError]:
    parameters = {p["name"]: p.get("value", "") for p in workflow["spec"]["arguments"]["parameters"]}
    url = str(parameters["store"])
    scheme, _, path = url.rpartition("://")
    if scheme in ("", "file"):
        if not any(mount and path.startswith(mount) for mount in _shared_mounts(workflow)):
            yield UserError("store", url, "is a path that the pods do not share; use s3://…, or mount a claim there")
    elif scheme == "memory":
        yield UserError("store", url, "ends with the pod; use s3://…")
    elif scheme != "s3" or "AWS_ACCESS_KEY_ID" in os.environ:  # else only the pods know how to reach it
        try:
            Store(url).check_writable()
        except UserError as error:
            yield error


def _shared_mounts(workflow: Mapping[str, Any]) -> Iterator[str]:
    spec = workflow["spec"]
    claims = {v["name"] for v in spec.get("volumes", ()) if "persistentVolumeClaim" in v}
    for template in spec["templates"]:
        own = claims | {v["name"] for v in template.get("volumes", ()) if "persistentVolumeClaim" in v}
        for mount in (template.get("container") or {}).get("volumeMounts", ()):
            if mount["name"] in own:
                yield mount["mountPath"]


ABSENT, UNSEEN = "absent", "not for this account to see"


def _found(read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `read` gives; ABSENT for 404, UNSEEN for 403."""
    from kubernetes.client import ApiException

    try:
        return read(*args, **kwargs)
    except ApiException as error:
        if error.status in (403, 404):
            return ABSENT if error.status == 404 else UNSEEN
        raise


def _absent(read: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    return _found(read, *args, **kwargs) is ABSENT
