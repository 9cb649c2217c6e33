"""Find what would fail on a cluster before anything is created there: one line each, with the remedy. An object that
the account may not read (403) counts as present, since the workflow runs with another account."""

import os
import re
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tuneloop.argo.claims import find_placement_errors, share_of
from tuneloop.argo.colocation import check_colocation
from tuneloop.argo.lease_sidecar import find_lease_sidecar
from tuneloop.argo.resize import read_asleep
from tuneloop.cluster.problems import (
    ABSENT,
    APPLY,
    INSTALL,
    UNSEEN,
    Problem,
    find_object,
    is_absent,
)
from tuneloop.cluster.queue_problems import find_queue_problems
from tuneloop.cluster.reservations import API, KINDS, list_claims
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.store import Store
from tuneloop.kube.connection import WORKFLOWS, Connection
from tuneloop.sharing.lease_storage import LEASES, KubernetesLease, parse_lease
from tuneloop.sharing.leases import LeaseGroup
from tuneloop.sharing.sidecar import parse_arguments
from tuneloop.workflow.manifest import mounts_token, parse_applied_object
from tuneloop.workflow.settings import GROUP_LABEL

CLAIMS = KINDS["ResourceClaim"]

LISTED = 50
"""The most images that a kubelet reports (``nodeStatusMaxImages``)."""


def check_cluster(cluster: Connection, workflow: JsonMapping) -> None:
    """Check a prepared workflow by `find_problems`. Raises the first, a UserError whose notes are the others."""
    if problems := find_problems(cluster, workflow):
        for other in problems[1:]:
            problems[0].add_note(str(other))
        raise problems[0]


def find_problems(cluster: Connection, workflow: JsonMapping) -> list[UserError]:
    """Return what prevents a prepared workflow from running on the cluster. Raises UserError where the cluster does not
    answer or does not allow the context in; Retryable where the API server is in trouble."""
    missing = [problem for find in REQUIRED.values() for problem in find(cluster, workflow)]
    return missing or [problem for find in CHECKS.values() for problem in find(cluster, workflow)]


def _namespace(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    if is_absent(cluster.core.read_namespace, cluster.namespace, _request_timeout=(10, 30)):
        otherwise = " (or yours), or choose --context or --namespace"
        yield Problem(
            "namespace",
            cluster.namespace,
            f"does not exist in context {cluster.context}",
            APPLY,
            otherwise,
        )


def _installed(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    group, version, plural = WORKFLOWS
    if is_absent(
        cluster.custom.list_namespaced_custom_object,
        group,
        version,
        cluster.namespace,
        plural,
        limit=1,
    ):
        told = f"has no Argo Workflows ({plural}.{group} is not defined); {INSTALL}"
        yield UserError("cluster", cluster.context, told)
    for job in filter(None, map(parse_applied_object, workflow["spec"].get("templates", ()))):
        group, _, version = job["apiVersion"].partition("/")
        plural = f"{job['kind'].lower()}s"
        if is_absent(
            cluster.custom.list_namespaced_custom_object,
            group,
            version,
            cluster.namespace,
            plural,
            limit=1,
        ):
            remedy = f"has no {job['kind']} ({plural}.{group} is not defined), which several nodes need; {INSTALL}"
            yield UserError("nodes", cluster.context, remedy)
            return


def _allowed(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    from kubernetes import client

    spec = workflow["spec"]
    wanted = [(WORKFLOWS[0], WORKFLOWS[2])]
    if mounts_token(spec):
        wanted.append(("", "secrets"))
    for group, plural in wanted:
        asked = client.V1ResourceAttributes(
            namespace=cluster.namespace, verb="create", group=group, resource=plural
        )
        review = client.V1SelfSubjectAccessReview(
            spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=asked)
        )
        if not cluster.auth.create_self_subject_access_review(review).status.allowed:
            binding = "rolebinding tuneloop-user --role=tuneloop-user --user=ACCOUNT"
            found = f"may not create {plural} in namespace {cluster.namespace}"
            yield Problem(
                "cluster",
                cluster.context,
                found,
                f"kubectl -n {cluster.namespace} create {binding}",
            )
            return


def _references(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Yield an error for each missing account, Secret, ConfigMap or claim that the workflow requires."""
    read = {
        "service account": cluster.core.read_namespaced_service_account,
        "secret": cluster.core.read_namespaced_secret,
        "config map": cluster.core.read_namespaced_config_map,
        "claim": cluster.core.read_namespaced_persistent_volume_claim,
    }
    for kind, name in sorted(set(list_references(workflow["spec"]))):
        if is_absent(read[kind], name, cluster.namespace):
            missing = f"is missing in namespace {cluster.namespace}"
            yield Problem(kind, name, missing, APPLY, " (or yours), or create it")


def list_references(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of every reference below `value` that is not optional."""
    if isinstance(value, list):
        for item in value:
            yield from list_references(item)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if re.fullmatch("(secret|configMap)(Key)?Ref", key) and not item.get("optional"):
            yield "secret" if key.startswith("secret") else "config map", item["name"]
        elif key == "secret" and "secretName" in item and not item.get("optional"):
            yield "secret", item["secretName"]
        elif key == "persistentVolumeClaim":
            yield "claim", item["claimName"]
        elif key == "serviceAccountName" and "{{" not in item:
            yield "service account", item
        else:
            yield from list_references(item)


def _devices(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Check the devices of a claim: the cluster accepts a claim for an unknown class, but its pods wait for ever."""
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
    if is_absent(
        cluster.custom.list_namespaced_custom_object,
        group,
        version,
        cluster.namespace,
        CLAIMS,
        limit=1,
    ):
        remedy = f"cluster {cluster.context} has no {CLAIMS}.{group}/{version}: it needs Kubernetes 1.34 or newer"
        yield UserError("cluster.share.device_class", share.device_class, remedy)
    elif is_absent(read, group, version, "deviceclasses", share.device_class):
        remedy = f"is not a DeviceClass of {cluster.context}; see `kubectl get deviceclasses`; a DRA driver brings them"
        yield UserError("cluster.share.device_class", share.device_class, remedy)


def _turns(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Check policy and patience against the group's: a run with others fails at its first stage that shares devices."""
    found = filter(None, map(find_lease_sidecar, workflow["spec"].get("templates", ())))
    wanted = {flags.group: flags for flags in (parse_arguments(each["args"]) for each in found)}
    places = {
        name: flags for flags in wanted.values() for name in _groups(cluster, workflow, flags)
    }
    for name, flags in places.items():
        place = KubernetesLease(cluster, name)
        if (seen := find_object(cluster.get, *LEASES, place.name)) not in (ABSENT, UNSEEN):
            turns = LeaseGroup(
                place, name, who=flags.run, policy=flags.policy, patience=flags.patience
            )
            try:
                turns.apply_settings(parse_lease(seen))
            except UserError as error:
                yield error


def _groups(cluster: Connection, workflow: JsonMapping, flags: Namespace) -> list[str]:
    """List the groups of leases that a run may use: of all claims if each has one, as the run's claim is not known."""
    if "{{" not in flags.group:
        return [flags.group]
    share = share_of(workflow)
    assert share, "only stages that share devices have a claim's name"
    found = find_object(list_claims, cluster, f"{GROUP_LABEL}={share.group}")
    return [] if found in (ABSENT, UNSEEN) else [each["metadata"]["name"] for each in found]


def _resizes(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    if any(map(read_asleep, workflow["spec"].get("templates", ()))):
        known = {
            each.name for each in cluster.core.get_api_resources(_request_timeout=30).resources
        }
        if "pods/resize" not in known:
            remedy = "has no pods/resize, which needs Kubernetes 1.33 or newer: leave it out"
            yield UserError("engine.asleep", cluster.context, remedy)


def _images(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Check the images without a registry in their name, which must be on a node, as no node can pull them. Registries
    are not contacted: only the nodes have the network and the credentials for them."""
    there, whole = list_node_images(cluster)
    for image in list_images(workflow) if whole else ():
        host = image.partition("/")[0] if "/" in image else ""
        if "{{" in image or "." in host or ":" in host or host == "localhost":
            continue
        if not is_on_node(image, there):
            otherwise = " or load it into the nodes as they take it, or set cluster.images (docs/cluster.md)"
            command = f"kind load docker-image {image}"
            yield Problem(
                "image", image, "is on no node, and names no registry", command, otherwise
            )


def list_images(workflow: JsonMapping) -> list[str]:
    """List the images of a workflow's templates."""
    used = [t.get("container") or t.get("script") or {} for t in workflow["spec"]["templates"]]
    return sorted({each["image"] for each in used if "image" in each})


def list_node_images(cluster: Connection) -> tuple[set[str], bool]:
    """Return the names of images on nodes, and whether the list is complete: a kubelet reports only some of them."""
    if (nodes := find_object(cluster.core.list_node, _request_timeout=30)) is UNSEEN:
        return set(), False
    there = {
        name
        for node in nodes.items
        for image in node.status.images or ()
        for name in image.names or ()
    }
    return there, all(len(node.status.images or ()) < LISTED for node in nodes.items)


def is_on_node(image: str, there: set[str]) -> bool:
    """Return whether an image is among the full names in `there`."""
    return any(
        f"{prefix}{image}" in there
        for prefix in ("", "docker.io/", "docker.io/library/", "localhost/")
    )


def _store(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    parameters = {
        p["name"]: p.get("value", "") for p in workflow["spec"]["arguments"]["parameters"]
    }
    url = str(parameters["store"])
    scheme, _, path = url.rpartition("://")
    if scheme in ("", "file"):
        if not any(mount and path.startswith(mount) for mount in _shared_mounts(workflow)):
            yield UserError(
                "store",
                url,
                "is a path that the pods do not share; use s3://…, or mount a claim there",
            )
    elif scheme == "memory":
        yield UserError("store", url, "is lost when the pod ends; use s3://…")
    elif has_store_keys(scheme):
        try:
            Store(url).check_writable()
        except UserError as error:
            yield error


def has_store_keys(scheme: str) -> bool:
    """Return whether this machine has credentials for the store; the pods get theirs from the cluster."""
    return scheme != "s3" or "AWS_ACCESS_KEY_ID" in os.environ


def _shared_mounts(workflow: JsonMapping) -> Iterator[str]:
    spec = workflow["spec"]
    claims = {v["name"] for v in spec.get("volumes", ()) if "persistentVolumeClaim" in v}
    for template in spec["templates"]:
        own = claims | {
            v["name"] for v in template.get("volumes", ()) if "persistentVolumeClaim" in v
        }
        for mount in (template.get("container") or {}).get("volumeMounts", ()):
            if mount["name"] in own:
                yield mount["mountPath"]


Find = Callable[[Connection, JsonMapping], Iterable[UserError]]
REQUIRED: Mapping[str, Find] = {"namespace": _namespace, "Argo Workflows": _installed}
"""Subject → the function that finds its problems; the first ones must pass before the others can be checked."""
CHECKS: Mapping[str, Find] = {
    "rights": _allowed,
    "references": _references,
    "images": _images,
    "queue": find_queue_problems,
    "devices": _devices,
    "turns": _turns,
    "resizes": _resizes,
    "store": _store,
}
