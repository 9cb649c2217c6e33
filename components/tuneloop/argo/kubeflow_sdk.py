"""The arguments with which the client of Kubeflow's SDK (extra ``kubeflow``) creates a TrainJob of `as_trainjob`.

    job = as_trainjob(Trl(…), "tune", cluster, dataset="s3://…#sft.parquet", model="s3://…#model")
    TrainerClient().train(**build_train_arguments(job))

The cluster needs Kubeflow Trainer 2.2 or later. The labels, node selector and tolerations of the pods are a patch of
the runtime there; Trainer 2.1 does not know this field and ignores it."""

from typing import Any

from kubeflow import trainer as sdk
from kubeflow.trainer import options

from tuneloop.argo.jobset import RENDEZVOUS
from tuneloop.core.component import TORCHRUN
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.settings import AUTO, Resources


def build_train_arguments(job: JsonMapping) -> JsonObject:
    """Build the arguments of ``TrainerClient.train`` from `job`, a TrainJob that `as_trainjob` rendered. Raises
    UserError if the command does not start with our torchrun, or if CPU and memory of the trainer are not set."""
    spec = job["spec"]
    trainer = job["spec"]["trainer"]
    requests = trainer["resourcesPerNode"]["requests"]
    limits = trainer["resourcesPerNode"].get("limits", {})
    remedy = "is the default; set it, because the SDK makes what is requested a limit, too"
    if requests["cpu"] == Resources().cpu:
        raise UserError("cluster.trainer.cpu", requests["cpu"], remedy)
    if "memory" not in limits:
        raise UserError("cluster.trainer.memory", AUTO, remedy)
    launcher = trainer["command"][: len(TORCHRUN)]
    program = trainer["command"][len(TORCHRUN) :]
    if tuple(launcher) != TORCHRUN:
        remedy = "does not start with our torchrun; for torchtune take the SDK's BuiltinTrainer, else `launch_job`"
        raise UserError("backend", " ".join(trainer["command"]), remedy)
    pod = {
        field: value
        for field, value in spec["podTemplateOverrides"][0].items()
        if field != "targetJobs"
    }
    node = {"name": "node", "template": {"spec": {"template": pod}}}
    patch: Any = {
        "template": {"metadata": {"labels": spec["labels"]}, "spec": {"replicatedJobs": [node]}}
    }
    dataset, model = (
        spec.get("initializer", {}).get(part, {}).get("storageUri") for part in ("dataset", "model")
    )
    return {
        "runtime": spec["runtimeRef"]["name"],
        "initializer": sdk.Initializer(  # the types for Hugging Face take an address of any scheme
            dataset=sdk.HuggingFaceDatasetInitializer(dataset) if dataset else None,
            model=sdk.HuggingFaceModelInitializer(model, ignore_patterns=None) if model else None,
        ),
        "trainer": sdk.CustomTrainerContainer(
            image=trainer["image"],
            num_nodes=trainer["numNodes"],
            resources_per_node=requests | limits,
            # The SDK takes plain values only; our runtimes set the rendezvous id themselves.
            env={each["name"]: each["value"] for each in trainer["env"] if each != RENDEZVOUS},
        ),
        "options": [
            options.Name(job["metadata"]["name"]),
            options.Labels(job["metadata"]["labels"]),
            # The SDK has no field for the number of processes of a node.
            options.TrainerCommand(
                [*launcher, f"--nproc-per-node={trainer['numProcPerNode']}", *program]
            ),
            options.TrainerArgs(trainer["args"]),
            options.RuntimePatch(patch),
        ],
    }
