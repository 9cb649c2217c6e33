"""What `cluster status` makes of a workflow's nodes, as Argo's controller writes them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cluster.api import Api, kubeconfig, serving
from tuneloop.cli import run_cli
from tuneloop.cluster.watch import NODE_NAME
from tuneloop.workflow.settings import QUEUE_LABEL, RUN_LABEL

AWAY = 'main: Error (exit code 75): unavailable: store: "s3://b" is away'


def node(name: str, phase: str, begun: int, ended: int = 0, **more: Any) -> dict[str, Any]:
    """A node of the graph `main`; seconds are of one minute."""
    about = {
        "id": name,
        "name": f"demo.{name}",
        "displayName": name.rpartition(".")[2],
        "type": "Pod",
    }
    about |= {"phase": phase, "startedAt": f"2026-01-01T00:00:{begun:02d}Z", "boundaryID": "demo"}
    about |= {"finishedAt": f"2026-01-01T00:00:{ended:02d}Z"} if ended else {}
    return {"templateName": about["displayName"].partition("(")[0], **about, **more}


def outputs(code: int, **values: str) -> dict[str, Any]:
    return {
        "exitCode": str(code),
        "parameters": [{"name": k, "value": v} for k, v in values.items()],
    }


def serve_nodes(server: Api, *nodes: dict[str, Any], phase: str = "Running") -> None:
    metadata = {
        "name": "demo",
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "labels": {RUN_LABEL: "demo"},
    }
    status = {"phase": phase, "nodes": {each["id"]: each for each in nodes}}
    server.objects["workflows", "demo"] = {"metadata": metadata, "spec": {}, "status": status}


@pytest.fixture
def look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Serve an API, and show the run `demo` of it: as text, and its stages from JSON."""
    with serving() as (server, cluster):
        monkeypatch.setenv("KUBECONFIG", kubeconfig(cluster.host, tmp_path))

        def show() -> tuple[str, list[dict[str, Any]]]:
            capsys.readouterr()
            assert run_cli(["cluster", "status", "demo"]) == 0
            text = capsys.readouterr().out
            assert run_cli(["cluster", "status", "demo", "--json"]) == 0
            return text, json.loads(capsys.readouterr().out)["stages"]

        yield server, show


def test_an_attempt_that_died_is_told_apart_and_why(look: Any) -> None:
    server, show = look
    output = {
        "parameters": [{"name": "rollouts", "value": "s3://b/runs/demo/iterations/3/rollout"}]
    }
    serve_nodes(
        server,
        node("rollout(0)", "Error", 1, 2, message="pod deleted", inputs=output),
        node("rollout(1)", "Failed", 10, 22, message=AWAY, outputs=outputs(75), inputs=output),
        node("rollout(2)", "Succeeded", 32, 37, outputs=outputs(0, n="4"), inputs=output),
        node("update(0)", "Succeeded", 38, 40, outputs=outputs(0)),
    )
    text, (rollout, update) = show()
    assert (rollout["seconds"], rollout["lost_seconds"], rollout["retries"], rollout["done"]) == (
        5.0,
        13.0,
        2,
        1,
    )
    away = 'attempt 2 of iteration 3 ended after 12 s: unavailable: store: "s3://b" is away'
    assert rollout["cause"] == away and f"\nrollout: {away}\n" in text
    assert "2 (13 s lost)" in text and "iteration 3  n 4" in text
    assert (update["lost_seconds"], update["cause"], update["retries"]) == (0.0, "", 0)


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({"phase": "Error", "message": "pod deleted"}, "evicted or preempted: pod deleted"),
        (
            {
                "phase": "Failed",
                "message": "main: OOMKilled (exit code 137)",
                "outputs": outputs(137),
            },
            "out of memory: main: OOMKilled (exit code 137)",
        ),
        (
            {"phase": "Failed", "message": "main: Error (exit code 132)", "outputs": outputs(132)},
            "killed by a signal: main: Error (exit code 132)",
        ),
        ({"phase": "Failed", "message": "stopped"}, "stopped"),
    ],
)
def test_the_class_of_an_end_is_said(look: Any, more: dict[str, Any], cause: str) -> None:
    server, show = look
    serve_nodes(server, {**node("sft(0)", "Error", 1, 9), **more}, node("sft(1)", "Running", 19))
    _, (stage,) = show()
    assert (stage["phase"], stage["cause"]) == ("Running", f"attempt 1 ended after 8 s: {cause}")


def several(phase: str, *more: dict[str, Any]) -> list[dict[str, Any]]:
    """The nodes of a stage of two pods whose job is at `phase`."""
    steps = node("sft", "Running", 1, type="Steps")
    ended = 20 if phase == "Succeeded" else 0
    return [
        steps,
        node("sft.job(0)", phase, 2, ended, templateName="sft-job", boundaryID="sft"),
        *more,
    ]


@pytest.mark.parametrize("launcher", ["Pending", "Running"])
def test_a_stage_of_several_pods_is_one_that_runs_while_it_trains(look: Any, launcher: str) -> None:
    server, show = look
    serve_nodes(server, *several(launcher))
    text, (stage,) = show()
    assert (stage["stage"], stage["phase"], stage["done"]) == ("sft", "Running", 0)
    assert "job" not in text and "waiting" not in text

    read = node("sft.result(0)", "Succeeded", 21, 25, templateName="sft-result", boundaryID="sft")
    serve_nodes(server, *several("Succeeded", {**read, "outputs": outputs(0, loss="0.5")}))
    _, (stage,) = show()
    assert (stage["phase"], stage["done"], stage["seconds"]) == ("Succeeded", 1, 22.0)
    assert stage["results"] == {"loss": 0.5}


def test_a_stage_of_several_pods_that_waits_for_quota_says_so(look: Any) -> None:
    server, show = look
    serve_nodes(server, *several("Running"))
    pod = {"metadata": {"annotations": {NODE_NAME: "sft"}}}
    about = {
        "name": "demo-sft",
        "creationTimestamp": "",
        "labels": {RUN_LABEL: "demo", QUEUE_LABEL: "q"},
    }
    spec = {"suspend": True, "replicatedJobs": [{"template": {"spec": {"template": pod}}}]}
    server.objects["jobsets", "demo-sft"] = {"metadata": about, "spec": spec}
    conditions = [{"type": "QuotaReserved", "status": "False", "message": "insufficient quota"}]
    owner = {"creationTimestamp": "", "ownerReferences": [{"name": "demo-sft"}]}
    server.objects["workloads", "w"] = {"metadata": owner, "status": {"conditions": conditions}}
    text, (stage,) = show()
    assert (stage["phase"], stage["message"]) == ("Pending", "queue q: insufficient quota")
    assert "  waiting      sft: queue q: insufficient quota\n" in text
