"""Check a cluster before anything is submitted, and print the commands that fix each problem; change nothing there.
`preflight` finds what `tuneloop submit` refuses; Kubeflow Pipelines' own checks are in `tuneloop.kfp.doctor`."""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import yaml

from tuneloop.argo.pod_fields import PLAIN, SECRET, STORE
from tuneloop.cluster import preflight
from tuneloop.cluster.problems import ABSENT, UNSEEN, Problem, find_object, record_denied_reads
from tuneloop.cluster.queue_problems import find_queue_warnings
from tuneloop.cluster.run_workflows import list_queues
from tuneloop.core.errors import UserError, shorten_text
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kube.connection import Connection
from tuneloop.workflow.settings import ROLES, Cluster

OK = "ok"
WARNING = "warning"
REFUSED = "refused"
NOT_CHECKED = "not checked"
CONTROLLER = "workflow-controller"
SETTINGS = "workflow-controller-configmap"
"""Argo's Deployment and its ConfigMap, as its manifests and KFP's name them."""
ARGO = (3, 7)
"""The oldest release of Argo Workflows that was tried."""
INSTALL_ARGO = (
    "kubectl apply --server-side -n argo -f "
    "https://github.com/argoproj/argo-workflows/releases/download/v3.7.6/install.yaml"
)


@dataclass(frozen=True)
class Check:
    """The `outcome` of a check: `OK`, `WARNING`, `REFUSED` or `NOT_CHECKED`; `remedy`: the command that fixes it."""

    subject: str
    outcome: str
    found: str
    remedy: str = ""


def check_argo(cluster: Connection, workflow: JsonMapping, store: str | None = None) -> list[Check]:
    """Check whether a cluster has what `workflow` (of `run_workflows.prepare_workflow` or `describe_queued_stage`)
    needs of Argo Workflows. `store` is that of the run to come, as in the workflow's parameter; None: not known yet.
    Raises UserError where the cluster does not answer, Retryable where the API server is in trouble."""
    queues = ", ".join(list_queues(workflow))
    references = sorted(set(preflight.list_references(workflow["spec"])))
    described = {  # check → its text if nothing is refused; empty: not needed by the workflow
        "namespace": f"{cluster.namespace} of context {cluster.context}",
        "Argo Workflows": "its API is there",
        "rights": f"may create workflows in namespace {cluster.namespace}",
        "references": ", ".join(map(" ".join, references)),
        "queue": queues and f"LocalQueue {queues} admits what the stages ask for",
        "store": "can be written from here",
    }
    checks: list[Check] = []
    for name, find in preflight.REQUIRED.items():
        checks += collect_checks(name, find(cluster, workflow), described[name])
    if any(check.outcome == REFUSED for check in checks):
        return checks
    checks += collect_checks("Argo's controller", check_controller(cluster))
    checks += collect_checks("workflow defaults", check_workflow_defaults(cluster))
    elsewhere = (store or "s3:").partition(":")[0] != "s3" or "claim" in dict(references)
    checks += collect_checks(
        "store", check_store_settings(cluster, "local", WARNING if elsewhere else REFUSED)
    )
    own = {"images": check_argo_images, "queue": check_argo_queue, "store": check_argo_store}
    for name, find_more in {**preflight.CHECKS, **own}.items():
        if name != "store" or store:
            checks += collect_checks(name, find_more(cluster, workflow), described.get(name, ""))
    return checks


def describe_queued_stage() -> JsonObject:
    """Describe a workflow with a stage of each role and the default settings, which needs nothing but its queue."""
    stages = [
        {"name": role, "metadata": {"labels": Cluster().build_queue_labels(role)}} for role in ROLES
    ]
    parameters = [{"name": "run"}, {"name": "store"}]
    return {"metadata": {}, "spec": {"templates": stages, "arguments": {"parameters": parameters}}}


def collect_checks(
    subject: str, found: Iterable[Check | UserError], otherwise: str = ""
) -> list[Check]:
    """Collect a check's findings: problems as refusals, and objects that the account may not read; else `otherwise`."""
    with record_denied_reads() as denied:
        checks = [each if isinstance(each, Check) else _refuse(subject, each) for each in found]
    checks += [
        Check(subject, NOT_CHECKED, f"not checked: no right to {each}")
        for each in dict.fromkeys(denied)
    ]
    return checks or ([Check(subject, OK, otherwise)] if otherwise else [])


def _refuse(subject: str, problem: UserError) -> Check:
    found, _, remedy = problem.remedy.rpartition("; ")
    if isinstance(problem, Problem):
        found = problem.found
        remedy = problem.command
    field = "" if problem.field == subject else f"{problem.field} "
    return Check(
        subject,
        REFUSED,
        f"{field}{shorten_text(repr(problem.value))}: {found or 'is refused'}",
        remedy,
    )


def check_controller(cluster: Connection) -> Iterator[Check]:
    """Check the version of Argo's controller, in whatever namespace it is."""
    listed = cluster.custom.list_cluster_custom_object
    found = find_object(
        listed, "apps", "v1", "deployments", field_selector=f"metadata.name={CONTROLLER}"
    )
    if found is UNSEEN:
        return
    if not found["items"]:
        yield Check(
            "Argo's controller",
            NOT_CHECKED,
            f"not checked: no Deployment has the name {CONTROLLER}",
        )
    for deployment in found["items"]:
        yield check_version("Argo's controller", deployment, ARGO, WARNING, INSTALL_ARGO)


def check_version(
    subject: str, deployment: JsonMapping, least: tuple[int, ...], older: str, remedy: str
) -> Check:
    """Check a Deployment's release by the tag of its first image; one before `least` has the outcome `older`."""
    image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    place = f"{image} in namespace {deployment['metadata']['namespace']}"
    wanted = ".".join(map(str, least))
    if (match := re.match(r"v?(\d+)\.(\d+)", read_tag(image))) is None:
        return Check(
            subject,
            WARNING,
            f"{place}: the tag is not a version; {wanted} or newer is needed",
            remedy,
        )
    if tuple(map(int, match.groups())) < least:
        return Check(subject, older, f"{place}: {wanted} or newer is needed", remedy)
    return Check(subject, OK, place)


def read_tag(image: str) -> str:
    """Read the tag of an image's name: ``latest`` if it has none, empty if it is named by digest alone."""
    name, _, digest = image.partition("@")
    return name.rpartition("/")[2].partition(":")[2] or ("" if digest else "latest")


def find_controller_settings(cluster: Connection) -> tuple[str, JsonObject] | None:
    """Find the ConfigMap of Argo's controller, in the namespace of the runs or else in any: its namespace (empty: there
    is none) and its settings; None where the account has no right to look."""
    found = find_object(cluster.core.read_namespaced_config_map, SETTINGS, cluster.namespace)
    if found is ABSENT:
        listed = cluster.core.list_config_map_for_all_namespaces
        everywhere = find_object(listed, field_selector=f"metadata.name={SETTINGS}")
        found = UNSEEN if everywhere is UNSEEN else next(iter(everywhere.items), ABSENT)
    if found in (ABSENT, UNSEEN):
        return ("", {}) if found is ABSENT else None
    keys = (
        "config",
        "executor",
        "workflowDefaults",
    )  # older manifests have all settings below the first
    data = {key: yaml.safe_load(text) for key, text in (found.data or {}).items() if key in keys}
    return found.metadata.namespace, {**(data.pop("config", None) or {}), **data}


def check_workflow_defaults(cluster: Connection) -> Iterator[Check]:
    """Report the retries that Argo's controller gives to every template."""
    if found := find_controller_settings(cluster):
        namespace, settings = found
        spec = (settings.get("workflowDefaults") or {}).get("spec") or {}
        retry = (spec.get("templateDefaults") or {}).get("retryStrategy")
        said = (
            f"templateDefaults.retryStrategy {json.dumps(retry)}"
            if retry
            else "no templateDefaults.retryStrategy"
        )
        place = f"{SETTINGS} in namespace {namespace}" if namespace else f"no {SETTINGS}"
        yield Check("workflow defaults", OK, f"{said} ({place})")


def check_store_settings(cluster: Connection, overlay: str, missing: str) -> Iterator[Check]:
    """Check the ConfigMap and the Secret with the settings of the store, of ``manifests/overlays/<overlay>``; no value
    is shown. `missing` is the outcome where one of them is not there."""
    apply = f"kubectl apply -k manifests/overlays/{overlay}"
    prefix = f"kubectl -n {cluster.namespace}"
    literals = " ".join(f"--from-literal={key}=…" for key in SECRET)
    found = {
        "ConfigMap": find_object(cluster.core.read_namespaced_config_map, STORE, cluster.namespace),
        "Secret": find_object(cluster.core.read_namespaced_secret, STORE, cluster.namespace),
    }
    secret = f"{prefix} create secret generic {STORE} {literals} --dry-run=client -o yaml | kubectl apply -f -"
    commands = {"ConfigMap": f"{prefix} edit configmap {STORE}", "Secret": secret}
    for (kind, each), keys, outcome in zip(found.items(), (PLAIN, SECRET), (WARNING, missing)):
        if each is ABSENT:
            yield Check(
                "store",
                missing,
                f"{kind} {STORE} is missing in namespace {cluster.namespace}",
                apply,
            )
        elif each is not UNSEEN:
            lacking = [key for key in keys if key not in (each.data or {})]
            said = (
                f"{kind} {STORE} lacks {', '.join(lacking)}"
                if lacking
                else f"{kind} {STORE}: {', '.join(keys)}"
            )
            yield Check(
                "store", outcome if lacking else OK, said, commands[kind] if lacking else ""
            )
    for key in sorted(
        set.intersection(*(set(getattr(each, "data", None) or ()) for each in found.values()))
    ):
        patch = json.dumps([{"op": "remove", "path": f"/data/{key}"}])
        remedy = f"{prefix} patch configmap {STORE} --type=json -p '{patch}'"
        yield Check(
            "store",
            WARNING,
            f"{key} is in both, ConfigMap and Secret {STORE}: keep it in one",
            remedy,
        )


def check_argo_queue(cluster: Connection, workflow: JsonMapping) -> Iterator[Check | UserError]:
    """Check the queues of a workflow: first the problems that `submit` refuses, then its warnings."""
    yield from preflight.CHECKS["queue"](cluster, workflow)
    for each in find_queue_warnings(cluster, workflow):
        yield replace(_refuse("queue", each), outcome=WARNING)


def check_argo_images(cluster: Connection, workflow: JsonMapping) -> Iterator[Check | UserError]:
    """Check the images of a workflow: those that `submit` refuses, then the others."""
    refused = {problem.value: problem for problem in preflight.CHECKS["images"](cluster, workflow)}
    yield from refused.values()
    yield from check_images(
        cluster, [image for image in preflight.list_images(workflow) if image not in refused]
    )


def check_argo_store(cluster: Connection, workflow: JsonMapping) -> Iterator[Check | UserError]:
    """Check the store of a run: as `submit` does, with a write where this machine has its keys."""
    problems = list(preflight.CHECKS["store"](cluster, workflow))
    yield from problems
    if not problems and not preflight.has_store_keys("s3"):
        yield Check(
            "store", NOT_CHECKED, "not checked by a write: AWS_ACCESS_KEY_ID is not set here"
        )


def check_images(cluster: Connection, images: Iterable[str]) -> Iterator[Check]:
    """Check that images have a fixed tag, and are on a node or can be pulled."""
    there, whole = preflight.list_node_images(cluster)
    for image in images:
        if read_tag(image) == "latest":
            said = (
                f"{image}: nodes keep what they have as `latest`, and pods would run different code"
            )
            yield Check(
                "images",
                REFUSED,
                said,
                "tuneloop doctor … --set 'cluster.images=REGISTRY/{image}:TAG'",
            )
        elif preflight.is_on_node(image, there):
            yield Check("images", OK, f"{image}: on a node")
        elif there or whole:
            yield Check(
                "images",
                WARNING,
                f"{image}: not on a node: it must be pullable",
                f"docker push {image}",
            )
