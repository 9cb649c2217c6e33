"""Workflows of stages that take a second, on the cluster's base image alone."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from hera.workflows import DAG, Container, Task

from benchmarks.argo_loop import build as empty_loop
from tests.cluster.conftest import GO, ROOT, kubectl
from tests.unit import toy as toys
from tests.waiting import LIMIT_S, until
from tuneloop.argo.pod_fields import pod_fields, retry_fields
from tuneloop.argo.run_plan import plan_stages
from tuneloop.argo.template import define_workflow, stage_template
from tuneloop.cluster.preflight import check_cluster
from tuneloop.cluster.run_workflows import (
    DONE,
    find_workflows,
    get_workflow_phase,
    prepare_workflow,
)
from tuneloop.cluster.submit import create_workflow, wait_for_run
from tuneloop.core.artifacts import split_ref
from tuneloop.kube.connection import Connection
from tuneloop.local.journal import Node
from tuneloop.stages.data_prep import data_prep
from tuneloop.workflow.loop import StageSpec
from tuneloop.workflow.settings import RUN_LABEL, Cluster, Resources

SMALL = Cluster(cpu=Resources(cpu="50m", memory="256Mi"), queue="")
RUN = "{{workflow.parameters.store}}/{{workflow.parameters.run}}"


def digits(seed: int = 0, seconds: float = 0) -> dict[str, Any]:
    """A pipeline of one real stage, `data_prep`, which may be followed by some seconds of nothing."""
    settings: dict[str, Any] = {
        "source_args": {"digits": 2},
        "train": 8,
        "eval": 4,
        "sft": 0,
        "seed": seed,
    }
    plan = plan_stages("digits", [StageSpec(data_prep, **settings)], SMALL)
    with define_workflow("digits", plan=plan) as built:
        stage = stage_template(data_prep, plan.stages["data-prep"], SMALL)
        pod = {**pod_fields("base", "cpu", SMALL), **retry_fields()}
        wait = (
            Container(name="wait", command=["sleep"], args=[str(seconds)], **pod)
            if seconds
            else None
        )
        with DAG(name="main"):
            data = stage(name="data-prep", arguments={"prompts": f"{RUN}/data-prep"})
            if wait:
                data >> wait(name="wait")
    made: dict[str, Any] = built.to_dict()
    return made


def toy(
    run: str, iterations: int = 1, held: Collection[str] = (), **seconds: float
) -> dict[str, Any]:
    """The toy of the unit tests, whose file the pods find in a config map; a stage first sleeps for its `seconds`, and
    those that are `held` until they are released."""
    source = ROOT / "tests" / "unit" / "toy.py"
    files = f"--from-file=toy.py={source}"
    kubectl("-n", "tuneloop", "create", "configmap", f"{run}-toy", files)
    made: dict[str, Any] = toys.build_argo(toys.Config(iterations=iterations)).to_dict()
    items = [{"key": "toy.py", "path": "tests/unit/toy.py"}]
    made["spec"].setdefault("volumes", []).append(
        {"name": "toy", "configMap": {"name": f"{run}-toy", "items": items}}
    )
    for template in made["spec"]["templates"]:
        container = template.get("container")
        if container and container["command"][-1] == "tests.unit.toy":
            sleep = f"sleep {seconds.get(template['name'], 0)} & wait $!"
            sleep = f"until [ -e {GO} ]; do sleep 1; done" if template["name"] in held else sleep
            container["command"] = [
                "sh",
                "-c",
                f'{sleep}; exec python -m tests.unit.toy "$@"',
                "sh",
            ]
            container["env"].append({"name": "PYTHONPATH", "value": "/toy"})
            container.setdefault("volumeMounts", []).append({"name": "toy", "mountPath": "/toy"})
            container["image"] = "tuneloop/base:dev"
            container["resources"] = {"requests": {"cpu": "50m", "memory": "256Mi"}}
    return made


def digests(nodes: Iterable[Node], run: str) -> dict[str, str | None]:
    """Place below the run → digest, of every artifact that pods made."""
    said = (value for node in nodes if node.type == "Pod" for value in node.outputs.values())
    split = map(
        split_ref, filter(re.compile(r"\S+@sha256:[0-9a-f]{64}").fullmatch, said)
    )  # not JSON that names one
    return {url.rpartition(f"/{run}/")[2]: digest for url, digest in split}


def release(cluster: Connection, run: str, template: str) -> None:
    """Let the pods of a template go on that are held and run now. One that has just ended, or not quite begun, is not
    told: say it again until what is to follow has come."""
    for pod in cluster.list_pods(f"{RUN_LABEL}={run}"):
        if f"-{template}-" in pod.metadata.name and pod.status.phase == "Running":
            kubectl(
                "-n",
                cluster.namespace,
                "exec",
                pod.metadata.name,
                "-c",
                "main",
                "--",
                "touch",
                GO,
                check=False,
            )


def finish(cluster: Connection, run: str, template: str = "sleep") -> int:
    """Release the pods of a template, however often they are started, until the run ends; return its exit code."""

    def ended() -> bool:
        release(cluster, run, template)
        return get_workflow_phase(find_workflows(cluster, run)[-1]) in DONE

    until(ended, 3 * LIMIT_S, pause=1.0)
    return wait_for_run(cluster, run)


def draw_tiny_model(prepare: Any, bring: Any) -> tuple[Task, str, str]:
    """Draw the stages `data_prep` and `base_model`; return the last task, and the references of prompts and policy."""
    prompts = "{{tasks.data-prep.outputs.parameters.prompts}}"
    data = prepare(name="data-prep", arguments={"prompts": f"{RUN}/data-prep"})
    model = bring(
        name="base-model", arguments={"prompts": prompts, "checkpoint": f"{RUN}/base-model"}
    )
    data >> model
    return model, prompts, "{{tasks.base-model.outputs.parameters.checkpoint}}"


def submit_workflow(
    cluster: Connection,
    workflow: Mapping[str, Any],
    *,
    run: str,
    store: str,
    priority: str | None = None,
) -> str:
    """Check everything, then create the workflow, as `tuneloop submit` does, and return its name."""
    made = prepare_workflow(
        workflow, run=run, store=store, namespace=cluster.namespace, priority=priority
    )
    check_cluster(cluster, made)
    return create_workflow(cluster, made, run)


__all__ = [
    "digests",
    "digits",
    "draw_tiny_model",
    "empty_loop",
    "finish",
    "release",
    "submit_workflow",
    "toy",
]
