"""A job of the cluster (TrainJob, JobSet, RayJob, Job) as a step of a pipeline, for third-party trainers.

    backend = Trl(trainer="sft", nodes=2, args={"model_name_or_path": "/workspace/model", …})
    job = as_trainjob(backend, NAME, config.cluster, model=f"{format_placeholder('policy')}#model", dataset=…)
    train = launch_step(job, inputs=["policy", "prompts"], cluster=config.cluster, kfp=config.kfp)
    …
    train("trl", job_name=f"{run}-trl", policy=model.outputs["checkpoint"], prompts=data.outputs["prompts"])

The task's own pod only starts the job, prints its logs, and ends with its exit code."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from kfp import dsl
from kfp.dsl import Dataset, Input

from tuneloop.argo.pod_fields import SMALL
from tuneloop.config.pipeline import Kfp
from tuneloop.core.errors import UserError
from tuneloop.kfp.template import REQUIRED, TYPES, Step, define_container_component, make_step
from tuneloop.workflow.settings import Cluster

ABOUT = {
    "job_name": "name of the job: an existing job of this name is followed, or replaced if it has failed"
}


def format_placeholder(name: str) -> str:
    """Format the placeholder in a manifest for a task's parameter, or for an input artifact's reference."""
    return f"@{name}@"


NAME = format_placeholder("job_name")
"""The name with which a job for `launch_step` must be rendered."""


def launch_step(
    job: Mapping[str, Any],
    *,
    inputs: Iterable[str] = (),
    parameters: Iterable[str] = (),
    cluster: Cluster | None = None,
    kfp: Kfp | None = None,
) -> Step:
    """Return a step ``step(name, job_name=…)`` that launches `job` in the namespace ``kfp.jobs`` and ends as it does.
    `job` is a manifest with the name `NAME` and a `format_placeholder` for each of `inputs` and `parameters`, which the
    step takes as arguments. Raises UserError where the job has another name."""
    cluster = (cluster or Cluster()).adjust_role("cpu", **SMALL)
    kfp = kfp or Kfp()
    if job["metadata"]["name"] != NAME:
        remedy = "render it with tuneloop.kfp.jobs.NAME: every run has a name of its own"
        raise UserError("metadata.name", job["metadata"]["name"], remedy)
    image = cluster.images.format(image="base")
    signature: dict[str, tuple[Any, Any]] = {
        **{each: (Input[TYPES.get(each, Dataset)], REQUIRED) for each in inputs},
        **dict.fromkeys(("job_name", *parameters), (str, REQUIRED)),
        "job": (dsl.OutputPath(str), REQUIRED),
    }
    command = ["python3", "-m", "tuneloop.kfp.launch"]
    # Neither KFP nor the kubelet may find a tag or a variable to replace in it.
    text = (
        json.dumps(job, separators=(",", ":")).replace("$(", "\\u0024(").replace("{{", "{\\u007b")
    )
    extra = ["--namespace", kfp.jobs, "--manifest", text]
    kind = str(job["kind"]).lower()
    summary = f"Launch a {job['kind']} and follow it."
    made = define_container_component(kind, summary, signature, ABOUT, image, command, extra)
    return make_step(made, image, cluster, kfp)
