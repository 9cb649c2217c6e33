"""A trainer backend as a TrainJob, a JobSet, a RayJob, a Job of one pod, and a Workflow of Argo's with initializers.

backend = Trl(trainer="sft", nodes=2, args={"model_name_or_path": "/workspace/model", …})
manifest = as_trainjob(backend, "tune", cluster, dataset="s3://…#sft.parquet", model="s3://…#model")
code = launch_job(connect_to_cluster(), manifest)
"""

import shlex
from collections.abc import Sequence
from typing import Any

from tuneloop.argo.jobset import (
    RENDEZVOUS,
    apply_jobset,
    build_jobset,
    dump_manifest,
    pod_spec,
    ranks_env,
)
from tuneloop.argo.pod_fields import retried_pod_fields
from tuneloop.argo.template import define_workflow
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import encode_flags
from tuneloop.stages.data_prep import data_prep
from tuneloop.training.backends import LLMBackend
from tuneloop.workflow.settings import RUN_LABEL, Cluster, ResourceRole

WORKSPACE = "/workspace"
CLAIM = "tuneloop-workspace"
"""The folder of data and model, and the PersistentVolumeClaim of ``manifests/components/trainer`` mounted there."""
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
    """Render a backend as a TrainJob of Kubeflow Trainer 2.1 on `runtime`, by default the backend's own one of
    ``manifests/components/trainer``. Its initializers bring `dataset` and `model` to ``/workspace/dataset`` and
    ``/workspace/model`` (`tuneloop.training.fetch`). Raises UserError at a refused option, and at `cluster.share`."""
    backend.validate()
    if cluster.share:
        raise UserError(
            "cluster.share.group",
            cluster.share.group,
            "a TrainJob cannot use a claim: render a JobSet",
        )
    container = pod_spec(backend.image, "trainer", [], [], cluster)["containers"][0]
    place = {"spec": cluster.trainer.place} if cluster.trainer.place else {}
    labels = _labels(run)
    initializer = {
        part: {"storageUri": uri} for part, uri in (("dataset", dataset), ("model", model)) if uri
    }
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": {**labels, **cluster.build_queue_labels("trainer")}},
        "spec": {
            "runtimeRef": {"name": runtime or backend.get_runtime_name()},
            "labels": labels,
            "podTemplateOverrides": [
                {"targetJobs": [{"name": "node"}], "metadata": {"labels": labels}, **place}
            ],
            **({"initializer": initializer} if initializer else {}),
            "trainer": {
                "image": container["image"],
                "command": backend.to_command(),
                "args": backend.to_runtime_args(),
                "env": [RENDEZVOUS, *container["env"]],
                "numNodes": backend.nodes,
                "numProcPerNode": backend.processes,
                "resourcesPerNode": container["resources"],
            },
        },
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
    """Render a backend as a Workflow, for clusters without Kubeflow Trainer: the initializers of `as_trainjob` are its
    first steps, and a JobSet the last. All pods see the PersistentVolumeClaim `workspace` at ``/workspace``."""
    from hera.workflows import DAG, Container, ExistingVolume

    job = as_jobset(
        backend,
        "{{workflow.name}}",
        cluster,
        run="{{workflow.parameters.run}}",
        workspace=workspace,
    )
    with define_workflow(name) as built:
        node = apply_jobset("node", job, cluster)
        bring = []
        for part, uri in (("dataset", dataset), ("model", model)):
            fields = retried_pod_fields("base", "cpu", cluster)
            fields["volumes"] += [
                ExistingVolume(name="workspace", claim_name=workspace, mount_path=WORKSPACE)
            ]
            words = [
                *(["--messages"] if part == "dataset" else []),
                "--into",
                f"{WORKSPACE}/{part}",
                uri,
            ]
            command = ["python", "-m", "tuneloop.training.fetch"]
            if uri:
                bring.append(
                    Container(name=f"{part}-initializer", command=command, args=words, **fields)
                )
        with DAG(name="main"):
            steps: Any = [each(name=each.name) for each in bring]
            steps >> node(name="node")
    made: JsonObject = built.to_dict()
    return made


def as_jobset(
    backend: LLMBackend, name: str, cluster: Cluster, *, run: str = "", workspace: str = ""
) -> JsonObject:
    """Render as a JobSet, for clusters without Kubeflow Trainer. Data and model must already be at the paths in the
    arguments; `workspace` is a PersistentVolumeClaim that all pods mount at ``/workspace``."""
    queue = cluster.build_queue_labels("trainer")
    pod = _pod(backend, name, cluster, workspace)
    return build_jobset(name, pod, backend.nodes, labels=_labels(run), queue=queue)


def as_job(backend: LLMBackend, name: str, cluster: Cluster, *, run: str = "") -> JsonObject:
    """Render as one plain pod, in a Job. Raises UserError where the backend wants several nodes."""
    if backend.nodes > 1:
        raise UserError(
            "nodes", backend.nodes, "a Job has one pod here; render a JobSet or a TrainJob"
        )
    pod = _pod(backend, name, cluster, PET_MASTER_ADDR="localhost", PET_NODE_RANK="0")
    template = {"metadata": {"labels": _labels(run)}, "spec": pod}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": name,
            "labels": {**_labels(run), **cluster.build_queue_labels("trainer")},
        },
        "spec": {"backoffLimit": 0, "ttlSecondsAfterFinished": 3600, "template": template},
    }


def as_rayjob(backend: LLMBackend, name: str, cluster: Cluster, *, run: str = "") -> JsonObject:
    """Render as a RayJob: a Ray cluster of as many pods, one rank group on each, gone when the job ends."""
    backend.validate()
    gpus = ["--gpus", str(cluster.trainer.gpus)] if cluster.trainer.gpus else []
    sizes = ["--nodes", str(backend.nodes), "--processes", str(backend.processes), *gpus]
    driver = ["python", "-m", "tuneloop.training.ray_driver", *sizes]
    entry = [*driver, "--", *backend.to_command(), *backend.to_args()]
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
    """Build a RayJob of KubeRay 1.5: a program (such as `data_prep` with ``--preparation ray``) that drives a Ray
    cluster of `nodes` pods, whose head needs 1 GiB of memory beside the work. Ray has no field for exit codes:
    `tuneloop.cluster.launch` reads the driver's from the job's message."""

    submitter = _ray_pod("ray-job-submitter", "cpu", cluster, run)
    submitter["spec"]["restartPolicy"] = "Never"
    spec = {
        "entrypoint": shlex.join(entry),
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 30,
        "submitterPodTemplate": submitter,
        "submitterConfig": {"backoffLimit": 0},
        "rayClusterSpec": _ray_pods(cluster, nodes, role, run),
    }
    return _ray_object("RayJob", name, spec, cluster, role, run)


def build_raycluster(
    name: str, cluster: Cluster, nodes: int, *, role: ResourceRole = "trainer", run: str = ""
) -> JsonObject:
    """Build a RayCluster that exists until it is deleted, to try programs on by ``ray job submit`` at its head."""
    return _ray_object("RayCluster", name, _ray_pods(cluster, nodes, role, run), cluster, role, run)


def build_rayservice(
    applications: Sequence[JsonMapping],
    name: str,
    cluster: Cluster,
    nodes: int,
    *,
    run: str = "",
) -> JsonObject:
    """Build a RayService; a new version is another Ray cluster, which gets the requests once it is ready.
    `applications` are those of Ray Serve's configuration; the image ``ray`` must hold what they import."""
    spec = {
        "upgradeStrategy": {"type": "NewCluster"},
        "serveConfigV2": dump_manifest({"applications": [*applications]}),
        "rayClusterConfig": _ray_pods(cluster, nodes, "sampler", run),
    }
    return _ray_object("RayService", name, spec, cluster, "sampler", run)


def _ray_object(
    kind: str, name: str, spec: JsonMapping, cluster: Cluster, role: ResourceRole, run: str
) -> JsonObject:
    labels = {**_labels(run), **cluster.build_queue_labels(role)}
    return {
        "apiVersion": "ray.io/v1",
        "kind": kind,
        "metadata": {"name": name, "labels": labels},
        "spec": spec,
    }


def _ray_pods(cluster: Cluster, nodes: int, role: ResourceRole, run: str) -> JsonObject:
    """Build a Ray cluster of `nodes` pods, including the head."""
    workers = {
        "groupName": "node",
        "replicas": nodes - 1,
        "minReplicas": nodes - 1,
        "maxReplicas": nodes - 1,
    }
    workers |= {"rayStartParams": RAY_START, "template": _ray_pod("ray-worker", role, cluster, run)}
    head = {"rayStartParams": RAY_START, "template": _ray_pod("ray-head", role, cluster, run)}
    return {"headGroupSpec": head, "workerGroupSpecs": [workers] if nodes > 1 else []}


def _ray_pod(container: str, role: ResourceRole, cluster: Cluster, run: str) -> JsonObject:
    spec = pod_spec("ray", role, [], [], cluster)
    del spec["restartPolicy"]
    own = spec["containers"][0]
    own.update(name=container)
    del own["command"], own["args"]
    return {"metadata": {"labels": _labels(run)}, "spec": spec}


def prepare_rayjob(
    arguments: JsonMapping, name: str, cluster: Cluster, nodes: int = 2, *, run: str = ""
) -> JsonObject:
    """Render the stage `data_prep` as a RayJob: Ray Data examines its rows on all pods. It commits the same bytes as
    without Ray, so that a run with the same URL continues from them. `arguments` are the stage's parameters, and under
    ``prompts`` the URL of its output. Raises UserError for an unknown parameter, or without the URL."""
    given = {**arguments, "preparation": "ray"}
    if not given.get(data_prep.output):
        raise UserError(data_prep.output, None, "is required: the URL of its output")
    data_prep.validate({k: v for k, v in given.items() if k != data_prep.output})
    return build_rayjob([*data_prep.command(), *encode_flags(given)], name, cluster, nodes, run=run)


def _pod(
    backend: LLMBackend, name: str, cluster: Cluster, workspace: str = "", **own: str
) -> JsonObject:
    """Build the pod of a backend; `own` are variables of its ranks with another value than in a JobSet."""
    backend.validate()
    ranks = [
        {"name": each["name"], "value": own[each["name"]]} if each["name"] in own else each
        for each in ranks_env(name, backend.nodes, backend.processes)
    ]
    pod = pod_spec(
        backend.image, "trainer", backend.to_command(), backend.to_args(), cluster, ranks
    )
    if workspace:
        pod["volumes"].append(
            {"name": "workspace", "persistentVolumeClaim": {"claimName": workspace}}
        )
        pod["containers"][0]["volumeMounts"].append({"name": "workspace", "mountPath": WORKSPACE})
    return pod


def _labels(run: str) -> dict[str, str]:
    return {"app.kubernetes.io/part-of": "tuneloop", **({RUN_LABEL: run} if run else {})}
