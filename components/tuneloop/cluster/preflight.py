"""Find what would fail on a cluster before anything is created there: one line each, with the
remedy.

An object that the account may not read (403) counts as present, since the workflow runs with
another account.

`check_cluster` runs the checks before a submission and before a schedule; `cluster/doctor.py:
check_argo` runs the same ones, one by one.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tuneloop.cluster.capacity import find_capacity_problems
from tuneloop.cluster.problems import (
    INSTALL,
    UNSEEN,
    Problem,
    apply_manifests,
    create_namespace,
    find_object,
    is_absent,
)
from tuneloop.cluster.queue_problems import find_queue_problems
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.object_stores import KEYS
from tuneloop.core.store import Store
from tuneloop.core.store_credentials import has_credentials
from tuneloop.kube.connection import WORKFLOWS, Connection
from tuneloop.planning.pod_paths import is_below, list_mounted_paths
from tuneloop.workflow.manifest import mounts_token, parse_applied_object, read_parameters
from tuneloop.workflow.plan import find_plan
from tuneloop.workflow.pod_hook import list_pod_hooks
from tuneloop.workflow.pod_schema import DIRECTIVE

CLUSTER_CA = "kube-root-ca.crt"
"""The ConfigMap that Kubernetes itself keeps in every namespace."""
LISTED = 50
"""The most images that a kubelet reports (``nodeStatusMaxImages``)."""


def check_cluster(cluster: Connection, workflow: JsonMapping) -> None:
    """Check a prepared workflow by `find_problems`.

    Raises:
        UserError: the first problem; the others are its notes.
        Retryable: the API server is in trouble.
    """
    problems = find_problems(cluster, workflow)
    if not problems:
        return
    first = problems[0]
    for problem in problems[1:]:
        first.add_note(str(problem))
    raise first


def find_problems(cluster: Connection, workflow: JsonMapping) -> list[UserError]:
    """Return what prevents a prepared workflow from running on the cluster.

    Raises:
        UserError: the cluster does not answer, or does not allow the context in.
        Retryable: the API server is in trouble.
    """
    # Without the namespace or Argo every other check would report the same cause again.
    problems = _run_checks(REQUIRED, cluster, workflow)
    return problems or _run_checks(CHECKS, cluster, workflow)


def _run_checks(
    checks: "Mapping[str, Find]",
    cluster: Connection,
    workflow: JsonMapping,
) -> list[UserError]:
    """Return all problems that some checks find."""
    return [problem for find in checks.values() for problem in find(cluster, workflow)]


def is_kind_absent(cluster: Connection, group: str, version: str, plural: str) -> bool:
    """Return whether the cluster does not know a kind of objects."""
    # The objects of a namespace are listed, as most accounts may not read definitions.
    return is_absent(
        cluster.custom.list_namespaced_custom_object,
        group,
        version,
        cluster.namespace,
        plural,
        limit=1,
    )


def _find_namespace_problems(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Check that the namespace of the runs exists."""
    if is_absent(cluster.core.read_namespace, cluster.namespace, _request_timeout=(10, 30)):
        yield Problem(
            "namespace",
            cluster.namespace,
            f"does not exist in context {cluster.context}",
            command=create_namespace(cluster.namespace),
            otherwise=" (or yours), or choose --context or --namespace",
        )


def _find_missing_kinds(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Check that Argo is installed, and what a stage of several nodes needs."""
    group, version, plural = WORKFLOWS
    if is_kind_absent(cluster, group, version, plural):
        remedy = f"has no Argo Workflows ({plural}.{group} is not defined); {INSTALL}"
        yield UserError("cluster", cluster.context, remedy)
    for template in workflow["spec"].get("templates", ()):
        job = parse_applied_object(template)
        if not job:
            continue
        group, _, version = job["apiVersion"].partition("/")
        plural = f"{job['kind'].lower()}s"
        if is_kind_absent(cluster, group, version, plural):
            yield UserError(
                "nodes",
                cluster.context,
                f"has no {job['kind']} ({plural}.{group} is not defined), which several nodes need;"
                f" {INSTALL}",
            )
            # All jobs of a workflow are of one kind.
            return


def _find_missing_rights(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Check that the account may create the workflow, and the Secret of its servers' token.

    These are the objects that `cluster/submit.py: _create` creates.
    """
    from kubernetes import client

    group, _, plural = WORKFLOWS
    resources = [(group, plural)]
    if mounts_token(workflow["spec"]):
        resources.append(("", "secrets"))
    for group, plural in resources:
        attributes = client.V1ResourceAttributes(
            namespace=cluster.namespace, verb="create", group=group, resource=plural
        )
        review = client.V1SelfSubjectAccessReview(
            spec=client.V1SelfSubjectAccessReviewSpec(resource_attributes=attributes)
        )
        if not cluster.auth.create_self_subject_access_review(review).status.allowed:
            yield Problem(
                "cluster",
                cluster.context,
                f"may not create {plural} in namespace {cluster.namespace}",
                command=f"kubectl -n {cluster.namespace} create rolebinding tuneloop-user"
                " --role=tuneloop-user --user=ACCOUNT",
            )
            # One binding gives both rights.
            return


def _find_missing_references(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Yield an error for each missing account, Secret, ConfigMap or claim that the workflow
    requires.
    """
    read_by_kind = {
        "service account": cluster.core.read_namespaced_service_account,
        "secret": cluster.core.read_namespaced_secret,
        "config map": cluster.core.read_namespaced_config_map,
        "claim": cluster.core.read_namespaced_persistent_volume_claim,
    }
    for kind, name in sorted(set(list_references(workflow["spec"]))):
        if is_absent(read_by_kind[kind], name, cluster.namespace):
            yield Problem(
                kind,
                name,
                f"is missing in namespace {cluster.namespace}",
                command=apply_manifests(cluster.namespace),
                otherwise=" (or yours), or create it",
            )


def list_references(value: Any) -> Iterator[tuple[str, str]]:
    """Yield (kind, name) of every reference below `value` that is not optional.

    The kinds are ``secret``, ``config map``, ``claim`` and ``service account``: those that
    `_find_missing_references` has a read for. Any other kind raises KeyError there.
    """
    if isinstance(value, list):
        for item in value:
            yield from list_references(item)
    if not isinstance(value, dict):
        return
    for key, item in value.items():
        if re.fullmatch("(secret|configMap)((Key)?Ref)?", key):
            name = _read_reference(item)
            if name:
                yield "secret" if key.startswith("secret") else "config map", name
        elif key == "persistentVolumeClaim":
            if item and "claimName" in item:
                yield "claim", item["claimName"]
        elif key == "serviceAccountName":
            if item and "{{" not in item:
                yield "service account", item
        elif key == "imagePullSecrets":
            for reference in item or ():
                name = _read_reference(reference)
                if name:
                    yield "secret", name
        elif key == "podSpecPatch":
            # What the settings say of a pod is text in the template.
            yield from list_references(json.loads(item))
        else:
            yield from list_references(item)


def _read_reference(reference: Any) -> str:
    """Read the name of a Secret or ConfigMap that a reference needs; empty: it needs none."""
    # A patch may delete a reference, or change a part of one.
    if not isinstance(reference, dict) or reference.get(DIRECTIVE) == "delete":
        return ""
    # A volume says secretName, and all others name.
    name = str(reference.get("secretName") or reference.get("name") or "")
    return "" if reference.get("optional") or name == CLUSTER_CA else name


def _find_extension_problems(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Check what extensions changed of the pods."""
    for hook in list_pod_hooks():
        yield from hook.find_errors(workflow)
        yield from hook.find_cluster_problems(cluster, workflow)


def _find_resize_problems(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Check that the cluster can resize pods, if servers give resources back while they sleep."""
    # A workflow without a plan, as that of `doctor`, has no servers.
    plan = find_plan(workflow)
    servers = plan.servers if plan else {}
    if not any(server.asleep for server in servers.values()):
        return
    resources = cluster.core.get_api_resources(_request_timeout=30).resources
    if "pods/resize" not in {resource.name for resource in resources}:
        remedy = "has no pods/resize, which needs Kubernetes 1.33 or newer: leave it out"
        yield UserError("engine.asleep", cluster.context, remedy)


def _find_image_problems(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Check the images without a registry in their name: no node can pull them, so one must have
    them.

    Registries are not contacted: only the nodes have the network and the credentials for them.
    """
    node_images, is_complete = list_node_images(cluster)
    if not is_complete:
        return
    for image in list_images(workflow):
        # As the container runtimes tell a registry from a folder of Docker Hub.
        host = image.partition("/")[0] if "/" in image else ""
        has_registry = "." in host or ":" in host or host == "localhost"
        if "{{" in image or has_registry or is_on_node(image, node_images):
            continue
        yield Problem(
            "image",
            image,
            "is on no node, and names no registry",
            command=f"kind load docker-image {image}",
            otherwise=" or load it into the nodes as they take it, or set cluster.images (docs/cluster.md)",
        )


def list_images(workflow: JsonMapping) -> list[str]:
    """List the images of a workflow's templates, without those of sidecars, of containers that run
    before, and of the pods of jobs. `kfp/doctor.py` lists those of a compiled pipeline by it.
    """
    images: set[str] = set()
    for template in workflow["spec"]["templates"]:
        container = template.get("container") or template.get("script") or {}
        if "image" in container:
            images.add(container["image"])
    return sorted(images)


def list_node_images(cluster: Connection) -> tuple[set[str], bool]:
    """Return the names of images on nodes, and whether the list is complete.

    A kubelet reports only some of its images, and the account may not be allowed to ask.
    """
    nodes = find_object(cluster.core.list_node, _request_timeout=30)
    if nodes is UNSEEN:
        return set(), False
    names: set[str] = set()
    is_complete = True
    for node in nodes.items:
        images = node.status.images or ()
        is_complete = is_complete and len(images) < LISTED
        for image in images:
            names.update(image.names or ())
    return names, is_complete


def is_on_node(image: str, node_images: set[str]) -> bool:
    """Return whether an image is among the full names of `node_images`."""
    # Runtimes complete a short name by Docker Hub's; podman's images are of localhost.
    prefixes = ("", "docker.io/", "docker.io/library/", "localhost/")
    return any(f"{prefix}{image}" in node_images for prefix in prefixes)


def _find_store_problems(cluster: Connection, workflow: JsonMapping) -> Iterator[UserError]:
    """Check that the store outlives the pods and, where this machine has its keys, can be written."""
    url = read_parameters(workflow["spec"]).get("store", "")
    scheme, _, path = url.rpartition("://")
    if scheme in ("", "file"):
        if not is_below(path, list_mounted_paths(workflow, "persistentVolumeClaim")):
            yield UserError(
                "store",
                url,
                "is a path that the pods do not share; use s3://…, or mount a claim there",
            )
    elif scheme == "memory":
        yield UserError("store", url, "is lost when the pod ends; use s3://…")
    elif has_credentials(scheme):
        try:
            Store(url).check_writable()
        except UserError as error:
            yield error


def find_store_notes(workflow: JsonMapping) -> Iterator[UserError]:
    """Yield that the store was not tried by a write, if this machine has no credentials for it; the
    pods get theirs from the cluster.
    """
    url = read_parameters(workflow["spec"]).get("store", "")
    scheme = url.partition("://")[0]
    if scheme in KEYS and not has_credentials(scheme):
        variable = KEYS[scheme].partition(" ")[0].rstrip(",")
        yield UserError("store", url, f"not checked by a write: {variable} is not set here")


Find = Callable[[Connection, JsonMapping], Iterable[UserError]]
REQUIRED: Mapping[str, Find] = {
    "namespace": _find_namespace_problems,
    "Argo Workflows": _find_missing_kinds,
}
"""Subject → the function that finds its problems; these must pass before those of `CHECKS` can be
checked. `cluster/doctor.py: check_argo` needs a description for each subject here.
"""
CHECKS: Mapping[str, Find] = {
    "rights": _find_missing_rights,
    "references": _find_missing_references,
    "images": _find_image_problems,
    "queue": find_queue_problems,
    "capacity": find_capacity_problems,
    "extensions": _find_extension_problems,
    "resizes": _find_resize_problems,
    "store": _find_store_problems,
}
"""Subject → the function that finds its problems, in the order in which they are told: `submit`
raises the first one. `doctor` runs them, too: it replaces those of four subjects by functions that
also warn (`cluster/doctor.py: check_argo`), and may give a workflow without containers and plan.
"""
