"""What a schedule refuses before it asks a cluster, what it creates there, and what is seen of it."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.argo_loop import build
from tests.unit.cluster.api import kubeconfig, serving
from tuneloop.cli import run_cli
from tuneloop.cluster import run_workflows
from tuneloop.cluster.schedule import (
    CRON,
    LABEL,
    apply_schedule,
    build_check_spec,
    check_cron,
    check_timezone,
    delete_schedule,
    main,
)
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.workflow.settings import RUN_LABEL


@pytest.mark.parametrize(
    "text",
    [
        "0 3 * * *",
        "*/15 8-18 * * mon-fri",
        "0 0 1,15 jan,jul *",
        "5/10 * * * 7",
        "@daily",
        "@every 90m",
    ],
)
def test_times(text: str) -> None:
    check_cron(text)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0 3 * *", "write five fields"),
        ("0 0 3 * * *", "write five fields"),
        ("60 3 * * *", "'60' is not a list of numbers from 0 to 59"),
        ("0 3 0 * *", "'0' is not a list of numbers from 1 to 31"),
        ("0 3 * mon *", "'mon' is not a list"),
        ("0 3 * * 1-", "'1-' is not a list"),
        ("@noon", "write five fields"),
    ],
)
def test_no_times(text: str, told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_cron(text)


def test_looking_makes_the_prompts_of_the_pipeline_and_keeps_none() -> None:
    pipeline = find_pipeline("grpo")
    made = run_workflows.prepare_workflow(
        pipeline.build(pipeline.configure()), run="nightly", store="s3://b/runs"
    )
    spec = build_check_spec(made, "nightly")
    data, start, main = spec["templates"]
    assert data == next(t for t in made["spec"]["templates"] if t["name"] == "data-prep")
    assert (
        start["serviceAccountName"] == "tuneloop-continue"
        and start["container"]["image"] == "tuneloop/base:dev"
    )
    look, then = main["dag"]["tasks"]
    assert look["arguments"]["parameters"] == [{"name": "prompts", "value": "file:///tmp/prompts"}]
    assert then["depends"] == "data-prep"
    assert (
        RUN_LABEL not in spec["podMetadata"]["labels"]
        and RUN_LABEL in made["spec"]["podMetadata"]["labels"]
    )


def test_a_pipeline_without_data_has_nothing_to_look_at() -> None:
    made = run_workflows.prepare_workflow(build(2, 1), run="nightly", store="s3://b/runs")
    with pytest.raises(UserError, match="has no stage data_prep"):
        build_check_spec(made, "nightly")


@pytest.mark.parametrize("zone", ["Mars/X", "Europe", "../UTC", "europe prague"])
def test_no_time_zones(zone: str) -> None:
    check_timezone("Europe/Prague")
    with pytest.raises(UserError, match=r"^--timezone: .* is not a time zone"):
        check_timezone(zone)


@pytest.mark.parametrize("name", ["Rev_N", "n" * 32])
def test_what_is_wrong_with_a_name_is_said_of_the_option_that_gave_it(name: str) -> None:
    with serving() as (_, cluster), pytest.raises(UserError, match=r"^--name: "):
        apply_schedule(cluster, {}, name=name, store="s3://b/runs", cron="@daily")


@pytest.mark.parametrize("plural", ["cronworkflows", "workflowtemplates"])
def test_an_object_that_no_schedule_made_is_neither_deleted_nor_replaced(plural: str) -> None:
    pipeline = find_pipeline("grpo")
    made = pipeline.build(pipeline.configure())
    with serving() as (server, cluster):
        apply_schedule(
            cluster, made, name="nightly", store="s3://b/runs", cron="@daily", timezone="UTC"
        )
        apply_schedule(
            cluster, made, name="nightly", store="s3://b/runs", cron="@hourly", timezone="UTC"
        )
        assert cluster.get(*CRON, "nightly")["spec"]["schedules"] == ["@hourly"]
        delete_schedule(cluster, "nightly")
        assert not server.objects
        with pytest.raises(UserError, match="does not exist in namespace"):
            delete_schedule(cluster, "nightly")
        for labels in ({}, {LABEL: "another"}):
            theirs = {"metadata": {"name": "nightly", "labels": labels}, "spec": {}}
            server.objects = {(plural, "nightly"): theirs}
            for ask in (
                lambda: delete_schedule(cluster, "nightly"),
                lambda: apply_schedule(
                    cluster, made, name="nightly", store="s3://b/runs", cron="@daily"
                ),
            ):
                with pytest.raises(UserError, match="that no schedule made; choose another name"):
                    ask()
                assert server.objects == {(plural, "nightly"): theirs}


def test_a_schedule_is_changed_though_the_controller_writes_into_it_meanwhile() -> None:
    pipeline = find_pipeline("grpo")
    made = pipeline.build(pipeline.configure())
    with serving() as (server, cluster):
        for cron, server.written in (("@daily", 0), ("@hourly", 2)):
            apply_schedule(cluster, made, name="nightly", store="s3://b/runs", cron=cron)
        assert server.written == 0 and cluster.get(*CRON, "nightly")["spec"]["schedules"] == [
            "@hourly"
        ]


def look(name: str, second: int, workflow: str, **node: Any) -> dict[str, Any]:
    """A workflow that looked for new data, whose last step is `node`."""
    at = f"2026-01-01T03:00:{second:02d}Z"
    about = {"name": f"{name}-{second}", "creationTimestamp": at, "labels": {LABEL: name}}
    step = {"id": "n", "name": "n", "type": "Pod", "templateName": "start", "startedAt": at, **node}
    return {"metadata": about, "status": {"phase": workflow, "nodes": {"n": step}}}


def test_schedules_are_listed_with_what_came_of_their_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipeline = find_pipeline("grpo")
    with serving() as (server, cluster):
        monkeypatch.setenv("KUBECONFIG", kubeconfig(cluster.host, tmp_path))
        assert run_cli(["cluster", "schedules"]) == 0
        assert capsys.readouterr().out == "no schedules in namespace tuneloop\n"
        made = pipeline.build(pipeline.configure())
        for name in ("nightly", "weekly"):
            apply_schedule(
                cluster, made, name=name, store="s3://b/runs", cron="@daily", timezone="UTC"
            )
        server.objects["cronworkflows", "nightly"]["status"] = {
            "lastScheduledTime": "2026-01-01T03:00:00Z"
        }
        said: Any = {
            "outputs": {
                "parameters": [
                    {"name": "said", "value": "skipped: no new data since nightly-1f0c93ab"}
                ]
            }
        }
        server.objects["cronworkflows", "weekly"]["spec"]["suspend"] = True
        failed: Any = {"phase": "Failed", "message": "main: Error (exit code 2): error: --run: 'x'"}
        seen = [
            look("nightly", 1, "Failed", **failed),
            look("nightly", 2, "Succeeded", phase="Succeeded", **said),
        ]
        run = look("nightly", 3, "Running")
        run["metadata"]["labels"][RUN_LABEL] = "nightly-1f0c93ab"
        for number, each in enumerate([*seen, look("nightly", 4, "Running", phase="Running"), run]):
            server.objects["workflows", str(number)] = each
        assert run_cli(["cluster", "schedules"]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert run_cli(["cluster", "schedules", "--json"]) == 0
        nightly, weekly = json.loads(capsys.readouterr().out)["schedules"]
    assert shown[0] == "nightly  @daily UTC  last check: 2026-01-01T03:00:00Z"
    assert "weekly  @daily UTC  last check: never  suspended" in shown
    assert [(each["phase"], each["said"]) for each in nightly["looks"]] == [
        ("Running", ""),
        ("Succeeded", "skipped: no new data since nightly-1f0c93ab"),
        ("Failed", failed["message"]),
    ]
    assert any(
        line.endswith("Succeeded  skipped: no new data since nightly-1f0c93ab") for line in shown
    )
    assert weekly["looks"] == []


def test_the_last_step_of_a_look_hands_on_what_it_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline = find_pipeline("grpo")
    made = run_workflows.prepare_workflow(
        pipeline.build(pipeline.configure()), run="nightly", store="s3://b/runs"
    )
    spec = build_check_spec(made, "nightly")
    (output,) = spec["templates"][1]["outputs"]["parameters"]
    monkeypatch.setenv("TUNELOOP_OUTPUTS", str(tmp_path))
    prompts = f"file:///tmp/prompts@sha256:{'0' * 32}"
    with serving() as (_, cluster):
        monkeypatch.setenv("KUBECONFIG", kubeconfig(cluster.host, tmp_path))
        arguments = [
            "--name",
            "nightly",
            "--namespace",
            "tuneloop",
            "--store",
            "s3://b/runs",
            "--prompts",
            prompts,
        ]
        assert main(arguments) == 0
        assert "ttlStrategy" not in spec, "the newest looks stay"
    assert (
        tmp_path / Path(output["valueFrom"]["path"]).name
    ).read_text() == "started nightly-00000000"
