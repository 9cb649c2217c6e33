"""Check, before a run, that a Kubeflow Pipelines backend has what tuneloop's pipelines need. The checks change nothing;
those shared with Argo are in `tuneloop.cluster.doctor`."""

import json
import shlex
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml

from tuneloop.cluster import doctor as common
from tuneloop.cluster.doctor import (
    NOT_CHECKED,
    OK,
    REFUSED,
    SETTINGS,
    WARNING,
    Check,
    collect_checks,
)
from tuneloop.cluster.preflight import list_images
from tuneloop.cluster.problems import ABSENT, UNSEEN, find_object
from tuneloop.cluster.queue_problems import KUEUE, find_queue_problems
from tuneloop.cluster.run_workflows import list_queues
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kfp.client import compiled_package, connect_to_kfp
from tuneloop.kube.connection import Connection

API_SERVER = "ml-pipeline"
SIZE_LIMIT = 0.7 * 2**20
"""Safe size of a workflow object, in bytes: its limit is 1 MiB, and KFP stores no part of it elsewhere."""
NODE_BYTES = 9_500
"""Bytes of a task in the status that Argo compresses: 16 tasks of an unrolled loop took 152 kB on KFP's manifests."""
SHOWN_TASKS = 12
"""Tasks of a run whose status is not compressed: each takes 79 kB of 1 MiB, and KFP cannot read a compressed one."""
EXECUTOR = {"runAsNonRoot": True, "runAsUser": 65532}
"""The executor's security context in KFP's own manifests."""
RELEASE = version("kfp")
"""Release of the SDK, which compiles the pipelines."""
SOURCE = "github.com/kubeflow/pipelines/manifests/kustomize"
INSTALL = (
    f"kubectl apply -k '{SOURCE}/cluster-scoped-resources?ref={RELEASE}' && "
    f"kubectl apply -k '{SOURCE}/env/platform-agnostic?ref={RELEASE}'"
)


def check_kfp(
    cluster: Connection, built: Any = None, settings: Any = None, *, endpoint: str | None = None
) -> list[Check]:
    """Check that a backend has what all pipelines need and, if given, the pipeline `built` from the configuration
    `settings`. Raises UserError if the cluster does not answer, Retryable if the API server has a problem."""
    documents: list[JsonObject] = []
    if built:
        with compiled_package(
            built
        ) as package:  # its specification, and its platform's if it has one
            documents = list(yaml.load_all(Path(package).read_text(), yaml.CSafeLoader))
    workflow = convert_to_workflow(documents) if documents else common.describe_queued_stage()
    queues = ", ".join(list_queues(workflow))
    admitted = queues and f"LocalQueue {queues} admits what accelerator tasks ask for"
    on_volume = bool(settings and settings.kfp.volumes)
    checks = [
        *collect_checks("KFP's API server", check_api_server(cluster)),
        *collect_checks("executor", check_executor(cluster)),
        *collect_checks("workflow defaults", check_retries(cluster)),
        *collect_checks(
            "store", common.check_store_settings(cluster, "kfp", WARNING if on_volume else REFUSED)
        ),
        *collect_checks("queue", check_queue(cluster, workflow), admitted),
        *collect_checks("images", common.check_images(cluster, list_images(workflow))),
    ]
    if documents:
        checks.append(check_size(predict_workflow_size(documents[0]), count_tasks(documents[0])))
    return [*checks, check_endpoint(cluster, endpoint)]


def convert_to_workflow(documents: list[JsonObject]) -> JsonObject:
    """Convert a compiled pipeline to an Argo Workflow with as much of each task's pod as `preflight` reads."""
    spec, *platforms = documents
    kubernetes = (
        platforms[0]["platforms"]["kubernetes"]["deploymentSpec"]["executors"] if platforms else {}
    )
    templates = []
    for name, executor in spec["deploymentSpec"]["executors"].items():
        if container := executor.get("container"):
            given = container.get("resources", {})
            named = {
                "cpu": given.get("resourceCpuRequest"),
                "memory": given.get("resourceMemoryRequest"),
            }
            if device := given.get("accelerator"):
                named[device["resourceType"]] = device["resourceCount"]
            requests = {resource: amount for resource, amount in named.items() if amount}
            labels = kubernetes.get(name, {}).get("podMetadata", {}).get("labels", {})
            pod = {"image": container["image"], "resources": {"requests": requests}}
            templates.append(
                {
                    "name": name.removeprefix("exec-"),
                    "metadata": {"labels": labels},
                    "container": pod,
                }
            )
    return {"spec": {"templates": templates}}


def check_api_server(cluster: Connection) -> Iterator[Check]:
    """Check that KFP's API server is in the namespace, of the SDK's release or newer."""
    if (found := find_object(cluster.get, "apps", "v1", "deployments", API_SERVER)) is ABSENT:
        said = f"no Deployment {API_SERVER} in namespace {cluster.namespace} of context {cluster.context}"
        yield Check("KFP's API server", REFUSED, said, INSTALL)
    elif found is not UNSEEN:
        least = tuple(map(int, RELEASE.split(".")[:2]))
        yield common.check_version("KFP's API server", found, least, REFUSED, INSTALL)


def check_executor(cluster: Connection) -> Iterator[Check]:
    """Check that Argo's executor runs as a user: KFP's driver pods are non-root, and its image alone runs as root."""
    if (found := common.find_controller_settings(cluster)) is None:
        return
    namespace = found[0]
    executor = found[1].get("executor") or {}
    if not namespace:
        yield Check(
            "executor",
            REFUSED,
            f"no ConfigMap {SETTINGS} in any namespace: Argo is missing",
            INSTALL,
        )
        return
    context = executor.get("securityContext") or {}
    if context.get("runAsUser") or "nonroot" in executor.get("image", ""):
        said = (
            f"runs as user {context['runAsUser']}"
            if "runAsUser" in context
            else f"image {executor['image']}"
        )
        yield Check("executor", OK, f"{said} ({SETTINGS} in namespace {namespace})")
        return
    mended = json.dumps({**executor, "securityContext": {**context, **EXECUTOR}})
    patch = shlex.quote(json.dumps({"data": {"executor": mended}}))
    command = f"kubectl -n {namespace} patch configmap {SETTINGS} --type merge -p {patch}"
    said = "has no securityContext.runAsUser: KFP's driver pods would hang in CreateContainerConfigError"
    yield Check("executor", REFUSED, f"{SETTINGS} in namespace {namespace} {said}", command)


def check_retries(cluster: Connection) -> Iterator[Check]:
    """Check the retry policy of Argo's controller, which also applies to `kfp.retries`: OnError, that of KFP's own
    manifests, does not cover exit code 143, with which KFP's launcher ends when its pod is deleted."""
    namespace, settings = common.find_controller_settings(cluster) or (None, {})
    defaults = settings.get("workflowDefaults") or {}
    retry = defaults.get("spec", {}).get("templateDefaults", {}).get("retryStrategy") or {}
    if retry.get("retryPolicy") != "OnError":
        yield from common.check_workflow_defaults(cluster)
        return
    said = "retryPolicy OnError: a run fails when one of its pods is preempted, and kfp.retries has no meaning; the "
    said += "command changes that for all workflows of this controller"
    retry["retryPolicy"] = "Always"
    patch = shlex.quote(json.dumps({"data": {"workflowDefaults": json.dumps(defaults)}}))
    command = f"kubectl -n {namespace} patch configmap {SETTINGS} --type merge -p {patch}"
    yield Check(
        "workflow defaults", WARNING, f"{said} ({SETTINGS} in namespace {namespace})", command
    )


def check_queue(cluster: Connection, workflow: JsonMapping) -> Iterator[Check | UserError]:
    """Check the LocalQueues in which accelerator tasks wait, and their ClusterQueues."""
    names = list_queues(workflow)
    group, release = KUEUE
    namespace = cluster.namespace
    if not names:
        return
    found = find_object(
        cluster.custom.list_namespaced_custom_object, group, release, namespace, "localqueues"
    )
    if found is ABSENT:
        yield Check(
            "queue",
            OK,
            f"Kueue ({group}/{release}) is not installed: accelerator tasks start at once",
        )
    elif found is not UNSEEN:
        missing = [
            name
            for name in names
            if name not in [each["metadata"]["name"] for each in found["items"]]
        ]
        for name in missing:
            about = {
                "metadata": {"name": name, "namespace": namespace},
                "spec": {"clusterQueue": name},
            }
            queue = json.dumps({"apiVersion": f"{group}/{release}", "kind": "LocalQueue", **about})
            said = f"no LocalQueue {name} in namespace {namespace}: accelerator tasks would wait for ever"
            yield Check("queue", REFUSED, said, f"echo {shlex.quote(queue)} | kubectl apply -f -")
        if not missing:
            yield from find_queue_problems(cluster, workflow)


def count_tasks(spec: JsonMapping) -> int:
    """Count the tasks of all graphs of a compiled pipeline."""
    return sum(
        len(graph.get("dag", {}).get("tasks", {}))
        for graph in (spec["root"], *spec["components"].values())
    )


def predict_workflow_size(spec: JsonMapping) -> int:
    """Predict the bytes of a run's workflow object: the compiled pipeline, and a status that grows with the tasks."""
    return len(json.dumps(spec)) + NODE_BYTES * count_tasks(spec)


def check_size(size: int, tasks: int) -> Check:
    """Check the predicted size of a workflow object, and whether KFP can show its tasks."""
    said = f"{size / 1000:.0f} kB predicted; up to {SIZE_LIMIT / 1000:.0f} kB, 70 % of Argo's limit, are safe"
    remedy = "tuneloop kfp doctor … --set kfp.unroll=0"
    if size >= SIZE_LIMIT:
        return Check("workflow size", REFUSED, said, remedy)
    if tasks > SHOWN_TASKS:
        said = f"{tasks} tasks: Argo compresses the status of more than {SHOWN_TASKS}, and KFP cannot show it then"
        return Check("workflow size", WARNING, said, remedy)
    return Check("workflow size", OK, said)


def check_endpoint(cluster: Connection, endpoint: str | None) -> Check:
    """Check that KFP's API answers this machine."""
    subject = "KFP's API"
    forward = f"kubectl -n {cluster.namespace} port-forward svc/{API_SERVER} 8888:8888"
    if not endpoint:
        return Check(
            subject,
            NOT_CHECKED,
            "not checked: neither --endpoint nor KF_PIPELINES_ENDPOINT names it",
        )
    try:
        connect_to_kfp(endpoint)
    except (UserError, Retryable) as error:
        return Check(
            subject, REFUSED, str(error), f"{forward} &  # then --endpoint http://localhost:8888"
        )
    return Check(subject, OK, f"{endpoint} answers")
