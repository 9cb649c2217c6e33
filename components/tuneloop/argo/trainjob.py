"""A trainer backend as a TrainJob, a JobSet, a RayJob, and a Job of one pod.

backend = Trl(trainer="sft", nodes=2, args={"model_name_or_path": "/workspace/model", …})
manifest = as_trainjob(backend, "tune", cluster, dataset="s3://…#sft.parquet", model="s3://…#model")
code = launch_job(connect_to_cluster(), manifest)
"""

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from tuneloop.argo.jobset import RENDEZVOUS, build_jobset, pod_spec, ranks_env
from tuneloop.core.errors import UserError
from tuneloop.core.program import encode_flags
from tuneloop.stages.data_prep import data_prep
from tuneloop.training.backends import LLMBackend
from tuneloop.workflow.settings import RUN_LABEL, Cluster, ResourceRole

RAY_START = {"num-cpus": "1", "object-store-memory": str(100 << 20)}
"""One rank group a node; tensors pass by torch's own ways, nothing by Ray's."""


def as_trainjob(
    backend: LLMBackend,
    name: str,
    cluster: Cluster,
    *,
    dataset: str = "",
    model: str = "",
    runtime: str = "",
    run: str = "",
) -> dict[str, Any]:
    """Render a backend as a TrainJob of Kubeflow Trainer 2.1, on a runtime of ``manifests/components/trainer``. Raises
    UserError at an option that the backend refuses, and at devices that it should share.

    Args:
        dataset, model: what the runtime's initializers bring to ``/workspace/dataset`` and ``/workspace/model``;
            see `tuneloop.training.fetch`.
        runtime: name of the runtime; default: ``tuneloop-<framework>``.
    """
    backend.validate()
    if cluster.share:
        raise UserError("cluster.share.group", cluster.share.group, "no claim reaches a TrainJob: render a JobSet")
    container = pod_spec("trainer", "trainer", [], [], cluster)["containers"][0]
    place = {"spec": cluster.trainer.place} if cluster.trainer.place else {}
    labels = _labels(run)
    initializer = {part: {"storageUri": uri} for part, uri in (("dataset", dataset), ("model", model)) if uri}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name, "labels": {**labels, **cluster.build_queue_labels("trainer")}},
        "spec": {
            "runtimeRef": {"name": runtime or f"tuneloop-{backend.framework()}"},
            "labels": labels,
            "podTemplateOverrides": [{"targetJobs": [{"name": "node"}], "metadata": {"labels": labels}, **place}],
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


def as_jobset(backend: LLMBackend, name: str, cluster: Cluster, *, run: str = "") -> dict[str, Any]:
    """Render as a JobSet, for clusters without Kubeflow Trainer. Data and model have to be where the arguments say."""
    queue = cluster.build_queue_labels("trainer")
    return build_jobset(name, _pod(backend, name, cluster), backend.nodes, labels=_labels(run), queue=queue)


def as_job(backend: LLMBackend, name: str, cluster: Cluster, *, run: str = "") -> dict[str, Any]:
    """Render as one plain pod, in a Job. Raises UserError where the backend wants several nodes."""
    if backend.nodes > 1:
        raise UserError("nodes", backend.nodes, "a Job has one pod here; render a JobSet or a TrainJob")
    pod = _pod(backend, name, cluster, PET_MASTER_ADDR="localhost", PET_NODE_RANK="0")
    template = {"metadata": {"labels": _labels(run)}, "spec": pod}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {**_labels(run), **cluster.build_queue_labels("trainer")}},
        "spec": {"backoffLimit": 0, "ttlSecondsAfterFinished": 3600, "template": template},
    }


def as_rayjob(backend: LLMBackend, name: str, cluster: Cluster, *, run: str = "") -> dict[str, Any]:
    """Render as a RayJob: a Ray cluster of as many pods, one rank group on each, gone when the job ends."""
    backend.validate()
    gpus = ["--gpus", str(cluster.trainer.gpus)] if cluster.trainer.gpus else []
    sizes = ["--nodes", str(backend.nodes), "--processes", str(backend.processes), *gpus]
    driver = ["python", "-m", "tuneloop.training.ray_driver", *sizes]
    entry = [*driver, "--", *backend.to_command(), *backend.to_args()]
    return build_rayjob(entry, name, cluster, backend.nodes, role="trainer", run=run)


def build_rayjob(
    entry: Sequence[str], name: str, cluster: Cluster, nodes: int, *, role: ResourceRole = "cpu", run: str = ""
) -> dict[str, Any]:
    """Build a RayJob of KubeRay 1.5: a program that drives a Ray cluster of `nodes` pods.

    `data_prep` with ``--preparation ray`` is such a program. The head needs 1 GiB of memory beside the work. Ray has no
    field for exit codes: `tuneloop.cluster.launch` reads the driver's from the job's message.
    """

    def pod(container: str, role: ResourceRole) -> dict[str, Any]:
        spec = pod_spec("ray", role, [], [], cluster)
        del spec["restartPolicy"]
        own = spec["containers"][0]
        own.update(name=container)
        del own["command"], own["args"]
        return {"metadata": {"labels": _labels(run)}, "spec": spec}

    submitter = pod("ray-job-submitter", "cpu")
    submitter["spec"]["restartPolicy"] = "Never"
    workers = {"groupName": "node", "replicas": nodes - 1, "minReplicas": nodes - 1, "maxReplicas": nodes - 1}
    workers |= {"rayStartParams": RAY_START, "template": pod("ray-worker", role)}
    return {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name, "labels": {**_labels(run), **cluster.build_queue_labels(role)}},
        "spec": {
            "entrypoint": shlex.join(entry),
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 30,
            "submitterPodTemplate": submitter,
            "submitterConfig": {"backoffLimit": 0},
            "rayClusterSpec": {
                "headGroupSpec": {"rayStartParams": RAY_START, "template": pod("ray-head", role)},
                "workerGroupSpecs": [workers] if nodes > 1 else [],
            },
        },
    }


def prepare_rayjob(
    arguments: Mapping[str, Any], name: str, cluster: Cluster, nodes: int = 2, *, run: str = ""
) -> dict[str, Any]:
    """Render the stage `data_prep`, its rows examined by Ray Data on all pods, as a RayJob.

    What it commits are the bytes that the stage commits without Ray: a run that is submitted under the same URL goes on
    from them. Raises UserError at a parameter that it does not take, and where there is no URL.

    Args:
        arguments: its parameters by name, and ``prompts``, the URL of what it makes.
    """
    given = {**arguments, "preparation": "ray"}
    if not given.get(data_prep.output):
        raise UserError(data_prep.output, None, "is required: the URL of what it makes")
    data_prep.validate({k: v for k, v in given.items() if k != data_prep.output})
    return build_rayjob([*data_prep.command(), *encode_flags(given)], name, cluster, nodes, run=run)


def _pod(backend: LLMBackend, name: str, cluster: Cluster, **own: str) -> dict[str, Any]:
    """Build the pod of a backend; `own` are variables of its ranks with another value than in a JobSet."""
    backend.validate()
    ranks = [
        {"name": each["name"], "value": own[each["name"]]} if each["name"] in own else each
        for each in ranks_env(name, backend.nodes, backend.processes)
    ]
    return pod_spec("trainer", "trainer", backend.to_command(), backend.to_args(), cluster, ranks)


def _labels(run: str) -> dict[str, str]:
    return {"app.kubernetes.io/part-of": "tuneloop", **({RUN_LABEL: run} if run else {})}
