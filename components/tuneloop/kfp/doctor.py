"""Check, before a run, that a Kubeflow Pipelines backend has what tuneloop's pipelines need.

The checks change nothing; those shared with Argo are in `cluster/doctor.py`. A further check is a
function that yields `Check`, and a line in `check_kfp`; docs/kfp.md lists what is looked at. The
command is `cli/doctor.py: diagnose_kfp`; `submit` for Kubeflow Pipelines checks nothing of this.
"""

import json
import shlex
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tuneloop.cluster import doctor as common
from tuneloop.cluster.credentials import check_credentials
from tuneloop.cluster.doctor import (
    NOT_CHECKED,
    OK,
    REFUSED,
    SETTINGS,
    WARNING,
    Check,
    collect_checks,
)
from tuneloop.cluster.kueue import GROUP, VERSIONS, find_kueue
from tuneloop.cluster.preflight import list_images
from tuneloop.cluster.problems import ABSENT, UNSEEN, find_object
from tuneloop.cluster.queue_problems import find_queue_problems
from tuneloop.cluster.run_workflows import list_queues
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kfp.client import compiled_package, connect_to_kfp
from tuneloop.kube.connection import Connection
from tuneloop.workflow.credentials import SecretKeys

API_SERVER = "ml-pipeline"
"""The Deployment and the Service of KFP's API server in its own manifests."""
RUN_ACCOUNT = "pipeline-runner"
"""The service account of a run's pods in KFP's own manifests."""
SIZE_LIMIT = 0.7 * 2**20
"""Safe size of a workflow object, in bytes.

Its limit is 1 MiB, and KFP stores no part of it elsewhere.
"""
NODE_BYTES = 9_500
"""Bytes that a task takes in the status of a workflow, after Argo has compressed it.

Measured: 16 tasks of an unrolled loop took 152 kB on KFP's manifests.
"""
SHOWN_TASKS = 12
"""The most tasks of a run whose status Argo does not compress: each takes 79 kB of 1 MiB.

KFP cannot read a compressed status, so that its UI shows no progress of a larger run.
"""
EXECUTOR = {"runAsNonRoot": True, "runAsUser": 65532}
"""The executor's security context in KFP's own manifests."""
RELEASE = version("kfp")
"""Release of the SDK, which compiles the pipelines."""
SOURCE = "github.com/kubeflow/pipelines/manifests/kustomize"
INSTALL = (
    f"kubectl apply -k '{SOURCE}/cluster-scoped-resources?ref={RELEASE}' && "
    f"kubectl apply -k '{SOURCE}/env/platform-agnostic?ref={RELEASE}'"
)
"""The command that installs KFP or updates it, as the remedy of several checks."""


def check_kfp(
    cluster: Connection,
    pipeline: Any = None,
    settings: Any = None,
    *,
    endpoint: str | None = None,
) -> list[Check]:
    """Check that a backend has what all pipelines need, and what one of them needs.

    Args:
        cluster: with the namespace of the backend.
        pipeline: a pipeline to check, too.
        settings: the configuration that it was built from.
        endpoint: the URL of KFP's API.

    Raises:
        UserError: the cluster does not answer.
        Retryable: the API server has a problem.
    """
    # A compiled pipeline is its specification, and its platform's if it has one.
    documents: list[JsonObject] = []
    if pipeline:
        with compiled_package(pipeline) as package:
            documents = list(yaml.load_all(Path(package).read_text(), yaml.CSafeLoader))
    workflow = convert_to_workflow(documents) if documents else common.describe_queued_stage()
    queues = ", ".join(list_queues(workflow))
    admitted = queues and f"LocalQueue {queues} admits what accelerator tasks ask for"
    # A run on volumes does without the settings of an object store.
    volumes = settings.cluster.pod_settings("cpu").volumes if settings else {}
    is_on_volume = any(source.startswith("pvc/") for source in volumes.values())
    store_checks = check_credentials(
        cluster,
        settings.cluster.store_credentials if settings else SecretKeys(),
        [RUN_ACCOUNT],
        overlay="kfp",
        missing=WARNING if is_on_volume else REFUSED,
    )
    image_checks = common.check_images(cluster, list_images(workflow))
    checks = list(collect_checks("KFP's API server", check_api_server(cluster)))
    checks += collect_checks("executor", check_executor(cluster))
    checks += collect_checks("workflow defaults", check_retries(cluster))
    checks += collect_checks("store", store_checks)
    checks += collect_checks("queue", check_queue(cluster, workflow), admitted)
    checks += collect_checks("images", image_checks)
    if documents:
        spec = documents[0]
        checks.append(check_size(predict_workflow_size(spec), count_tasks(spec)))
    checks.append(check_endpoint(cluster, endpoint))
    return checks


def convert_to_workflow(documents: list[JsonObject]) -> JsonObject:
    """Convert a compiled pipeline to an Argo Workflow with as much of each task's pod as the shared
    checks read: image, labels and requests.

    The checks are `cluster/preflight.py: list_images`, `cluster/run_workflows.py: list_queues` and
    `cluster/queue_problems.py: find_queue_problems`. One that reads another field of a pod finds
    nothing for Kubeflow Pipelines until that field is converted here.
    """
    spec = documents[0]
    platform_executors: JsonObject = {}
    if len(documents) > 1:
        deployment = documents[1]["platforms"]["kubernetes"]["deploymentSpec"]
        platform_executors = deployment["executors"]
    templates: list[JsonObject] = []
    for name, executor in spec["deploymentSpec"]["executors"].items():
        container = executor.get("container")
        if not container:
            continue
        metadata = platform_executors.get(name, {}).get("podMetadata", {})
        template = {
            "name": name.removeprefix("exec-"),
            "metadata": {"labels": metadata.get("labels", {})},
            "container": {
                "image": container["image"],
                "resources": {"requests": _read_requests(container.get("resources", {}))},
            },
        }
        templates.append(template)
    return {"spec": {"templates": templates}}


def _read_requests(resources: JsonMapping) -> JsonObject:
    """Return resource → amount of a message ``ResourceSpec``, as a pod's `requests` have it."""
    requests = {
        "cpu": resources.get("resourceCpuRequest"),
        "memory": resources.get("resourceMemoryRequest"),
    }
    accelerator = resources.get("accelerator")
    if accelerator:
        requests[accelerator["resourceType"]] = accelerator["resourceCount"]
    return {resource: amount for resource, amount in requests.items() if amount}


def check_api_server(cluster: Connection) -> Iterator[Check]:
    """Check that KFP's API server is in the namespace, of the SDK's release or newer."""
    deployment = find_object(cluster.get, "apps", "v1", "deployments", API_SERVER)
    if deployment is ABSENT:
        problem = (
            f"no Deployment {API_SERVER} in namespace {cluster.namespace} "
            f"of context {cluster.context}"
        )
        yield Check("KFP's API server", REFUSED, problem, INSTALL)
    elif deployment is not UNSEEN:
        # Patch releases are compatible.
        minimum = tuple(map(int, RELEASE.split(".")[:2]))
        yield common.check_version("KFP's API server", deployment, minimum, REFUSED, INSTALL)


def check_executor(cluster: Connection) -> Iterator[Check]:
    """Check that Argo's executor does not run as root, which KFP's driver pods forbid. The image of
    the executor runs as root unless Argo's settings say otherwise.
    """
    controller = common.find_controller_settings(cluster)
    if controller is None:
        return
    namespace, settings = controller
    if not namespace:
        problem = f"no ConfigMap {SETTINGS} in any namespace: Argo is missing"
        yield Check("executor", REFUSED, problem, INSTALL)
        return
    executor = settings.get("executor") or {}
    context = executor.get("securityContext") or {}
    origin = f"{SETTINGS} in namespace {namespace}"
    image = executor.get("image", "")
    # Argo's own name for an image that has a user of its own.
    if context.get("runAsUser") or "nonroot" in image:
        user = context.get("runAsUser")
        identity = f"image {image}" if user is None else f"runs as user {user}"
        yield Check("executor", OK, f"{identity} ({origin})")
        return
    # The settings are one text each, so that a patch has the whole of it.
    context |= EXECUTOR
    executor["securityContext"] = context
    command = _format_patch(namespace, "executor", executor)
    problem = (
        f"{origin} has no securityContext.runAsUser: "
        "KFP's driver pods would hang in CreateContainerConfigError"
    )
    yield Check("executor", REFUSED, problem, command)


def check_retries(cluster: Connection) -> Iterator[Check]:
    """Check the retry policy of Argo's controller, which also applies to `kfp.retries`.

    OnError, that of KFP's own manifests, does not cover exit code 143, with which KFP's launcher
    ends when its pod is deleted.
    """
    namespace, settings = common.find_controller_settings(cluster) or ("", {})
    defaults = settings.get("workflowDefaults") or {}
    retry = defaults.get("spec", {}).get("templateDefaults", {}).get("retryStrategy") or {}
    if retry.get("retryPolicy") != "OnError":
        yield from common.check_workflow_defaults(cluster)
        return
    problem = (
        "retryPolicy OnError: a run fails when one of its pods is preempted, and kfp.retries has "
        "no meaning; the command changes that for all workflows of this controller "
        f"({SETTINGS} in namespace {namespace})"
    )
    # `retry` is a part of `defaults`, which the command writes.
    retry["retryPolicy"] = "Always"
    command = _format_patch(namespace, "workflowDefaults", defaults)
    yield Check("workflow defaults", WARNING, problem, command)


def _format_patch(namespace: str, key: str, value: JsonMapping) -> str:
    """Format the command that replaces one of the settings of Argo's controller."""
    patch = shlex.quote(json.dumps({"data": {key: json.dumps(value)}}))
    return f"kubectl -n {namespace} patch configmap {SETTINGS} --type merge -p {patch}"


def check_queue(cluster: Connection, workflow: JsonMapping) -> Iterator[Check | UserError]:
    """Check the LocalQueues in which accelerator tasks wait, and their ClusterQueues."""
    names = list_queues(workflow)
    if not names:
        return
    group, release = find_kueue(cluster) or (GROUP, VERSIONS[0])
    namespace = cluster.namespace
    queues = find_object(
        cluster.custom.list_namespaced_custom_object, group, release, namespace, "localqueues"
    )
    if queues is UNSEEN:
        return
    if queues is ABSENT:
        status = f"Kueue ({group}/{release}) is not installed: accelerator tasks start at once"
        yield Check("queue", OK, status)
        return
    present = {queue["metadata"]["name"] for queue in queues["items"]}
    missing = [name for name in names if name not in present]
    for name in missing:
        queue = {
            "apiVersion": f"{group}/{release}",
            "kind": "LocalQueue",
            "metadata": {"name": name, "namespace": namespace},
            "spec": {"clusterQueue": name},
        }
        problem = (
            f"no LocalQueue {name} in namespace {namespace}: accelerator tasks would wait for ever"
        )
        command = f"echo {shlex.quote(json.dumps(queue))} | kubectl apply -f -"
        yield Check("queue", REFUSED, problem, command)
    if not missing:
        yield from find_queue_problems(cluster, workflow)


def count_tasks(spec: JsonMapping) -> int:
    """Count the tasks of all graphs of a compiled pipeline."""
    graphs = [spec["root"]]
    graphs += spec["components"].values()
    return sum(len(graph.get("dag", {}).get("tasks", {})) for graph in graphs)


def predict_workflow_size(spec: JsonMapping) -> int:
    """Predict the bytes of a run's workflow object: the compiled pipeline, and a status that grows
    with the tasks.
    """
    return len(json.dumps(spec)) + NODE_BYTES * count_tasks(spec)


def check_size(size: int, tasks: int) -> Check:
    """Check the predicted size of a workflow object, and whether KFP can show its tasks.

    Args:
        size: in bytes.
        tasks: how many the pipeline has.
    """
    prediction = (
        f"{size / 1000:.0f} kB predicted; "
        f"up to {SIZE_LIMIT / 1000:.0f} kB, 70 % of Argo's limit, are safe"
    )
    remedy = "tuneloop kfp doctor … --set kfp.unroll=0"
    if size >= SIZE_LIMIT:
        return Check("workflow size", REFUSED, prediction, remedy)
    if tasks > SHOWN_TASKS:
        problem = (
            f"{tasks} tasks: Argo compresses the status of more than {SHOWN_TASKS}, "
            "and KFP cannot show it then"
        )
        return Check("workflow size", WARNING, problem, remedy)
    return Check("workflow size", OK, prediction)


def check_endpoint(cluster: Connection, endpoint: str | None) -> Check:
    """Check that KFP's API answers this machine."""
    subject = "KFP's API"
    if not endpoint:
        status = "not checked: neither --endpoint nor KF_PIPELINES_ENDPOINT names it"
        return Check(subject, NOT_CHECKED, status)
    try:
        connect_to_kfp(endpoint)
    except (UserError, Retryable) as error:
        forward = f"kubectl -n {cluster.namespace} port-forward svc/{API_SERVER} 8888:8888"
        remedy = f"{forward} &  # then --endpoint http://localhost:8888"
        return Check(subject, REFUSED, str(error), remedy)
    return Check(subject, OK, f"{endpoint} answers")
