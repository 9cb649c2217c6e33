"""The arguments with which the client of Kubeflow's SDK (extra ``kubeflow``) creates a TrainJob of
`as_trainjob`.

    job = as_trainjob(Trl(…), "tune", cluster, dataset="s3://…#rows", model="s3://…#model")
    TrainerClient().train(**build_train_arguments(job))

The cluster needs Kubeflow Trainer 2.2 or later. The labels, node selector and tolerations of the
pods are a patch of the runtime there; Trainer 2.1 does not know this field and ignores it.

Users call it from their own programs; nothing in tuneloop does. It reads the TrainJob field by
field: what `extensions/trainers/trainjob.py: as_trainjob` states in a further field is lost unless
it is read here. `tests/extensions/trainers/test_kubeflow_sdk.py` needs the extra ``kubeflow``.
"""

from typing import Any

from kubeflow import trainer as sdk
from kubeflow.trainer import options

from tuneloop.argo.jobset import RENDEZVOUS
from tuneloop.core.component import TORCHRUN
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.settings import AUTO, Resources


def build_train_arguments(job: JsonMapping) -> JsonObject:
    """Build the arguments of ``TrainerClient.train``.

    Args:
        job: a TrainJob that `as_trainjob` rendered.

    Raises:
        UserError: the command does not start with our torchrun, CPU and memory of the trainer are
            not set, or a variable has no plain value.
    """
    metadata = job["metadata"]
    spec = job["spec"]
    trainer = spec["trainer"]
    requests = trainer["resourcesPerNode"]["requests"]
    limits = trainer["resourcesPerNode"].get("limits", {})
    # The SDK has one figure for both, so a request that was only guessed would limit the pod.
    remedy = "is the default; set it, because the SDK makes what is requested a limit, too"
    if requests["cpu"] == Resources().cpu:
        raise UserError("cluster.trainer.cpu", requests["cpu"], remedy)
    if "memory" not in limits:
        raise UserError("cluster.trainer.memory", AUTO, remedy)
    # The SDK takes plain values only; our runtimes set the rendezvous id themselves.
    variables: dict[str, str] = {}
    for item in trainer["env"]:
        if item == RENDEZVOUS:
            continue
        if "valueFrom" in item:
            remedy = "has no plain value, and the SDK takes no other: create the TrainJob itself"
            raise UserError("cluster.trainer.pod.spec", item["name"], remedy)
        variables[item["name"]] = item["value"]
    return {
        "runtime": spec["runtimeRef"]["name"],
        "initializer": _build_initializer(spec.get("initializer", {})),
        "trainer": sdk.CustomTrainerContainer(
            image=trainer["image"],
            num_nodes=trainer["numNodes"],
            resources_per_node=requests | limits,
            env=variables,
        ),
        "options": [
            options.Name(metadata["name"]),
            options.Labels(metadata["labels"]),
            options.TrainerCommand(_build_command(trainer)),
            options.TrainerArgs(trainer["args"]),
            options.RuntimePatch(_build_patch(spec)),
        ],
    }


def _build_initializer(parts: JsonMapping) -> Any:
    """Build the initializers of dataset and model; either may be absent."""
    dataset = parts.get("dataset", {}).get("storageUri")
    model = parts.get("model", {}).get("storageUri")
    # The types for Hugging Face take an address of any scheme.
    return sdk.Initializer(
        dataset=sdk.HuggingFaceDatasetInitializer(dataset) if dataset else None,
        model=sdk.HuggingFaceModelInitializer(model, ignore_patterns=None) if model else None,
    )


def _build_command(trainer: JsonMapping) -> list[str]:
    """Build the command of a rank group. Raises UserError where it is not started by our
    torchrun.
    """
    command: list[str] = trainer["command"]
    launcher = command[: len(TORCHRUN)]
    if tuple(launcher) != TORCHRUN:
        remedy = (
            "does not start with our torchrun; for torchtune take the SDK's BuiltinTrainer, "
            "else `launch_job`"
        )
        raise UserError("backend", " ".join(command), remedy)
    # The SDK has no field for the number of processes of a node.
    launcher.append(f"--nproc-per-node={trainer['numProcPerNode']}")
    return launcher + command[len(TORCHRUN) :]


def _build_patch(spec: JsonMapping) -> Any:
    """Build the patch of the runtime that gives the pods what a TrainJob's override gives them."""
    pod = dict(spec["podTemplateOverrides"][0])
    # A runtime's job is named in the patch itself.
    del pod["targetJobs"]
    node = {"name": "node", "template": {"spec": {"template": pod}}}
    return {
        "template": {
            "metadata": {"labels": spec["labels"]},
            "spec": {"replicatedJobs": [node]},
        }
    }
