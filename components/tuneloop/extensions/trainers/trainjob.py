"""A trainer backend as a TrainJob, a JobSet, a RayJob, a Job of one pod, and a Workflow of Argo's
with initializers.

    backend = Trl(trainer="sft", nodes=2, args={"model_name_or_path": "/workspace/model", …})
    manifest = as_trainjob(backend, "tune", cluster, dataset="s3://…#rows", model="s3://…#model")
    code = launch_job(connect_to_cluster(), manifest)

These functions are for users' programs (docs/nodes.md, docs/training.md): no command calls them,
and no pipeline does. `cluster/launch.py` creates and follows a job if its kind is in `KINDS` there.
Pods are those of `argo/jobset.py: pod_spec`. The tests are `tests/unit/training/test_backends.py`
and, for the settings of pods, `tests/unit/argo/test_pods.py`.
"""

import shlex
from collections.abc import Sequence
from typing import Any

from tuneloop.argo.jobset import (
    RENDEZVOUS,
    apply_jobset,
    build_jobset,
    build_pod_metadata,
    dump_manifest,
    pod_spec,
    ranks_env,
)
from tuneloop.argo.pod_fields import retried_pod_fields
from tuneloop.argo.template import define_workflow
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import encode_flags
from tuneloop.extensions.trainers.trainjob_pods import build_override
from tuneloop.stages.data_prep import data_prep
from tuneloop.training.backends import LLMBackend
from tuneloop.workflow.pod_hook import check_use, list_pod_hooks
from tuneloop.workflow.settings import RUN_LABEL, Cluster, ResourceRole

WORKSPACE = "/workspace"
"""The folder of data and model in the pods: Trainer's initializers and the runtimes of
``manifests/components/trainer`` have the same."""
CLAIM = "tuneloop-workspace"
"""The PersistentVolumeClaim of ``manifests/components/trainer`` that is mounted there."""
RAY_START = {"num-cpus": "1", "object-store-memory": str(100 << 20)}
"""One group of ranks on each node; tensors are exchanged by torch, not by Ray."""


def as_trainjob(
    backend: LLMBackend,
    name: str,
    cluster: Cluster,
    *,
    dataset: str = "",
    model: str = "",
    runtime: str = "",
    run: str = "",
) -> JsonObject:
    """Render a backend as a TrainJob of Kubeflow Trainer 2.1.

    Args:
        backend: what trains.
        name: of the TrainJob.
        cluster: where it runs.
        dataset: what an initializer brings to ``/workspace/dataset`` (`tuneloop.training.fetch`).
        model: what an initializer brings to ``/workspace/model``.
        runtime: a ClusterTrainingRuntime; empty: the backend's own one of
            ``manifests/components/trainer``.
        run: the run that the pods are labelled with.

    Raises:
        UserError: an option of the backend is refused, an extension changes the pods, or a setting
            of the pods is one that a TrainJob has no field for.
    """
    backend.validate()
    check_use(cluster, "trainjob")
    container = pod_spec(backend.image, "trainer", [], [], cluster)["containers"][0]
    labels = _build_labels(run)
    spec: JsonObject = {
        "runtimeRef": {"name": runtime or backend.get_runtime_name()},
        "labels": labels,
        # The runtime's pods are Trainer's: what is ours is laid over them.
        "podTemplateOverrides": [build_override(cluster, labels)],
    }
    addresses = {"dataset": dataset, "model": model}
    initializer = {part: {"storageUri": url} for part, url in addresses.items() if url}
    if initializer:
        spec["initializer"] = initializer
    variables = [RENDEZVOUS]
    variables += container["env"]
    spec["trainer"] = {
        "image": container["image"],
        "command": backend.to_command(),
        "args": backend.to_runtime_args(),
        "env": variables,
        "numNodes": backend.nodes,
        "numProcPerNode": backend.processes,
        "resourcesPerNode": container["resources"],
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": labels | cluster.build_queue_labels("trainer")},
        "spec": spec,
    }


def as_workflow(
    backend: LLMBackend,
    name: str,
    cluster: Cluster,
    *,
    dataset: str = "",
    model: str = "",
    workspace: str = CLAIM,
) -> JsonObject:
    """Render a backend as a Workflow, for clusters without Kubeflow Trainer.

    The initializers of `as_trainjob` are its first steps, and a JobSet the last. All pods see the
    PersistentVolumeClaim `workspace` at ``/workspace``.
    """
    from hera.workflows import DAG

    job = as_jobset(
        backend,
        "{{workflow.name}}",
        cluster,
        run="{{workflow.parameters.run}}",
        workspace=workspace,
    )
    workflow_cluster = cluster
    for hook in list_pod_hooks():
        workflow_cluster = hook.adjust_job_workflow(workflow_cluster)
    with define_workflow(name, cluster=workflow_cluster) as workflow:
        node = apply_jobset("node", job, cluster)
        initializers: list[Any] = []
        if dataset:
            initializers.append(_build_initializer("dataset", dataset, cluster, workspace))
        if model:
            initializers.append(_build_initializer("model", model, cluster, workspace))
        with DAG(name="main"):
            tasks: Any = [initializer(name=initializer.name) for initializer in initializers]
            tasks >> node(name="node")
    document: JsonObject = workflow.to_dict()
    return document


def _build_initializer(part: str, url: str, cluster: Cluster, workspace: str) -> Any:
    """Build the step that brings the dataset or the model to its folder of the workspace."""
    from hera.workflows import Container, ExistingVolume

    fields = retried_pod_fields("base", "cpu", cluster)
    volume = ExistingVolume(name="workspace", claim_name=workspace, mount_path=WORKSPACE)
    fields["volumes"].append(volume)
    # A dataset is written as messages, the form that all backends read.
    args = ["--messages"] if part == "dataset" else []
    args += ["--into", f"{WORKSPACE}/{part}", url]
    return Container(
        name=f"{part}-initializer",
        command=["python", "-m", "tuneloop.training.fetch"],
        args=args,
        **fields,
    )


def as_jobset(
    backend: LLMBackend, name: str, cluster: Cluster, *, run: str = "", workspace: str = ""
) -> JsonObject:
    """Render as a JobSet, for clusters without Kubeflow Trainer.

    Data and model must already be at the paths in the arguments; `workspace` is a
    PersistentVolumeClaim that all pods mount at ``/workspace``.
    """
    queue = cluster.build_queue_labels("trainer")
    variables = ranks_env(name, backend.nodes, backend.processes)
    pod = _build_pod(backend, cluster, variables)
    if workspace:
        volume = {"name": "workspace", "persistentVolumeClaim": {"claimName": workspace}}
        mount = {"name": "workspace", "mountPath": WORKSPACE}
        pod["volumes"].append(volume)
        pod["containers"][0]["volumeMounts"].append(mount)
    return build_jobset(
        name,
        pod,
        backend.nodes,
        labels=_build_labels(run),
        queue=queue,
        settings=cluster.pod_settings("trainer"),
    )


def as_job(backend: LLMBackend, name: str, cluster: Cluster, *, run: str = "") -> JsonObject:
    """Render as one plain pod, in a Job. Raises UserError where the backend wants several nodes."""
    if backend.nodes > 1:
        remedy = "a Job has one pod here; render a JobSet or a TrainJob"
        raise UserError("nodes", backend.nodes, remedy)
    # The only pod has no JobSet that gives it a host name and an index.
    constants = {"PET_MASTER_ADDR": "localhost", "PET_NODE_RANK": "0"}
    variables: list[JsonMapping] = []
    for variable in ranks_env(name, backend.nodes, backend.processes):
        key = variable["name"]
        variables.append({"name": key, "value": constants[key]} if key in constants else variable)
    labels = _build_labels(run)
    settings = cluster.pod_settings("trainer")
    pod = _build_pod(backend, cluster, variables)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels | cluster.build_queue_labels("trainer")},
        "spec": {
            # The next `tuneloop.cluster.launch` replaces a Job that failed.
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": 3600,
            "template": {"metadata": build_pod_metadata(labels, settings), "spec": pod},
        },
    }


def as_rayjob(backend: LLMBackend, name: str, cluster: Cluster, *, run: str = "") -> JsonObject:
    """Render as a RayJob: a Ray cluster of as many pods as the backend has nodes, with a group of
    ranks on each. It is deleted when the job ends. `extensions/trainers/ray_driver.py` parses the
    flags that come before ``--``.
    """
    backend.validate()
    entry = ["python", "-m", "tuneloop.extensions.trainers.ray_driver"]
    entry += ["--nodes", str(backend.nodes), "--processes", str(backend.processes)]
    if cluster.trainer.gpus:
        entry += ["--gpus", str(cluster.trainer.gpus)]
    entry.append("--")
    entry += backend.to_command()
    entry += backend.to_args()
    return build_rayjob(entry, name, cluster, backend.nodes, role="trainer", run=run)


def build_rayjob(
    entry: Sequence[str],
    name: str,
    cluster: Cluster,
    nodes: int,
    *,
    role: ResourceRole = "cpu",
    run: str = "",
) -> JsonObject:
    """Build a RayJob of KubeRay 1.5.

    Ray has no field for exit codes: `tuneloop.cluster.launch` reads the driver's from the job's
    message.

    Args:
        entry: a program that drives a Ray cluster, such as `data_prep` with ``--preparation ray``.
        name: of the RayJob.
        cluster: where it runs.
        nodes: pods of the Ray cluster; the head among them needs 1 GiB of memory beside the work.
        role: what the pods compute.
        run: the run that the pods are labelled with.
    """
    submitter = _build_ray_pod("ray-job-submitter", "cpu", cluster, run)
    submitter["spec"]["restartPolicy"] = "Never"
    spec = {
        "entrypoint": shlex.join(entry),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 30,
        "submitterPodTemplate": submitter,
        "submitterConfig": {"backoffLimit": 0},
        "rayClusterSpec": _build_ray_pods(cluster, nodes, role, run),
    }
    return _build_ray_object("RayJob", name, spec, cluster, role, run)


def build_raycluster(
    name: str, cluster: Cluster, nodes: int, *, role: ResourceRole = "trainer", run: str = ""
) -> JsonObject:
    """Build a RayCluster that exists until it is deleted, to try programs on by ``ray job submit``
    at its head.
    """
    spec = _build_ray_pods(cluster, nodes, role, run)
    return _build_ray_object("RayCluster", name, spec, cluster, role, run)


def build_rayservice(
    applications: Sequence[JsonMapping],
    name: str,
    cluster: Cluster,
    nodes: int,
    *,
    run: str = "",
) -> JsonObject:
    """Build a RayService; a new version is another Ray cluster, which gets the requests once it is
    ready.

    Args:
        applications: those of Ray Serve's configuration; the image ``ray`` must hold what they
            import.
        name: of the RayService.
        cluster: where it runs.
        nodes: pods of the Ray cluster.
        run: the run that the pods are labelled with.
    """
    spec = {
        "upgradeStrategy": {"type": "NewCluster"},
        "serveConfigV2": dump_manifest({"applications": list(applications)}),
        "rayClusterConfig": _build_ray_pods(cluster, nodes, "sampler", run),
    }
    return _build_ray_object("RayService", name, spec, cluster, "sampler", run)


def _build_ray_object(
    kind: str, name: str, spec: JsonMapping, cluster: Cluster, role: ResourceRole, run: str
) -> JsonObject:
    labels = _build_labels(run) | cluster.build_queue_labels(role)
    return {
        "apiVersion": "ray.io/v1",
        "kind": kind,
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


def _build_ray_pods(cluster: Cluster, nodes: int, role: ResourceRole, run: str) -> JsonObject:
    """Build a Ray cluster of `nodes` pods, including the head."""
    workers = {
        "groupName": "node",
        "replicas": nodes - 1,
        # KubeRay's autoscaler keeps to these limits.
        "minReplicas": nodes - 1,
        "maxReplicas": nodes - 1,
        "rayStartParams": RAY_START,
        "template": _build_ray_pod("ray-worker", role, cluster, run),
    }
    head = {
        "rayStartParams": RAY_START,
        "template": _build_ray_pod("ray-head", role, cluster, run),
    }
    return {"headGroupSpec": head, "workerGroupSpecs": [workers] if nodes > 1 else []}


def _build_ray_pod(name: str, role: ResourceRole, cluster: Cluster, run: str) -> JsonObject:
    """Build a pod whose container is called `name`, as KubeRay expects it; KubeRay adds the
    command."""
    spec = pod_spec("ray", role, [], [], cluster)
    # KubeRay restarts its pods, but for the submitter's.
    del spec["restartPolicy"]
    container = spec["containers"][0]
    container["name"] = name
    del container["command"]
    del container["args"]
    metadata = build_pod_metadata(_build_labels(run), cluster.pod_settings(role))
    return {"metadata": metadata, "spec": spec}


def prepare_rayjob(
    arguments: JsonMapping, name: str, cluster: Cluster, nodes: int = 2, *, run: str = ""
) -> JsonObject:
    """Render the stage `data_prep` as a RayJob: Ray Data examines its rows on all pods.

    It commits the same bytes as without Ray, so that a run with the same URL continues from them.

    Args:
        arguments: the stage's parameters, and under ``prompts`` the URL of its output.
        name: of the RayJob.
        cluster: where it runs.
        nodes: pods of the Ray cluster.
        run: the run that the pods are labelled with.

    Raises:
        UserError: a parameter is unknown, or the URL is missing.
    """
    parameters = dict(arguments)
    url = parameters.pop(data_prep.output, None)
    if not url:
        raise UserError(data_prep.output, None, "is required: the URL of its output")
    parameters["preparation"] = "ray"
    data_prep.validate(parameters)
    flags = dict(arguments) | {"preparation": "ray"}
    entry = data_prep.command()
    entry += encode_flags(flags)
    return build_rayjob(entry, name, cluster, nodes, run=run)


def _build_pod(
    backend: LLMBackend, cluster: Cluster, variables: Sequence[JsonMapping]
) -> JsonObject:
    """Build the pod of a backend, whose ranks have these variables. Raises UserError at a refused
    option.
    """
    backend.validate()
    return pod_spec(
        backend.image, "trainer", backend.to_command(), backend.to_args(), cluster, variables
    )


def _build_labels(run: str) -> dict[str, str]:
    labels = {"app.kubernetes.io/part-of": "tuneloop"}
    if run:
        labels[RUN_LABEL] = run
    return labels
