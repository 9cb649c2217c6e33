"""A loop of several workflows is one run: looked at, disturbed and stopped as one."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import STORE, kubectl
from tests.cluster.making import digests, empty_loop, finish, release, submit_workflow, toy
from tests.cluster.test_queue import until
from tests.unit.toy import make
from tests.waiting import LIMIT_S
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.cluster.continue_run import create_next_workflow
from tuneloop.cluster.drift import run_drift, template_drift
from tuneloop.cluster.watch import read_status
from tuneloop.kube.connection import NAMESPACE, WORKFLOWS, Connection
from tuneloop.local.journal import Node
from tuneloop.workflow.settings import RUN_LABEL

pytestmark = pytest.mark.cluster


def pods(cluster: Connection, run: str, template: str) -> list[Node]:
    """Its pods that have ended well, in their order."""
    found = read_status(cluster, run).nodes.values()
    return [
        n for n in found if n.type == "Pod" and n.template == template and n.phase == "Succeeded"
    ]


def loop_that_stands(iterations: int, per_workflow: int) -> dict[str, Any]:
    """An empty loop whose third workflow goes no further."""
    made = empty_loop(iterations, per_workflow)
    for template in made["spec"]["templates"]:
        if template["name"] == "stage":
            script = template["container"]["command"]
            script[-1] = (
                f"case $TUNELOOP_NODE_WORKFLOW in *-3) exec sleep 3600;; esac; {script[-1]}"
            )
    return made


def test_parts_are_one_run_and_stop_ends_the_newest(cluster: Connection, run: str) -> None:
    """Two parts end by themselves, the third is stopped, and the run resumed there: nothing runs twice."""
    workflow = loop_that_stands(4, 1)
    submit_workflow(cluster, workflow, run=run, store=STORE)
    until(lambda: _phases(cluster, run) == ["Succeeded", "Succeeded", "Running"])
    assert argo.stop_run(cluster, run, timeout=LIMIT_S) == 1
    assert not [pod for pod in _pods(run) if "Running" in pod or "Pending" in pod]
    seen = read_status(cluster, run)
    assert (seen.phase, seen.workflows) == ("Failed", [run, f"{run}-2", f"{run}-3"])
    assert [node.outputs["told"] for node in pods(cluster, run, "stage")][:2] == ["1", "2"]

    assert submit_workflow(cluster, workflow, run=run, store=STORE) == f"{run}-4"
    assert argo.wait_for_run(cluster, run) == 0
    told = [node.outputs["told"] for node in pods(cluster, run, "stage")]
    assert sorted(set(told)) == ["1", "2", "3", "4"] and told.count("1") == told.count("2") == 1
    assert read_status(cluster, run).workflows[-1] == f"{run}-5"
    assert run_drift(cluster, workflow, run) == ""
    changed = run_drift(cluster, loop_that_stands(4, 2), run).splitlines()
    assert [line for line in changed if line[:1] in "+-"][2:] == [
        "-    value: '1'",
        "+    value: '2'",
    ]


@pytest.mark.slow
def test_what_is_submitted_from_a_template_is_a_run(cluster: Connection, run: str) -> None:
    """As from Argo's page, or `argo submit --from`: labels and parts come from the template; live is as rendered."""
    template = run_workflows.as_template(empty_loop(2, 1), run)
    apply = ["kubectl", "apply", "--server-side", "-f", "-"]
    subprocess.run(
        apply, input=yaml.safe_dump(template), text=True, check=True, capture_output=True
    )
    try:
        assert template_drift(cluster, empty_loop(2, 1), run) == ""
        assert "+    value: '9'" in template_drift(cluster, empty_loop(9, 1), run)
        given = [{"name": "run", "value": run}, {"name": "store", "value": STORE}]
        made = {k: template[k] for k in ("apiVersion", "metadata")} | {"kind": "Workflow"}
        made["spec"] = {"workflowTemplateRef": {"name": run}, "arguments": {"parameters": given}}
        argo._create(cluster, made, run)
        until(lambda: bool(cluster.list(*WORKFLOWS, selector=f"{RUN_LABEL}={run}")))
        until(lambda: _phases(cluster, run) == ["Succeeded"] * 2)
        assert [node.outputs["told"] for node in pods(cluster, run, "stage")] == ["1", "2"]
        assert len(_pods(run)) == 3
        # A second attempt of the step finds what the first has made.
        assert (
            create_next_workflow(cluster, run, "main", {"iteration": "2", "told": "1"})
            == f"{run}-2"
        )
        assert len(run_workflows.find_workflows(cluster, run)) == 2
    finally:
        kubectl("-n", cluster.namespace, "delete", "workflowtemplate", run)


def test_a_killed_pod_and_a_controller_that_restarts_change_nothing(
    cluster: Connection, run: str, tmp_path: Path
) -> None:
    """The toy's stages on real S3; the digests are those of an undisturbed run in this process."""
    submit_workflow(cluster, toy(run, held=("rollout", "reward")), run=run, store=STORE)
    (killed,) = until(lambda: _running(run, "rollout"))
    kubectl("-n", cluster.namespace, "delete", "pod", killed[0], "--grace-period=1")
    # As the same attempt if the controller has not seen it run yet, or as another.
    until(lambda: [uid for _, uid in _running(run, "rollout") if uid != killed[1]])

    def goes_on() -> bool:
        release(cluster, run, "rollout")
        return bool(_running(run, "reward"))

    until(goes_on)
    kubectl("-n", "argo", "rollout", "restart", "deployment/workflow-controller")
    kubectl("-n", "argo", "rollout", "status", "deployment/workflow-controller", "--timeout=600s")
    assert finish(cluster, run, "reward") == 0
    undisturbed = make(str(tmp_path), iterations=1)
    assert digests(read_status(cluster, run).nodes.values(), run) == {
        f"iterations/{name}" if name[0].isdigit() else name: manifest.digest
        for name, manifest in undisturbed.items()
    }


@pytest.mark.slow
def test_nothing_with_the_runs_label_is_left(cluster: Connection, run: str) -> None:
    """Beside what retention keeps: the workflow, and the pods that show why it ended."""
    submit_workflow(cluster, toy(run, held=["sft"]), run=run, store=STORE)
    until(lambda: _running(run, "sft"))
    assert argo.stop_run(cluster, run, timeout=LIMIT_S) == 1
    label = f"{RUN_LABEL}={run}"
    kinds = "pods,services,jobs,configmaps,secrets,persistentvolumeclaims,workloads,jobsets,rayjobs,workflows"
    left = kubectl("-n", cluster.namespace, "get", kinds, "-l", label, "-o", "name").split()
    assert f"workflow.argoproj.io/{run}" in left
    assert {name.partition("/")[0] for name in left} <= {"workflow.argoproj.io", "pod"}
    kubectl("-n", cluster.namespace, "delete", "workflow", run)
    until(lambda: not kubectl("-n", cluster.namespace, "get", kinds, "-l", label, "-o", "name"))


def _phases(cluster: Connection, run: str) -> list[str]:
    return [
        run_workflows.get_workflow_phase(workflow)
        for workflow in run_workflows.find_workflows(cluster, run)
    ]


def _pods(run: str) -> list[str]:
    return kubectl(
        "-n", NAMESPACE, "get", "pods", "-l", f"{RUN_LABEL}={run}", "--no-headers"
    ).splitlines()


def _running(run: str, template: str) -> list[tuple[str, str]]:
    """Name and uid of its pods whose containers run."""
    path = "{range .items[*]}{.metadata.name} {.metadata.uid} {.status.containerStatuses[*].ready}{'\\n'}{end}"
    label = f"{RUN_LABEL}={run}"
    said = kubectl("-n", NAMESPACE, "get", "pods", "-l", label, "-o", f"jsonpath={path}")
    pods = (line.split() for line in said.splitlines())
    return [
        (name, uid)
        for name, uid, *ready in pods
        if f"-{template}-" in name and ready == ["true"] * 2
    ]
