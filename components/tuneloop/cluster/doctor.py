"""Check a cluster before anything is submitted, and find the commands that fix each problem.

Nothing is changed there. `preflight` finds what `tuneloop submit` refuses; Kubeflow Pipelines' own
checks are in `tuneloop.kfp.doctor`, which calls some of the functions here.

`cli/doctor.py` prints the checks. The fields of `Check` and the four outcomes are the JSON of
``doctor --json``, which docs/commands.md promises to programs.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

import yaml

from tuneloop.cluster import preflight
from tuneloop.cluster.capacity import find_capacity_warnings
from tuneloop.cluster.checks import NOT_CHECKED, OK, REFUSED, WARNING, Check
from tuneloop.cluster.credentials import check_credentials, list_accounts
from tuneloop.cluster.problems import (
    ABSENT,
    UNSEEN,
    Problem,
    find_object,
    record_denied_reads,
)
from tuneloop.cluster.queue_problems import find_queue_warnings
from tuneloop.cluster.run_workflows import list_queues
from tuneloop.core.errors import UserError, shorten_text
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kube.connection import Connection
from tuneloop.workflow.credentials import SecretKeys, StoreCredentials
from tuneloop.workflow.settings import ROLES, Cluster

CONTROLLER = "workflow-controller"
SETTINGS = "workflow-controller-configmap"
"""Argo's Deployment and its ConfigMap, as its manifests and KFP's name them."""
ARGO = (3, 7)
"""The oldest release of Argo Workflows that was tried. The local executor follows the semantics of
this one (`local/graph.py`, `local/retries.py`)."""
INSTALL_ARGO = (
    "kubectl apply --server-side -n argo -f "
    "https://github.com/argoproj/argo-workflows/releases/download/v3.7.6/install.yaml"
)
"""``manifests/third-party/README.md`` has the same command with the same release."""


def check_argo(
    cluster: Connection,
    workflow: JsonMapping,
    store: str | None = None,
    credentials: StoreCredentials | None = None,
) -> list[Check]:
    """Check whether a cluster has what a workflow needs of Argo Workflows.

    Args:
        cluster: with the namespace of the run to come.
        workflow: of `run_workflows.prepare_workflow` or `describe_queued_stage`.
        store: of the run, as in the workflow's parameter; None: not known yet.
        credentials: those of the settings; None: the defaults.

    Raises:
        UserError: the cluster does not answer.
        Retryable: the API server is in trouble.
    """
    queues = ", ".join(list_queues(workflow))
    references = sorted(set(preflight.list_references(workflow["spec"])))
    # Subject → what is printed if nothing is refused. An empty text is not printed: the workflow
    # does not need that. Each subject of `preflight.REQUIRED` has to be here. One of
    # `preflight.CHECKS` that is not here prints nothing if nothing is refused.
    descriptions = {
        "namespace": f"{cluster.namespace} of context {cluster.context}",
        "Argo Workflows": "its API is there",
        "rights": f"may create workflows in namespace {cluster.namespace}",
        "references": ", ".join(map(" ".join, references)),
        "queue": queues and f"LocalQueue {queues} admits what the stages ask for",
        "store": "can be written from here",
    }
    checks: list[Check] = []
    for subject, find in preflight.REQUIRED.items():
        checks += collect_checks(subject, find(cluster, workflow), descriptions[subject])
    if any(check.outcome == REFUSED for check in checks):
        return checks
    checks += collect_checks("Argo's controller", check_controller(cluster))
    checks += collect_checks("workflow defaults", check_workflow_defaults(cluster))
    # Only S3 has its settings in these objects: a claim needs none, and others are of the user.
    is_s3 = not store or store.startswith("s3:")
    missing = REFUSED if is_s3 and "claim" not in dict(references) else WARNING
    credential_checks = check_credentials(
        cluster, credentials or SecretKeys(), list_accounts(workflow), missing=missing
    )
    checks += collect_checks("store", credential_checks)
    finders = {
        **preflight.CHECKS,
        "images": check_argo_images,
        "queue": check_argo_queue,
        "capacity": check_argo_capacity,
        "store": check_argo_store,
    }
    for subject, find_more in finders.items():
        if subject != "store" or store:
            description = descriptions.get(subject, "")
            checks += collect_checks(subject, find_more(cluster, workflow), description)
    return checks


def describe_queued_stage() -> JsonObject:
    """Describe a workflow with a stage of each role and the default settings, which needs nothing
    but its queue.

    It has no containers and no plan (`workflow/plan.py: find_plan`), and every check gets it where
    no pipeline is named.
    """
    stages: list[JsonObject] = []
    for role in ROLES:
        labels = Cluster().build_queue_labels(role)
        stages.append({"name": role, "metadata": {"labels": labels}})
    parameters = [{"name": "run"}, {"name": "store"}]
    return {"metadata": {}, "spec": {"templates": stages, "arguments": {"parameters": parameters}}}


def collect_checks(
    subject: str, findings: Iterable[Check | UserError], description: str = ""
) -> list[Check]:
    """Collect a check's findings: problems as refusals, and objects that the account may not read.

    Args:
        subject: what is checked.
        findings: they are found while this function reads them.
        description: what is said if there are none; empty: nothing.
    """
    checks: list[Check] = []
    with record_denied_reads() as denied:
        for finding in findings:
            checks.append(finding if isinstance(finding, Check) else _refuse(subject, finding))
    for read in dict.fromkeys(denied):
        checks.append(Check(subject, NOT_CHECKED, f"not checked: no right to {read}"))
    if not checks and description:
        checks.append(Check(subject, OK, description))
    return checks


def _refuse(subject: str, problem: UserError) -> Check:
    """Return a problem as a check that refuses the run."""
    if isinstance(problem, Problem):
        finding = problem.found
        remedy = problem.command
    else:
        # Other errors say in one text what is wrong and, last, how to mend it.
        finding, _, remedy = problem.remedy.rpartition("; ")
    field = "" if problem.field == subject else f"{problem.field} "
    value = shorten_text(repr(problem.value))
    return Check(subject, REFUSED, f"{field}{value}: {finding or 'is refused'}", remedy)


def check_controller(cluster: Connection) -> Iterator[Check]:
    """Check the version of Argo's controller, in whatever namespace it is."""
    list_objects = cluster.custom.list_cluster_custom_object
    selector = f"metadata.name={CONTROLLER}"
    deployments = find_object(list_objects, "apps", "v1", "deployments", field_selector=selector)
    if deployments is UNSEEN:
        return
    if not deployments["items"]:
        finding = f"not checked: no Deployment has the name {CONTROLLER}"
        yield Check("Argo's controller", NOT_CHECKED, finding)
    for deployment in deployments["items"]:
        yield check_version("Argo's controller", deployment, ARGO, WARNING, INSTALL_ARGO)


def check_version(
    subject: str, deployment: JsonMapping, oldest: tuple[int, ...], outcome: str, remedy: str
) -> Check:
    """Check a Deployment's release by the tag of its first image.

    Args:
        subject: what the Deployment is.
        deployment: the object.
        oldest: the oldest release that is enough, such as ``(3, 7)``.
        outcome: of an older release.
        remedy: the command that installs a newer one.
    """
    image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    location = f"{image} in namespace {deployment['metadata']['namespace']}"
    requirement = f"{'.'.join(map(str, oldest))} or newer is needed"
    match = re.match(r"v?(\d+)\.(\d+)", read_tag(image))
    if match is None:
        finding = f"{location}: the tag is not a version; {requirement}"
        return Check(subject, WARNING, finding, remedy)
    if (int(match[1]), int(match[2])) < oldest:
        return Check(subject, outcome, f"{location}: {requirement}", remedy)
    return Check(subject, OK, location)


def read_tag(image: str) -> str:
    """Read the tag of an image's name: ``latest`` if it has none, empty if it is named by digest
    alone.
    """
    name, _, digest = image.partition("@")
    # A colon before the last slash is that of a registry's port.
    tag = name.rpartition("/")[2].partition(":")[2]
    return tag or ("" if digest else "latest")


def find_controller_settings(cluster: Connection) -> tuple[str, JsonObject] | None:
    """Find the ConfigMap of Argo's controller, in the namespace of the runs or else in any.

    Returns:
        Its namespace (empty: there is none) and its settings; None where the account has no right
        to look.
    """
    config_map = find_object(cluster.core.read_namespaced_config_map, SETTINGS, cluster.namespace)
    if config_map is ABSENT:
        list_maps = cluster.core.list_config_map_for_all_namespaces
        listed = find_object(list_maps, field_selector=f"metadata.name={SETTINGS}")
        config_map = UNSEEN if listed is UNSEEN else next(iter(listed.items), ABSENT)
    if config_map is UNSEEN:
        return None
    if config_map is ABSENT:
        return "", {}
    data = config_map.data or {}
    # Older manifests have all settings below the first key.
    settings: JsonObject = yaml.safe_load(data.get("config", "")) or {}
    for key in ("executor", "workflowDefaults"):
        if key in data:
            settings[key] = yaml.safe_load(data[key])
    return config_map.metadata.namespace, settings


def check_workflow_defaults(cluster: Connection) -> Iterator[Check]:
    """Report the retries that Argo's controller gives to every template."""
    controller = find_controller_settings(cluster)
    if controller is None:
        return
    namespace, settings = controller
    spec = (settings.get("workflowDefaults") or {}).get("spec") or {}
    retry = (spec.get("templateDefaults") or {}).get("retryStrategy")
    finding = "no templateDefaults.retryStrategy"
    if retry:
        finding = f"templateDefaults.retryStrategy {json.dumps(retry)}"
    source = f"{SETTINGS} in namespace {namespace}" if namespace else f"no {SETTINGS}"
    yield Check("workflow defaults", OK, f"{finding} ({source})")


def check_argo_queue(cluster: Connection, workflow: JsonMapping) -> Iterator[Check | UserError]:
    """Check the queues of a workflow: first the problems that `submit` refuses, then its warnings."""
    yield from preflight.CHECKS["queue"](cluster, workflow)
    for warning in find_queue_warnings(cluster, workflow):
        yield replace(_refuse("queue", warning), outcome=WARNING)


def check_argo_capacity(cluster: Connection, workflow: JsonMapping) -> Iterator[Check | UserError]:
    """Check quotas, limit ranges and nodes: what `submit` refuses, then its warnings."""
    yield from preflight.CHECKS["capacity"](cluster, workflow)
    for warning in find_capacity_warnings(cluster, workflow):
        yield replace(_refuse("capacity", warning), outcome=WARNING)


def check_argo_images(cluster: Connection, workflow: JsonMapping) -> Iterator[Check | UserError]:
    """Check the images of a workflow: those that `submit` refuses, then the others."""
    problems = list(preflight.CHECKS["images"](cluster, workflow))
    yield from problems
    refused = {problem.value for problem in problems}
    images = [image for image in preflight.list_images(workflow) if image not in refused]
    yield from check_images(cluster, images)


def check_argo_store(cluster: Connection, workflow: JsonMapping) -> Iterator[Check | UserError]:
    """Check the store of a run: as `submit` does, with a write where this machine has its keys."""
    problems = list(preflight.CHECKS["store"](cluster, workflow))
    yield from problems
    for note in preflight.find_store_notes(workflow):
        yield Check("store", NOT_CHECKED, note.remedy)


def check_images(cluster: Connection, images: Iterable[str]) -> Iterator[Check]:
    """Check that images have a fixed tag, and are on a node or can be pulled."""
    node_images, is_complete = preflight.list_node_images(cluster)
    for image in images:
        if read_tag(image) == "latest":
            yield Check(
                "images",
                REFUSED,
                f"{image}: nodes keep what they have as `latest`, and pods would run different"
                " code",
                "tuneloop doctor … --set 'cluster.images=REGISTRY/{image}:TAG'",
            )
        elif preflight.is_on_node(image, node_images):
            yield Check("images", OK, f"{image}: on a node")
        elif node_images or is_complete:
            finding = f"{image}: not on a node: it must be pullable"
            yield Check("images", WARNING, finding, f"docker push {image}")
