"""What can be known to fail on a cluster before anything is created there: one line each, with the remedy.

Where the account may not look (403), a thing counts as present: the account that runs the workflow is another one.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from typing import Any

from tuneloop.argo.claims import find_placement_errors, share_of
from tuneloop.argo.colocation import check_colocation
from tuneloop.argo.lease_sidecar import find_lease_sidecar
from tuneloop.cluster.reservations import API, KINDS, list_claims
from tuneloop.cluster.run_workflows import find_queued_templates, list_queues
from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.kube.api_errors import read_api_message, translate_api_errors
from tuneloop.kube.connection import WORKFLOWS, Connection
from tuneloop.sharing import lease
from tuneloop.sharing.sidecar import parse_arguments
from tuneloop.sharing.turns import Turns
from tuneloop.workflow.manifest import labels_of, parse_applied_object
from tuneloop.workflow.settings import GROUP_LABEL, PRIORITY_LABEL, QUEUE_LABEL

CLAIMS = KINDS["ResourceClaim"]
KUEUE = ("kueue.x-k8s.io", "v1beta2")
NAMESPACE_LABEL = "kubernetes.io/metadata.name"
"""Of every namespace: its name."""
INSTALL = "manifests/third-party/README.md says how to install it"
APPLY = "kubectl apply -k manifests/overlays/local"

LISTED = 50
"""A kubelet reports so many images and no more (``nodeStatusMaxImages``)."""

THEIRS = re.compile(r"""(?:^|")(?!tuneloop\.)([^\W\d]\w*(?:\.\w+)*:[^\W\d][\w.]*)(?:\\?"|$)""")
"""A dotted path to code that is not ours, as a whole argument or a string of its JSON, or of JSON in that."""

Amounts = dict[str, Decimal]
"""Resource name → amount, in cores, bytes or pieces."""

DENIED = re.compile(r'cannot (\w+) resource "([^"]+)"')
_denied: ContextVar[list[str] | None] = ContextVar("denied", default=None)


class Problem(UserError):
    """What prevents a workflow from running, and the command that mends it.

    Attributes:
        found: what was found, without the remedy.
        command: for a shell; in ``remedy`` the two are one line.
    """

    def __init__(self, field: str, value: object, found: str, command: str, otherwise: str = "") -> None:
        super().__init__(field, value, f"{found}; {command}{otherwise}")
        self.found, self.command = found, command


def find_problems(cluster: Connection, workflow: Mapping[str, Any]) -> list[UserError]:
    """Return what prevents a prepared workflow from running on the cluster; empty when nothing was found.

    Raises:
        UserError: the cluster does not answer, or the context is not allowed in at all.
        Retryable: the API server is in trouble.
    """
    with translate_api_errors(cluster):
        missing = [problem for find in REQUIRED.values() for problem in find(cluster, workflow)]
        return missing or [problem for find in CHECKS.values() for problem in find(cluster, workflow)]


def list_notices(workflow: Mapping[str, Any]) -> list[str]:
    """What nobody can know from here: whether the images have the user's own code. One line an image."""
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


def _namespace(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    if _absent(cluster.core.read_namespace, cluster.namespace, _request_timeout=10):
        otherwise = " (or yours), or choose --context or --namespace"
        yield Problem("namespace", cluster.namespace, f"does not exist in context {cluster.context}", APPLY, otherwise)


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


def _allowed(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    from kubernetes import client

    group, _, plural = WORKFLOWS
    asked = client.V1ResourceAttributes(namespace=cluster.namespace, verb="create", group=group, resource=plural)
    review = client.V1SelfSubjectAccessReview(spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=asked))
    if not cluster.auth.create_self_subject_access_review(review).status.allowed:
        command = f"kubectl -n {cluster.namespace} create rolebinding tuneloop-user --role=tuneloop-user --user=ACCOUNT"
        found = f"may not create workflows in namespace {cluster.namespace}"
        yield Problem("cluster", cluster.context, found, command)


def _references(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    """Accounts, secrets, config maps and claims that the workflow names and cannot do without."""
    read = {
        "service account": cluster.core.read_namespaced_service_account,
        "secret": cluster.core.read_namespaced_secret,
        "config map": cluster.core.read_namespaced_config_map,
        "claim": cluster.core.read_namespaced_persistent_volume_claim,
    }
    for kind, name in sorted(set(list_references(workflow["spec"]))):
        if _absent(read[kind], name, cluster.namespace):
            yield Problem(
                kind, name, f"is missing in namespace {cluster.namespace}", APPLY, " (or yours), or create it"
            )


def list_references(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of every reference below `value` that is not optional."""
    if isinstance(value, list):
        for item in value:
            yield from list_references(item)
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
            yield from list_references(item)


def _devices(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    """A claim for a class that is unknown is taken, and its pods wait for ever."""
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
        remedy = (
            f"is no DeviceClass of {cluster.context}; `kubectl get deviceclasses` lists them, a DRA driver brings them"
        )
        yield UserError("cluster.share.device_class", share.device_class, remedy)


def _turns(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    """A run that its group refuses ends at the first stage that shares."""
    found = filter(None, map(find_lease_sidecar, workflow["spec"].get("templates", ())))
    wanted = {flags.group: flags for flags in (parse_arguments(each["args"]) for each in found)}
    places = {name: flags for flags in wanted.values() for name in _groups(cluster, workflow, flags)}
    for name, flags in places.items():
        place = lease.Lease(cluster, name)
        seen = find_object(cluster.get, *lease.LEASES, place.name)
        if seen not in (ABSENT, UNSEEN):
            turns = Turns(place, name, who=flags.run, policy=flags.policy, patience=flags.patience)
            try:
                turns.agreed(lease.parse_lease(seen))
            except UserError as error:
                yield error


def _groups(cluster: Connection, workflow: Mapping[str, Any], flags: Namespace) -> list[str]:
    """Where turns go claim by claim, all claims of the group: on which one the run will sit is not known yet."""
    if "{{" not in flags.group:
        return [flags.group]
    share = share_of(workflow)
    assert share, "the claim's name is written for those that share"
    found = find_object(list_claims, cluster, f"{GROUP_LABEL}={share.group}")
    return [] if found in (ABSENT, UNSEEN) else [each["metadata"]["name"] for each in found]


def _images(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    """An image that names no registry is one that was built here: a node has it, or nothing can pull it.

    What a registry has is not asked: the nodes' way to it, and their credentials, are the cluster's own.
    """
    there, whole = list_node_images(cluster)
    for image in list_images(workflow) if whole else ():
        host = image.partition("/")[0] if "/" in image else ""
        if "{{" in image or "." in host or ":" in host or host == "localhost":
            continue
        if not is_on_node(image, there):
            otherwise = " or load it into the nodes as they take it, or set cluster.images (docs/cluster.md)"
            command = f"kind load docker-image {image}"
            yield Problem("image", image, "is on no node, and names no registry", command, otherwise)


def list_images(workflow: Mapping[str, Any]) -> list[str]:
    """List the images of a workflow's templates."""
    used = [t.get("container") or t.get("script") or {} for t in workflow["spec"]["templates"]]
    return sorted({each["image"] for each in used if "image" in each})


def list_node_images(cluster: Connection) -> tuple[set[str], bool]:
    """Return the names of images on nodes, and whether these are all: a kubelet may have more, or none be seen."""
    nodes = find_object(cluster.core.list_node, _request_timeout=30)
    if nodes is UNSEEN:
        return set(), False
    there = {name for node in nodes.items for image in node.status.images or () for name in image.names or ()}
    return there, all(len(node.status.images or ()) < LISTED for node in nodes.items)


def is_on_node(image: str, there: set[str]) -> bool:
    """Return whether an image is among those `there`, whose names are in full."""
    return any(f"{prefix}{image}" in there for prefix in ("", "docker.io/", "docker.io/library/", "localhost/"))


def find_queue_problems(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    """Find queues that would never admit what a workflow's templates ask for.

    Kueue leaves a pod of an unknown queue waiting for ever, and says so nowhere.
    """
    labels = find_queued_templates(workflow)
    for name in list_queues(workflow):
        found = find_object(cluster.get, *KUEUE, "localqueues", name)
        if found is ABSENT:
            said = f"is no LocalQueue of namespace {cluster.namespace}: stages would wait for ever"
            yield Problem("queue", name, said, APPLY, f" (or yours), or {INSTALL}")
        elif found is not UNSEEN:
            yield from _cluster_queue(cluster, workflow, name, found)
    for priority in sorted({each[PRIORITY_LABEL] for each in labels.values() if PRIORITY_LABEL in each}):
        if _absent(cluster.custom.get_cluster_custom_object, *KUEUE, "workloadpriorityclasses", priority):
            found = f"is no WorkloadPriorityClass of {cluster.context}"
            yield Problem("priority", priority, found, APPLY, " (or yours)")


def _inactive(name: str, queue: Mapping[str, Any]) -> Iterator[UserError]:
    for condition in queue.get("status", {}).get("conditions", ()):
        if condition["type"] == "Active" and condition["status"] != "True":
            command = f"kubectl get clusterqueue {queue['spec']['clusterQueue']} -o yaml"
            yield Problem("queue", name, f"admits nothing: {condition['message']}", command, " says why")


def _cluster_queue(
    cluster: Connection, workflow: Mapping[str, Any], queue: str, local: Mapping[str, Any]
) -> Iterator[UserError]:
    name = local["spec"]["clusterQueue"]
    found = find_object(cluster.custom.get_cluster_custom_object, *KUEUE, "clusterqueues", name)
    if found is ABSENT:
        yield Problem("queue", queue, f"is of the ClusterQueue {name}, which does not exist", APPLY, " (or yours)")
        return
    yield from _inactive(queue, local)
    if found is not UNSEEN:
        yield from _admitted(cluster, found["spec"].get("namespaceSelector"), name)
        yield from _quota(workflow, found["spec"], queue, name)


def _admitted(cluster: Connection, selector: Mapping[str, Any] | None, name: str) -> Iterator[UserError]:
    """Kueue leaves pods of a namespace that the ClusterQueue does not select waiting for ever, and its LocalQueue is
    active all the same. Expressions other than ``In`` count as satisfied."""
    namespace = find_object(cluster.core.read_namespace, cluster.namespace)
    if namespace in (ABSENT, UNSEEN):
        return
    labels = namespace.metadata.labels or {}
    wanted = {key: [value] for key, value in ((selector or {}).get("matchLabels") or {}).items()}
    wanted |= {e["key"]: e["values"] for e in (selector or {}).get("matchExpressions") or () if e["operator"] == "In"}
    if selector is None or any(labels.get(key) not in values for key, values in wanted.items()):
        names = sorted({*wanted.get(NAMESPACE_LABEL, ()), cluster.namespace})
        value = {"matchExpressions": [{"key": NAMESPACE_LABEL, "operator": "In", "values": names}]}
        patch = [{"op": "add", "path": "/spec/namespaceSelector", "value": value}]
        command = f"kubectl patch clusterqueue {name} --type=json -p {shlex.quote(json.dumps(patch))}"
        yield Problem("ClusterQueue", name, f"does not admit namespace {cluster.namespace}", command)


def _quota(workflow: Mapping[str, Any], spec: Mapping[str, Any], queue: str, cluster_queue: str) -> Iterator[UserError]:
    if spec.get("cohortName") or spec.get("cohort"):  # it may borrow what others leave
        return
    quota, command = _largest(spec), f"kubectl edit clusterqueue {cluster_queue}"
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
                found = f"ClusterQueue {cluster_queue} has no quota for it"
                yield Problem(template["name"], f"{resource}: {amount}", found, command)
            elif amount > quota[resource]:
                found = f"is more than ClusterQueue {cluster_queue} can ever give ({quota[resource]})"
                beside = "" if wanted == alone else " with the server beside it"
                yield Problem(template["name"], f"{resource}: {amount}{beside}", found, command, ", or lower it")


def _largest(spec: Mapping[str, Any]) -> Amounts:
    """What the best flavor of a ClusterQueue gives of each resource."""
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
    """What all pods of a JobSet ask for; Kueue admits them together."""
    jobs = [each["template"]["spec"] for each in jobset["spec"]["replicatedJobs"]]
    pods = [(job["parallelism"], each) for job in jobs for each in job["template"]["spec"]["containers"]]
    return _sum({k: count * v for k, v in compute_pod_requests({"container": each}).items()} for count, each in pods)


def parse_resource_quantity(text: Any) -> Decimal:
    """Parse a Kubernetes quantity (``500m``, ``2Gi``, ``8``) into a number.

    Raises:
        UserError: it is none.
    """
    from kubernetes.utils import parse_quantity

    try:
        amount: Decimal = parse_quantity(str(text))
    except ValueError:
        raise UserError("quantity", text, "is no Kubernetes quantity, as in 500m or 2Gi") from None
    return amount


def _sum(amounts: Iterable[Amounts]) -> Amounts:
    total: Amounts = {}
    for each in amounts:
        for name, amount in each.items():
            total[name] = total.get(name, Decimal(0)) + amount
    return total


def _store(cluster: Connection, workflow: Mapping[str, Any]) -> Iterator[UserError]:
    parameters = {p["name"]: p.get("value", "") for p in workflow["spec"]["arguments"]["parameters"]}
    url = str(parameters["store"])
    scheme, _, path = url.rpartition("://")
    if scheme in ("", "file"):
        if not any(mount and path.startswith(mount) for mount in _shared_mounts(workflow)):
            yield UserError("store", url, "is a path that the pods do not share; use s3://…, or mount a claim there")
    elif scheme == "memory":
        yield UserError("store", url, "ends with the pod; use s3://…")
    elif has_store_keys(scheme):
        try:
            Store(url).check_writable()
        except UserError as error:
            yield error


def has_store_keys(scheme: str) -> bool:
    """Return whether this machine has been told how to reach the store; the pods' way is the cluster's own."""
    return scheme != "s3" or "AWS_ACCESS_KEY_ID" in os.environ


def _shared_mounts(workflow: Mapping[str, Any]) -> Iterator[str]:
    spec = workflow["spec"]
    claims = {v["name"] for v in spec.get("volumes", ()) if "persistentVolumeClaim" in v}
    for template in spec["templates"]:
        own = claims | {v["name"] for v in template.get("volumes", ()) if "persistentVolumeClaim" in v}
        for mount in (template.get("container") or {}).get("volumeMounts", ()):
            if mount["name"] in own:
                yield mount["mountPath"]


ABSENT, UNSEEN = "absent", "not for this account to see"


@contextmanager
def record_denied_reads() -> Iterator[list[str]]:
    """Yield a list that gets each read in the block that the account has no right to, as in ``list nodes``."""
    denied: list[str] = []
    token = _denied.set(denied)
    try:
        yield denied
    finally:
        _denied.reset(token)


def find_object(read: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return what `read` gives; ABSENT for 404; UNSEEN for 403."""
    from kubernetes.client import ApiException

    try:
        return read(*args, **kwargs)
    except ApiException as error:
        if error.status == 404:
            return ABSENT
        if error.status != 403:
            raise
        message = read_api_message(error)
        if (denied := _denied.get()) is not None:
            denied.append(" ".join(match.groups()) if (match := DENIED.search(message)) else f"read it: {message}")
        return UNSEEN


def _absent(read: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    return find_object(read, *args, **kwargs) is ABSENT


Find = Callable[[Connection, Mapping[str, Any]], Iterable[UserError]]
REQUIRED: Mapping[str, Find] = {"namespace": _namespace, "Argo Workflows": _installed}
"""What is looked at → what finds its problems; without these nothing else can be looked at."""
CHECKS: Mapping[str, Find] = {
    "rights": _allowed,
    "references": _references,
    "images": _images,
    "queue": find_queue_problems,
    "devices": _devices,
    "turns": _turns,
    "store": _store,
}
