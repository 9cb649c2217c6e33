"""A job of the cluster (TrainJob, JobSet, RayJob, Job) as a step of a pipeline, for third-party
trainers.

    backend = Trl(trainer="sft", nodes=2, args={"model_name_or_path": "/workspace/model", …})
    policy = f"{format_placeholder('policy')}#model"
    job = as_trainjob(backend, NAME, config.cluster, model=policy, dataset=…)
    inputs = ["policy", "prompts"]
    train = launch_step(job, inputs=inputs, cluster=config.cluster, kfp=config.kfp)
    …
    train(
        "trl",
        job_name=f"{run}-trl",
        policy=model.outputs["checkpoint"],
        prompts=data.outputs["prompts"],
    )

The task's own pod only starts the job, prints its logs, and ends with its exit code. Its program is
`launch.py`, which puts arguments in place of placeholders. No pipeline that ships uses this; users
call it from theirs (docs/kfp.md, "Several nodes"), and `tests/cluster/test_kfp.py` tests it.
"""

import json
from collections.abc import Iterable

from kfp import dsl
from kfp.dsl import Dataset, Input

from tuneloop.argo.pod_fields import SMALL
from tuneloop.config.pipeline import Kfp
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.kfp.template import (
    REQUIRED,
    TYPES,
    Signature,
    Step,
    define_container_component,
    escape_json,
    make_step,
)
from tuneloop.workflow.settings import Cluster

DESCRIPTIONS = {
    "job_name": (
        "name of the job: an existing job of this name is followed, or replaced if it has failed"
    )
}
"""Parameter of the task → description."""


def format_placeholder(name: str) -> str:
    """Format the placeholder in a manifest for a task's parameter, or for an input artifact's
    reference. `launch.py: main` replaces it.
    """
    return f"@{name}@"


NAME = format_placeholder("job_name")
"""The name with which a job for `launch_step` must be rendered."""


def launch_step(
    job: JsonMapping,
    *,
    inputs: Iterable[str] = (),
    parameters: Iterable[str] = (),
    cluster: Cluster | None = None,
    kfp: Kfp | None = None,
) -> Step:
    """Return a step ``step(name, job_name=…)`` that launches a job in the namespace ``kfp.jobs``
    and ends as it does.

    Args:
        job: a manifest with the name `NAME`, and a `format_placeholder` for each of `inputs` and
            `parameters`.
        inputs: the input artifacts that the step takes as arguments.
        parameters: the parameters that it takes as arguments, besides ``job_name``.
        cluster: settings of the task's pod, which asks for little.
        kfp: settings of the task.

    Raises:
        UserError: the job has another name.
    """
    cluster = (cluster or Cluster()).adjust_role("cpu", **SMALL)
    kfp = kfp or Kfp()
    # The name that KFP gives the job is known only when the pipeline runs.
    if job["metadata"]["name"] != NAME:
        remedy = "render it with extensions.trainers.kfp_step.NAME: every run has a name of its own"
        raise UserError("metadata.name", job["metadata"]["name"], remedy)
    signature: Signature = {}
    for name in inputs:
        signature[name] = (Input[TYPES.get(name, Dataset)], REQUIRED)
    signature["job_name"] = (str, REQUIRED)
    for name in parameters:
        signature[name] = (str, REQUIRED)
    signature["job"] = (dsl.OutputPath(str), REQUIRED)
    manifest = escape_json(json.dumps(job, separators=(",", ":")))
    image = cluster.images.format(image="base")
    create_task = define_container_component(
        str(job["kind"]).lower(),
        f"Launch a {job['kind']} and follow it.",
        signature,
        DESCRIPTIONS,
        image,
        ["python3", "-m", "tuneloop.extensions.trainers.launch"],
        ["--namespace", kfp.jobs, "--manifest", manifest],
    )
    return make_step(create_task, image, cluster, kfp)
