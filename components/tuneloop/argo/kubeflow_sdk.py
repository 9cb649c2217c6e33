"""A trainer backend for the Kubeflow SDK (``pip install kubeflow``, 0.5), whose client then creates its TrainJob.

    arguments = build_train_arguments(Trl(…), "tune", cluster, dataset="s3://…#sft.parquet", model="s3://…#model")
    TrainerClient().train(**arguments)

It is the TrainJob of `tuneloop.argo.trainjob`, for Kubeflow Trainer 2.2 and later: labels and nodes of pods are a patch
of the runtime there, which Trainer 2.1 would drop without a word."""

from typing import Any

from kubeflow.trainer import (
    CustomTrainerContainer,
    HuggingFaceDatasetInitializer,
    HuggingFaceModelInitializer,
    Initializer,
    options,
)

from tuneloop.argo.jobset import JOB
from tuneloop.argo.trainjob import as_trainjob
from tuneloop.core.component import TORCHRUN
from tuneloop.core.errors import UserError
from tuneloop.training.backends import LLMBackend
from tuneloop.workflow.settings import AUTO, Cluster


def build_train_arguments(
    backend: LLMBackend,
    name: str,
    cluster: Cluster,
    *,
    dataset: str = "",
    model: str = "",
    runtime: str = "",
    run: str = "",
) -> dict[str, Any]:
    """Build the arguments of ``TrainerClient.train``: runtime, initializer, trainer and options. Raises UserError as
    `as_trainjob` does, and at what the SDK cannot say: other launchers than our torchrun, requests without a limit."""
    for size in ("cpu", "memory"):
        value = getattr(cluster.trainer, size)
        if size not in cluster.trainer.model_fields_set or value == AUTO:
            raise UserError(f"cluster.trainer.{size}", value, "has to be set: the SDK's requests are limits, too")
    job = as_trainjob(backend, name, cluster, dataset=dataset, model=model, runtime=runtime, run=run)
    spec, trainer = job["spec"], job["spec"]["trainer"]
    launcher, program = trainer["command"][: len(TORCHRUN)], trainer["command"][len(TORCHRUN) :]
    if (*launcher,) != TORCHRUN:
        remedy = "is not started by our torchrun: render it by as_trainjob; for torchtune take the SDK's BuiltinTrainer"
        raise UserError("backend", type(backend).__name__, remedy)
    ranks = f"--nproc-per-node={backend.processes}"  # the SDK's trainers have no field for it
    pod = {field: value for field, value in spec["podTemplateOverrides"][0].items() if field != "targetJobs"}
    node = {"name": JOB, "template": {"spec": {"template": pod}}}
    patch: Any = {"template": {"metadata": {"labels": spec["labels"]}, "spec": {"replicatedJobs": [node]}}}
    sizes = trainer["resourcesPerNode"]
    return {
        "runtime": spec["runtimeRef"]["name"],
        "initializer": Initializer(  # of the SDK's types those that take any address
            dataset=HuggingFaceDatasetInitializer(dataset) if dataset else None,
            model=HuggingFaceModelInitializer(model, ignore_patterns=None) if model else None,
        ),
        "trainer": CustomTrainerContainer(
            image=trainer["image"],
            num_nodes=trainer["numNodes"],
            resources_per_node=sizes["requests"] | sizes["limits"],
            # PET_RDZV_ID, which is no plain value, is our runtimes'.
            env={each["name"]: each["value"] for each in trainer["env"] if "value" in each},
        ),
        "options": [
            options.Name(job["metadata"]["name"]),
            options.Labels(job["metadata"]["labels"]),
            options.TrainerCommand([*launcher, ranks, *program]),
            options.TrainerArgs(trainer["args"]),
            options.RuntimePatch(patch),
        ],
    }
