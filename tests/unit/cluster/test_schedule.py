"""What a schedule refuses before it asks a cluster."""

import pytest

from benchmarks.argo_loop import build
from tests.unit.cluster.api import serving
from tuneloop.cluster import run_workflows
from tuneloop.cluster.schedule import (
    CRON,
    LABEL,
    apply_schedule,
    build_data_check_spec,
    check_cron,
    check_timezone,
    delete_schedule,
)
from tuneloop.config.loading import find_pipeline
from tuneloop.core.errors import UserError
from tuneloop.workflow.settings import RUN_LABEL


@pytest.mark.parametrize(
    "text", ["0 3 * * *", "*/15 8-18 * * mon-fri", "0 0 1,15 jan,jul *", "5/10 * * * 7", "@daily", "@every 90m"]
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
    made = run_workflows.prepare_workflow(pipeline.build(pipeline.configure()), run="nightly", store="s3://b/runs")
    spec = build_data_check_spec(made, "nightly")
    data, start, main = spec["templates"]
    assert data == next(t for t in made["spec"]["templates"] if t["name"] == "data-prep")
    assert start["serviceAccountName"] == "tuneloop-continue" and start["container"]["image"] == "tuneloop/base:dev"
    look, then = main["dag"]["tasks"]
    assert look["arguments"]["parameters"] == [{"name": "prompts", "value": "file:///tmp/prompts"}]
    assert then["depends"] == "data-prep"
    assert RUN_LABEL not in spec["podMetadata"]["labels"] and RUN_LABEL in made["spec"]["podMetadata"]["labels"]


def test_a_pipeline_without_data_has_nothing_to_look_at() -> None:
    made = run_workflows.prepare_workflow(build(2, 1), run="nightly", store="s3://b/runs")
    with pytest.raises(UserError, match="has no stage data_prep"):
        build_data_check_spec(made, "nightly")


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
        apply_schedule(cluster, made, name="nightly", store="s3://b/runs", cron="@daily", timezone="UTC")
        apply_schedule(cluster, made, name="nightly", store="s3://b/runs", cron="@hourly", timezone="UTC")
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
                lambda: apply_schedule(cluster, made, name="nightly", store="s3://b/runs", cron="@daily"),
            ):
                with pytest.raises(UserError, match="that no schedule made; choose another name"):
                    ask()
                assert server.objects == {(plural, "nightly"): theirs}
