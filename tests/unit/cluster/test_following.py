"""What the commands that follow runs on a cluster print, and how they end."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.unit.cluster.api import Api, connected, kubeconfig, serving
from tests.unit.cluster.test_cluster import ended
from tuneloop.cli import run_cli
from tuneloop.cli.verdict import print_verdict
from tuneloop.cluster import run_workflows, waiting
from tuneloop.cluster.submit import exit_code
from tuneloop.cluster.waiting import NODE_NAME
from tuneloop.cluster.watch import read_logs
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import EXIT_RETRY, Unavailable
from tuneloop.kube.connection import retry_until_available
from tuneloop.workflow.settings import QUEUE_LABEL, RUN_LABEL

Output = pytest.CaptureFixture[str]


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with serving() as (server, cluster):
        monkeypatch.setenv("KUBECONFIG", kubeconfig(cluster.host, tmp_path))
        yield server


def add_workflow(api: Api, name: str, run: str, second: int, **status: Any) -> dict[str, Any]:
    """Add a workflow of `grpo` with the default settings, whose loop runs in pods of iterations."""
    pipeline = find_pipeline("grpo")
    workflow = run_workflows.prepare_workflow(
        pipeline.build(pipeline.configure()), run=run, store="s3://b/runs"
    )
    created = f"2026-01-01T00:00:{second:02d}Z"
    workflow["metadata"] |= {"name": name, "creationTimestamp": created}
    workflow["status"] = status
    api.objects["workflows", name] = workflow
    return workflow


def add_gated_pod(api: Api, node: str, queue: str) -> None:
    api.add_pod(node, "2026-01-01T00:00:00Z", "")
    pod = api.pods[-1]
    pod["metadata"]["labels"] = {QUEUE_LABEL: queue}
    pod["spec"] = {"containers": [], "schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
    pod["status"] = {"phase": "Pending"}


def test_the_log_of_a_stage_that_shares_a_pod_is_that_of_the_pod(api: Api, capsys: Output) -> None:
    """The documented line: `tuneloop cluster logs demo rollout -f`."""
    add_workflow(api, "demo", "demo", 0, phase="Succeeded")
    api.add_pod("demo.iterations", "2026-01-01T00:00:00Z", "rollout: 16 completions\n")
    api.add_pod("demo.export", "2026-01-01T00:00:01Z", "export: done\n")
    assert run_cli(["cluster", "logs", "demo", "rollout", "-f"]) == 0
    printed = capsys.readouterr()
    assert printed.out == "iterations | rollout: 16 completions\n"
    assert "rollout runs among others in the pod iterations" in printed.err
    assert run_cli(["cluster", "logs", "demo", "export"]) == 0
    assert capsys.readouterr().out == "export | export: done\n"
    # The pods of a JobSet are named by the stage, whatever the call is named that applies it.
    api.add_pod("demo.sft", "2026-01-01T00:00:02Z", "sft: 3/3\n")
    assert run_cli(["cluster", "logs", "demo", "sft"]) == 0
    assert capsys.readouterr().out == "sft | sft: 3/3\n"


def test_a_stage_that_the_run_has_not_is_refused_at_once(api: Api, capsys: Output) -> None:
    add_workflow(api, "demo", "demo", 0, phase="Running")
    # Without the check this would follow the run to its end, which never comes.
    assert run_cli(["cluster", "logs", "demo", "roll-out", "-f"]) == 2
    assert "stage: 'roll-out': did you mean rollout?" in capsys.readouterr().err


@pytest.mark.parametrize("shutdown", ["Stop", "Terminate"])
def test_a_run_that_somebody_stopped_was_interrupted(shutdown: str) -> None:
    """Argo keeps no exit code of a pod that it stops."""
    stopped = {"spec": {"shutdown": shutdown}, "status": ended("Failed", rollout={"code": -1})}
    del stopped["status"]["nodes"]["rollout"]["outputs"]["exitCode"]
    assert exit_code(stopped) == EXIT_RETRY
    waiting = {"spec": {"shutdown": shutdown}, "status": {"phase": "Failed"}}
    assert exit_code(waiting) == EXIT_RETRY
    refused = {"spec": {"shutdown": shutdown}, "status": ended("Failed", rollout={"code": 2})}
    assert exit_code(refused) == 2, "the same name again would end so, too"
    assert exit_code(stopped | {"spec": {}}) == 1


def test_wait_says_that_the_run_was_stopped(capsys: Output) -> None:
    stopped = {"metadata": {"name": "demo"}, "spec": {"shutdown": "Stop"}}
    status = {"phase": "Failed", "message": "Stopped with strategy 'Stop'"}
    assert print_verdict("demo", [stopped | {"status": status}], 1.0, {}) == EXIT_RETRY
    printed = capsys.readouterr()
    assert "demo: stopped: Stopped with strategy 'Stop', exit code 75 (1.0 s)" in printed.out
    assert printed.err == (
        "interrupted: demo: stopped before a stage ended; submit it again with this name: it"
        " continues where it ended\n"
    )


def test_an_api_server_that_stays_away_is_no_mistake_of_the_user() -> None:
    cluster = connected("http://127.0.0.1:1")
    with pytest.raises(Unavailable, match=r"does not answer \(MaxRetryError\), for 0.1 s"):
        retry_until_available(
            lambda: run_workflows.find_workflows(cluster, "demo"), patience=0.1, pause=0.01
        )


def test_the_runs_of_a_namespace(api: Api, capsys: Output) -> None:
    assert run_cli(["cluster", "list"]) == 0
    assert capsys.readouterr().out == "no runs in namespace tuneloop\n"
    add_workflow(api, "old-2", "old", 3, phase="Failed", message="no room")
    add_workflow(api, "old", "old", 1, phase="Succeeded")
    add_workflow(api, "new", "new", 2, phase="Running")
    add_workflow(api, "theirs", "theirs", 4)["metadata"]["labels"].pop(RUN_LABEL)
    for command in (["cluster", "list", "--json"], ["cluster", "status", "--json"]):
        assert run_cli(command) == 0
        runs = json.loads(capsys.readouterr().out)["runs"]
        summary = [(run["run"], run["pipeline"], run["phase"], run["workflows"]) for run in runs]
        assert summary == [
            ("new", "grpo", "Running", ["new"]),
            ("old", "grpo", "Failed", ["old", "old-2"]),
        ]
        assert runs[1]["message"] == "no room" and runs[1]["store"] == "s3://b/runs"
    assert run_cli(["cluster", "status"]) == 0
    assert "\nnew  grpo      Running" in capsys.readouterr().out


def test_status_without_the_right_to_what_only_explains_it(api: Api, capsys: Output) -> None:
    """A namespace's admin may have no right to Kueue's objects."""
    node = {"id": "a", "name": "demo.sft", "displayName": "sft", "type": "Pod", "phase": "Pending"}
    add_workflow(api, "demo", "demo", 0, phase="Running", nodes={"a": node})
    add_gated_pod(api, "demo.sft", "gpu-pool")
    api.unseen = {"workloads", "rayjobs"}
    assert run_cli(["cluster", "status", "demo"]) == 0
    out = capsys.readouterr().out
    assert "waiting      demo.sft: queue gpu-pool: why is not for this account to see" in out
    assert "not seen     no right to list workloads, list rayjobs\n" in out
    assert run_cli(["cluster", "status", "demo", "--json"]) == 0
    denied = json.loads(capsys.readouterr().out)["denied_reads"]
    assert denied == ["list workloads", "list rayjobs"]


def test_status_names_who_holds_the_quota(api: Api, capsys: Output) -> None:
    def add_workload(pod: str, *conditions: tuple[str, str, str]) -> None:
        owners = [{"kind": "Pod", "name": pod}]
        api.objects["workloads", pod] = {
            "metadata": {"name": pod, "ownerReferences": owners, "creationTimestamp": "2026"},
            "spec": {"queueName": "gpu-pool"},
            "status": {
                "conditions": [
                    {"type": kind, "status": status, "message": message}
                    for kind, status, message in conditions
                ]
            },
        }

    add_workflow(api, "demo", "demo", 0, phase="Running")
    add_gated_pod(api, "demo.iterations", "gpu-pool")
    api.pods[-1]["metadata"]["annotations"] = {NODE_NAME: "demo.iterations"}
    add_workload("demo-iterations", ("QuotaReserved", "False", "insufficient unused quota"))
    add_workload("d2-serve", ("QuotaReserved", "True", "ok"))
    add_workload("d1-sft", ("QuotaReserved", "True", "ok"), ("Finished", "True", "done"))
    assert run_cli(["cluster", "status", "demo"]) == 0
    assert (
        "demo.iterations: queue gpu-pool: insufficient unused quota; its quota is held by d2-serve\n"
        in capsys.readouterr().out
    )


def test_a_server_that_still_serves_is_ready(api: Api, capsys: Output) -> None:
    """Argo calls its node Succeeded once it is ready."""
    node = {"id": "a", "name": "demo.serve", "displayName": "serve", "type": "Pod"}
    node |= {"phase": "Succeeded", "daemoned": True, "templateName": "serve"}
    workflow = add_workflow(api, "demo", "demo", 0, phase="Running", nodes={"a": node})
    assert run_cli(["cluster", "status", "demo"]) == 0
    assert "\nserve  Ready" in capsys.readouterr().out
    del node["daemoned"]
    workflow["status"]["phase"] = "Succeeded"
    assert run_cli(["cluster", "status", "demo"]) == 0
    assert "\nserve  Succeeded" in capsys.readouterr().out


def test_who_follows_a_run_hears_what_it_waits_for(
    api: Api, monkeypatch: pytest.MonkeyPatch, capsys: Output
) -> None:
    """Each reason once, and again when it changes."""
    monkeypatch.setattr(waiting, "REPORT_S", 0.0)
    workflow = add_workflow(api, "demo", "demo", 0, phase="Running")
    add_gated_pod(api, "demo.sft(0)", "gpu-pool")
    lines = read_logs(connected(f"http://127.0.0.1:{api.server_port}"), "demo", follow=True)
    reason = "(waits: queue gpu-pool: not seen by Kueue yet; is the queue there?)"
    assert next(lines) == ("sft", reason)
    api.unseen = {"workloads"}
    stage, line = next(lines)
    assert stage == "sft" and "why is not for this account to see" in line
    workflow["status"] = {"phase": "Succeeded"}
    api.pods = []
    assert list(lines) == []
