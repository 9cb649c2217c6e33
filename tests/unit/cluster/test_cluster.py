"""Workflows of a run, in order."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.cluster.api import kubeconfig, serving
from tuneloop.cli import run_cli
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.cluster.preflight import _find_missing_rights
from tuneloop.cluster.run_workflows import find_executor_phase, find_workflows
from tuneloop.cluster.watch import read_nodes
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.runs.stages import list_cluster_stages
from tuneloop.workflow.plan import PLAN
from tuneloop.workflow.settings import RUN_LABEL


def test_workflows_of_one_second_follow_their_numbers() -> None:
    def made(name: str, second: int) -> dict[str, Any]:
        return {"metadata": {"name": name, "creationTimestamp": f"2026-01-01T00:00:{second:02d}Z"}}

    found = [made("demo-10", 5), made("demo-2", 5), made("demo", 1), made("demo-11", 5)]
    found[-1]["status"] = {"phase": "Failed"}
    cluster: Any = SimpleNamespace(list=lambda *_, **__: found, namespace="n", context="c")
    assert [w["metadata"]["name"] for w in find_workflows(cluster, "demo")] == [
        "demo",
        "demo-2",
        "demo-10",
        "demo-11",
    ]
    assert find_executor_phase(cluster, "demo") == "failed", "the last one's"


def test_an_attempt_without_the_time_of_its_end_ended_when_the_next_began() -> None:
    """Argo 3.7.6 was seen to write such an end, of a pod that was deleted just as the controller made it anew."""

    def node(name: str, phase: str, started: int, finished: int | None) -> dict[str, Any]:
        when = {
            "startedAt": f"2026-11-23T20:{started}:00Z",
            "finishedAt": finished and f"2026-11-23T20:{finished}:00Z",
        }
        return {
            "id": name,
            "name": name,
            "displayName": name,
            "type": "Pod",
            "templateName": "end",
            "phase": phase,
            **when,
        }

    first, second = node("end(0)", "Error", 29, None), node("end(1)", "Succeeded", 31, 35)
    found = read_nodes({"status": {"phase": "Succeeded", "nodes": {"b": second, "a": first}}})
    (stage,) = list_cluster_stages(found, {})
    assert (stage.retries, stage.lost_seconds, stage.seconds) == (1, 120, 240)
    assert stage.cause.startswith("attempt 1 ended after 120 s: ")
    over = {"phase": "Failed", "finishedAt": "2026-11-23T20:32:00Z", "nodes": {"a": first}}
    (alone,) = read_nodes({"status": over}).values()
    assert alone.finished - alone.started == 180


def prepared(pipeline: str = "grpo", *settings: str, store: str = "s3://b/runs") -> dict[str, Any]:
    found = find_pipeline(pipeline)
    sets = [*(["loop.iterations_per_pod=0"] if pipeline != "sft" else []), *settings]
    return run_workflows.prepare_workflow(
        found.build(found.configure(None, sets)), run="demo", store=store
    )


def test_a_run_goes_on_as_what_it_was_submitted_as() -> None:
    mended = prepared("grpo", "update.learning_rate=0.001")
    with serving() as (server, cluster):
        assert argo.create_workflow(cluster, prepared(), "demo") == "demo"
        live = server.objects["workflows", "demo"]
        live["status"] = {"phase": "Failed"}
        for other, what in (
            (prepared("sft_then_grpo"), "pipeline"),
            (prepared(store="s3://b/others"), "store"),
        ):
            with pytest.raises(
                UserError, match=f"--run: 'demo': exists with another {what}; submit it as it was"
            ):
                argo.create_workflow(cluster, other, "demo")
        assert argo.create_workflow(cluster, mended, "demo") == "demo-2", (
            "nothing was made yet that it may not fit"
        )
        del server.objects["workflows", "demo-2"]
        node = {
            "id": "n",
            "name": "demo.main.update",
            "type": "Pod",
            "templateName": "policy-update",
        }
        live["status"]["nodes"] = {"n": {**node, "phase": "Succeeded"}}
        with pytest.raises(
            UserError,
            match=r"exists with another policy-update\.learning_rate; submit it as it was",
        ):
            argo.create_workflow(cluster, mended, "demo")
        larger = prepared(
            "grpo",
            "cluster.trainer.memory=64Gi",
            "cluster.images=there/{image}",
            store="s3://b/runs/",
        )
        assert argo.create_workflow(cluster, larger, "demo") == "demo-2", (
            "what pods ask for may change"
        )


def test_a_run_of_an_earlier_build_goes_on_at_the_defaults_of_new_parameters() -> None:
    """Its plan lacks the parameters that its build did not have."""
    earlier = prepared()
    plan = json.loads(earlier["metadata"]["annotations"][PLAN])
    for name in ("punish", "memory_mb"):
        del plan["stages"]["evaluate"]["parameters"][name]
    earlier["metadata"]["annotations"][PLAN] = json.dumps(plan)
    with serving() as (server, cluster):
        assert argo.create_workflow(cluster, earlier, "demo") == "demo"
        node = {"id": "n", "name": "n", "type": "Pod", "templateName": "policy-update"}
        live = server.objects["workflows", "demo"]
        live["status"] = {"phase": "Failed", "nodes": {"n": {**node, "phase": "Succeeded"}}}
        with pytest.raises(UserError, match=r"exists with another evaluate\.punish; submit"):
            argo.create_workflow(cluster, prepared("grpo", "evaluate.punish=false"), "demo")
        assert argo.create_workflow(cluster, prepared(), "demo") == "demo-2"


def test_each_workflow_of_a_run_has_a_token_of_its_own_that_goes_with_it() -> None:
    """Its servers' pods mount it; nothing of it stands in the workflow."""
    with serving() as (server, cluster):
        argo.create_workflow(cluster, prepared(), "demo")
        server.objects["workflows", "demo"]["status"] = {"phase": "Failed"}
        argo.create_workflow(cluster, prepared(), "demo")
        made = {
            name: each for (plural, name), each in server.objects.items() if plural == "secrets"
        }
        assert list(made) == ["tuneloop-server-uid-demo", "tuneloop-server-uid-demo-2"]
        tokens = [each["stringData"]["token"] for each in made.values()]
        assert len({*tokens}) == 2 and min(map(len, tokens)) >= 40
        owners = [each["metadata"]["ownerReferences"][0] for each in made.values()]
        assert [(each["kind"], each["name"], each["uid"]) for each in owners] == [
            ("Workflow", name, f"uid-{name}") for name in ("demo", "demo-2")
        ]
        text = json.dumps(server.objects["workflows", "demo"])
        assert text.count("tuneloop-server-{{workflow.uid}}") == 3 and not any(
            token in text for token in tokens
        )
        argo._create_token(
            cluster, server.objects["workflows", "demo"]
        )  # again: that of the first stays
        assert (
            server.objects["secrets", "tuneloop-server-uid-demo"]["stringData"]["token"]
            == tokens[0]
        )


def test_a_pipeline_without_servers_has_no_token() -> None:
    with serving() as (server, cluster):
        argo.create_workflow(cluster, prepared("sft"), "demo")
        assert [plural for plural, _ in server.objects] == ["workflows"]


def test_the_right_to_make_a_token_is_asked_for_where_there_is_one_to_be_made() -> None:
    with serving() as (server, cluster):
        server.refuses.add("secrets")
        assert not [*_find_missing_rights(cluster, prepared("sft"))]
        for workflow in (prepared(), {"spec": {"workflowTemplateRef": {"name": "theirs"}}}):
            assert "may not create secrets" in str(*_find_missing_rights(cluster, workflow))
        server.refuses = {"workflows"}
        assert "may not create workflows" in str(*_find_missing_rights(cluster, prepared("sft")))


def test_no_run_begins_where_its_token_may_not_be_made() -> None:
    with serving() as (server, cluster):
        server.refuses.add("secrets")
        with pytest.raises(UserError, match=r"refused \(403\)"):
            argo.create_workflow(cluster, prepared(), "demo")
        assert not server.objects


def test_addresses_and_processes_of_a_run_may_change() -> None:
    def of_fleet(fleet: str, *settings: str) -> dict[str, Any]:
        return prepared(
            "grpo",
            "engine.kind=endpoint",
            "engine.weights=refit",
            f"engine.weights.fleet={fleet}",
            *settings,
        )

    live = {**of_fleet("http://a:1", "nodes=2"), "status": {"phase": "Succeeded"}}
    assert (
        argo.prepare_resumption(
            of_fleet("http://b:1", "nodes=2", "rollout.timeout_s=9", "processes=2"), [live], "demo"
        )[1]
        == 2
    )
    with pytest.raises(
        UserError, match=r"exists with another evaluate\.max_tokens, rollout\.max_tokens;"
    ):
        argo.prepare_resumption(
            of_fleet("http://b:1", "nodes=2", "rollout.max_tokens=3"), [live], "demo"
        )


def test_stages_that_share_a_pod_may_change_their_images_and_not_their_settings() -> None:
    coarse = ("loop.iterations_per_pod=10", "loop.per_workflow=10")
    live = {**prepared("grpo", *coarse), "status": {"phase": "Succeeded"}}
    assert (
        argo.prepare_resumption(
            prepared("grpo", *coarse, "cluster.images=there/{image}"), [live], "demo"
        )[1]
        == 2
    )
    with pytest.raises(UserError, match=r"exists with another policy-update\.learning_rate;"):
        argo.prepare_resumption(
            prepared("grpo", *coarse, "update.learning_rate=0.001"), [live], "demo"
        )


def test_a_run_that_was_submitted_from_a_template_is_of_its_pipeline() -> None:
    template = run_workflows.as_template(prepared(), "grpo")["spec"]
    parameters = [{"name": "run", "value": "demo"}, {"name": "store", "value": "s3://b/runs"}]
    spec = {
        "workflowTemplateRef": {"name": "grpo"},
        "entrypoint": "main",
        "arguments": {"parameters": parameters},
    }
    live = {"metadata": {"name": "demo", "labels": {RUN_LABEL: "demo"}}, "spec": spec}
    live["status"] = {"phase": "Failed", "storedWorkflowTemplateSpec": template}
    assert argo.prepare_resumption(prepared(), [live], "demo")[1] == 2
    with pytest.raises(UserError, match="exists with another pipeline"):
        argo.prepare_resumption(prepared("sft_then_grpo"), [live], "demo")


def test_pods_that_a_restarted_controller_has_forgotten_are_deleted() -> None:
    """Of workflows that have ended, and long ago; what the controller keeps is labelled as completed."""

    def succeeded(name: str, workflow: str, at: str) -> dict[str, Any]:
        labels = {argo.WORKFLOW_LABEL: workflow, RUN_LABEL: workflow}
        conditions = [{"type": "Ready", "status": "False", "lastTransitionTime": at}]
        return {
            "metadata": {"name": name, "labels": labels},
            "status": {"phase": "Succeeded", "conditions": conditions},
        }

    old, new = "2026-01-01T00:00:00Z", datetime.now(UTC).isoformat()
    with serving() as (server, cluster):
        for name, phase, delay in (
            ("ended", "Failed", "600s"),
            ("active", "Running", "600s"),
            ("kept", "Failed", "2h"),
        ):
            spec = {"podGC": {"deleteDelayDuration": delay}}
            server.objects["workflows", name] = {
                "metadata": {"name": name},
                "spec": spec,
                "status": {"phase": phase},
            }
        server.pods = [
            succeeded("a", "ended", old),
            succeeded("b", "ended", new),
            succeeded("c", "active", old),
            succeeded("d", "ended", old),
            succeeded("e", "kept", old),
        ]
        server.add_pod("failed", old, "")
        argo.delete_forgotten_pods(cluster)
        assert [pod["metadata"]["name"] for pod in server.pods] == ["b", "c", "e", "failed"]


def ended(phase: str, **stages: dict[str, Any]) -> dict[str, Any]:
    """Status of a workflow whose pods had these outputs, or exit codes."""
    nodes = {}
    for second, (name, outputs) in enumerate(stages.items()):
        stage = name.replace("_", "-")
        at = f"2026-01-01T00:01:{second:02d}Z"
        node = {
            "id": stage,
            "name": f"demo.{stage}",
            "displayName": stage,
            "type": "Pod",
            "startedAt": at,
        }
        node |= {"templateName": "evaluate" if "evaluate" in stage else stage, "finishedAt": at}
        told = [{"name": key, "value": value} for key, value in outputs.items() if key != "code"]
        code = str(outputs.get("code", 0))
        node |= {
            "phase": "Succeeded" if code == "0" else "Failed",
            "outputs": {"exitCode": code, "parameters": told},
        }
        nodes[stage] = node
    return {"phase": phase, "message": f"main {phase.lower()}", "nodes": nodes}


def test_submit_wait_says_how_the_attempt_ended_and_what_the_run_has_come_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    submit = ["submit", "grpo", "--run", "demo", "--store", "s3://b/runs", "--wait"]
    with serving() as (server, cluster):
        monkeypatch.setenv("KUBECONFIG", kubeconfig(cluster.host, tmp_path))
        before = {"mean-reward": "0.125"}
        server.becomes = ended("Failed", evaluate_before=before, rollout={"code": 2})
        server.add_pod(
            "demo.rollout",
            "2026-01-01T00:00:00Z",
            "error: prompts: None: too few\nError: exit status 2\n",
        )
        assert run_cli(submit) == 2
        said = capsys.readouterr()
        assert "\ndemo: failed: main failed, exit code 2 (" in said.out
        assert "  mean reward  0.125 (evaluate-before)\n" in said.out
        assert (
            "error: prompts: None: too few (in rollout; see `tuneloop cluster logs demo rollout`"
            in said.err
        )
        assert "submit it again with this name: it continues where it ended" in said.err

        assert run_cli(["cluster", "status", "demo"]) == 0
        shown = capsys.readouterr().out
        assert re.search(r"^evaluate-before +Succeeded +1 .* mean-reward 0\.125$", shown, re.M), (
            shown
        )
        assert run_cli(["cluster", "status", "demo", "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (told["run"], told["phase"], told["message"]) == ("demo", "Failed", "main failed")
        assert [(each["stage"], each["phase"], each["results"]) for each in told["stages"]] == [
            ("evaluate-before", "Succeeded", {"mean-reward": 0.125}),
            ("rollout", "Failed", {}),
        ]

        after, exported = {"mean-reward": "0.75"}, {"model": "s3://b/runs/demo/export@sha256:0"}
        server.becomes = ended(
            "Succeeded", evaluate_before=before, evaluate_after=after, export=exported
        )
        server.add_pod("demo-2.export", "2026-01-01T00:02:00Z", "export: done\n")
        assert run_cli(submit) == 0
        said = capsys.readouterr()
        assert "export | export: done\n" in said.out and "too few" not in said.out, (
            "of the first attempt"
        )
        assert "\ndemo: succeeded (" in said.out and "error:" not in said.err
        assert "  mean reward  0.125 (evaluate-before) → 0.750 (evaluate-after)\n" in said.out
        assert "  model        s3://b/runs/demo/export@sha256:0\n" in said.out
