"""The client, and tasks that ask the API: kfp's own SDK, and an HTTP server that keeps runs (tests/kfp_api.py)."""

import json
import re
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.kfp_api import Api, serve_api
from tests.unit import toy
from tuneloop.cli import run_cli
from tuneloop.cli.checks import configure_remote
from tuneloop.config.loading import find_pipeline
from tuneloop.core.artifacts import dump_checked_json
from tuneloop.core.errors import Interrupted, Retryable, Unavailable, UserError
from tuneloop.core.store import Store
from tuneloop.formats.stored_models import open_model
from tuneloop.kfp import client, progress
from tuneloop.kfp.api import RunApi, call_api
from tuneloop.kfp.check_data import start_scheduled_run
from tuneloop.kfp.schedule import convert_cron
from tuneloop.runs.run_record import Run
from tuneloop.ui.app import build_app
from tuneloop.ui.describe import describe_state

NODES = {
    "wf-1": {
        "id": "wf-1",
        "name": "wf",
        "type": "DAG",
        "displayName": "wf",
        "templateName": "entrypoint",
    },
    "wf-2": {
        **{"id": "wf-2", "name": "wf.root.sft-driver", "type": "Pod", "displayName": "sft-driver"},
        **{"templateName": "system-container-driver", "startedAt": "2026-11-21T08:00:01Z"},
    },
    "wf-3": {
        **{"id": "wf-3", "name": "wf.root.sft.executor", "type": "Pod", "displayName": "executor"},
        **{"templateName": "system-container-impl", "startedAt": "2026-11-21T08:00:02Z"},
    },
    "wf-4": {
        **{
            "id": "wf-4",
            "name": "wf.root.export.executor(0)",
            "type": "Pod",
            "displayName": "executor(0)",
        },
        **{"templateName": "retry-system-container-impl", "startedAt": "2026-11-21T08:00:09Z"},
    },
}
LOGS = {"wf-system-container-impl-3": "sft: step 1\nsft: step 2\n"}
TASKS = [
    {"display_name": "root", "state": "RUNNING", "start_time": "2026-11-21T08:00:00Z"},
    {"display_name": "sft-driver", "state": "SUCCEEDED", "start_time": "2026-11-21T08:00:01Z"},
    {
        **{"display_name": "sft", "state": "SUCCEEDED", "start_time": "2026-11-21T08:00:02Z"},
        **{"end_time": "2026-11-21T08:00:07Z", "child_tasks": [{"pod_name": "sft-x7-17"}]},
    },
    {"state": "SUCCEEDED", "start_time": "2026-11-21T08:00:02Z"},
    {"display_name": "executor(0)", "state": "SUCCEEDED", "start_time": "2026-11-21T08:00:02Z"},
    {"display_name": "evaluate-2", "state": "RUNNING", "start_time": "2026-11-21T08:00:08Z"},
    {
        "display_name": "exit-handler-1.onExit",
        "state": "RUNNING",
        "start_time": "2026-11-21T08:00:09Z",
    },
    {"display_name": "sft-x7", "state": "RUNNING", "child_tasks": [{"pod_name": "sft-x7-123"}]},
]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    with serve_api() as server:
        server.nodes, server.logs, server.task_details = NODES, LOGS, TASKS
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
        yield server


def test_a_run_from_submission_to_its_end(backend: Api, capsys: pytest.CaptureFixture[str]) -> None:
    line = [
        "kfp",
        "submit",
        "sft",
        "--run",
        "demo",
        "--store",
        "s3://b/runs",
        "--pipeline-root",
        "s3://b/kfp",
    ]
    assert run_cli(line) == 0
    (run,) = backend.runs
    assert run["runtime_config"] == {
        "parameters": {"run": "demo", "store": "s3://b/runs"},
        "pipeline_root": "s3://b/kfp",
    }
    executors = run["pipeline_spec"]["pipeline_spec"]["deploymentSpec"]["executors"]
    assert executors["exec-sft"]["container"]["image"] == "tuneloop/trainer:dev"
    assert (
        "exec-sft"
        in run["pipeline_spec"]["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"][
            "executors"
        ]
    )

    assert run_cli(line) == 2
    assert "is under way as r1" in capsys.readouterr().err
    assert run_cli(["kfp", "status", "demo"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ *sft +SUCCEEDED +5$", shown, re.M)
    assert re.search(r"^ *evaluate-after +RUNNING", shown, re.M), "as the pipeline calls it"
    assert not any(word in shown for word in ("driver", "executor", "onExit", "sft-x7"))
    assert run_cli(["kfp", "status", "demo", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["id"]) == ("demo", "r1")
    assert {"task": "sft", "phase": "SUCCEEDED", "seconds": 5.0, "message": ""} in told["tasks"]
    assert run_cli(["kfp", "logs", "demo"]) == 0
    assert (
        capsys.readouterr().out == "sft | sft: step 1\nsft | sft: step 2\n"
    )  # export's pod is gone
    assert run_cli(["kfp", "stop", "demo"]) == 0
    assert backend.runs[0]["state"] == "CANCELING"
    backend.runs[0]["state"] = "CANCELED"  # as the backend says some seconds later
    assert run_cli(line) == 0, "resumes"
    assert client.find_run(client.connect_to_kfp(backend.url), "demo").run_id == "r2"


def test_every_state_of_kfp_is_known() -> None:
    from kfp_server_api import V2beta1RuntimeState

    assert {*progress.PHASES, "RUNTIME_STATE_UNSPECIFIED"} == {
        *V2beta1RuntimeState().allowable_values
    }


def test_a_run_is_seen_as_it_goes(
    backend: Api, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On its page and by `watch`: what was committed, and the states of KFP's tasks."""
    assert run_cli(["kfp", "submit", "sft", "--run", "demo", "--store", "s3://b/runs"]) == 0
    toy.make(f"{tmp_path}/demo", 1, whole=False)
    toy.make(f"{tmp_path}/other", 1, whole=False)
    ask = partial(progress.describe_progress, client.connect_to_kfp(backend.url))
    (run,) = backend.runs
    with TestClient(build_app(str(tmp_path), ask=ask)) as page:

        def look(name: str) -> tuple[str, str, dict[str, Any]]:
            now = page.get(f"/api/runs/{name}/now").json()
            return now["phase"], now["message"], {each["stage"]: each for each in now["stages"]}

        phase, message, stages = look("demo")
        assert (phase, message) == ("running", "")
        assert {name: each["phase"] for name, each in stages.items()} == {
            **dict.fromkeys(("evaluate-before", "rollout", "reward", "policy-update"), "Committed"),
            **{"sft": "Succeeded", "evaluate-after": "Running"},
        }
        assert (stages["sft"]["done"], stages["evaluate-after"]["done"]) == (1, 0)
        assert look("other")[:2] == (
            "elsewhere",
            "run: 'other': no run of that name on this backend",
        )
        run["run_details"]["task_details"][-3] |= {
            "state": "FAILED",
            "error": {"code": 1, "message": "out of memory"},
        }
        run |= {"state": "FAILED", "error": {"code": 1, "message": "a task failed"}}
        phase, message, stages = look("demo")
        assert (phase, message) == ("failed", "a task failed")
        assert (stages["evaluate-after"]["phase"], stages["evaluate-after"]["message"]) == (
            "Failed",
            "out of memory",
        )
        for state, told in (("CANCELING", ("running", "")), ("CANCELED", ("failed", "canceled"))):
            run |= {"state": state, "error": None}
            assert look("demo")[:2] == told
    watch = ["watch", "demo", "--store", str(tmp_path), "--kfp", backend.url]
    capsys.readouterr()
    assert run_cli(watch) == 1 and capsys.readouterr().out.endswith("demo: failed: canceled\n")
    for state in ("SUCCEEDED", "SKIPPED"):
        run["state"] = state
        assert run_cli(watch) == 0 and "iterations/1/policy-update" in capsys.readouterr().out
    assert run_cli([*watch, "--namespace", "x"]) == 2
    assert capsys.readouterr().err.startswith(
        f"error: --kfp: '{backend.url}': is the URL for runs on KFP, and --namespace is"
    )
    assert run_cli(["watch", "typo", *watch[2:]]) == 2
    told = f"error: run: 'typo': no run of that name on this backend; {tmp_path} has no artifact of it, either\n"
    assert capsys.readouterr().err == told


def test_an_api_that_goes_away_is_asked_again(backend: Api, tmp_path: Path) -> None:
    """What was committed must not be taken for how the run ended."""
    ask = partial(progress.describe_progress, client.connect_to_kfp(backend.url))
    backend.shutdown()
    backend.server_close()
    with pytest.raises(Retryable, match=r"kfp: the API does not answer \(MaxRetryError\)"):
        describe_state(Run("demo", str(tmp_path)), None, ask)


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
def test_an_error_of_the_server_is_no_mistake(
    status: int, backend: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status 500 ended a command as a mistake of the user's, and a task as one that may be repeated."""
    backend.status = status
    assert run_cli(["kfp", "stop", "demo"]) == 75
    assert "kfp: the database is away" in capsys.readouterr().err
    with pytest.raises(Retryable, match=f"{status}.*the database is away"):
        RunApi(backend.url).read_run("r1")


@pytest.mark.parametrize("command", [["ui"], ["watch", "demo"]])
def test_an_option_is_named_that_names_no_api(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(client, "TIMEOUT_S", 1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        for url in ("http://127.0.0.1:1", f"http://127.0.0.1:{silent.getsockname()[1]}"):
            assert run_cli([*command, "--store", str(tmp_path), "--kfp", url]) == 2
            told = (
                f"error: --kfp: '{url}': does not answer (MaxRetryError); give the API's address\n"
            )
            assert capsys.readouterr().err == told
    assert run_cli([*command, "--store", str(tmp_path), "--kfp", ""]) == 2
    assert capsys.readouterr().err.startswith("error: --kfp: '': is the URL for runs on KFP")


def test_where_every_template_is_retried_tasks_have_a_row_and_logs(
    backend: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    """KFP 2.17's own manifests: a node of all attempts above each node."""
    assert run_cli(["kfp", "submit", "sft", "--run", "demo", "--store", "s3://b/runs"]) == 0
    names = (
        "wf",
        "entrypoint",
        "root-driver",
        "root",
        "sft-driver",
        "sft",
        "executor",
        "exit-handler-1-driver",
    )
    done = {
        "state": "SUCCEEDED",
        "start_time": "2026-11-21T08:00:00Z",
        "end_time": "2026-11-21T08:00:05Z",
    }
    first = {**done, "state": "FAILED", "end_time": "2026-11-21T08:00:02Z"}
    children = {"wf": [{"pod_name": "wf-1"}]}
    rows = [
        {"display_name": f"{name}{attempt}", "child_tasks": children.get(name, []), **each}
        for name in names
        for attempt, each in (("", done), ("(0)", first), ("(1)", done))
    ]
    backend.runs[0]["run_details"]["task_details"] = rows
    assert run_cli(["kfp", "status", "demo", "--json"]) == 0
    text = capsys.readouterr().out
    shown = json.loads(text[text.index("{") :])["tasks"]
    assert shown == [{"task": "sft", "phase": "SUCCEEDED", "seconds": 5.0, "message": ""}]
    path = {
        "displayName": "executor(0)",
        "name": "wf(0).root(0).sft(0).executor(0)",
        "templateName": "impl",
    }
    driver = {
        **path,
        "displayName": "sft-driver(0)",
        "name": "wf(0).root(0).sft-driver(0)",
        "templateName": "driver",
    }
    backend.nodes = {
        f"wf-{i}": {"id": f"wf-{i}", "type": "Pod", **each} for i, each in enumerate((path, driver))
    }
    backend.logs = {"wf-impl-0": "sft: step 1\n", "wf-driver-1": "driver\n"}
    for backend.compressed in (False, True):
        assert run_cli(["kfp", "logs", "demo", "sft"]) == 0
        assert capsys.readouterr().out == "sft | sft: step 1\n"


def test_a_schedule_looks_for_new_data_and_starts_its_run(
    backend: Api, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--name", "nightly", "--store", "s3://b/runs", "--cron", "30 2 * * 1-5"]
    line = ["kfp", "schedule", "sft", *place, "--set", "data.train=64"]
    assert run_cli([*line, "--pipeline-root", "s3://b/kfp"]) == 0
    (made,) = backend.recurring
    assert made["trigger"] == {"cron_schedule": {"cron": "0 30 2 * * 1-5"}}
    assert (made["max_concurrency"], made["no_catchup"], made["mode"]) == (1, True, "ENABLE")
    (task,) = made["pipeline_spec"]["pipeline_spec"]["root"]["dag"]["tasks"].values()
    given = {k: v["runtimeValue"]["constant"] for k, v in task["inputs"]["parameters"].items()}
    assert (given["schedule"], given["pipeline_id"], given["pipeline_version_id"]) == (
        "nightly",
        "p1",
        "v1",
    )
    assert given["run_id"] == "{{$.pipeline_job_uuid}}"
    assert (
        given["data"]["train"] == 64 and given["data"]["seed"] == 0 and "url" not in given["data"]
    )

    assert run_cli(line) == 2
    assert "--name: 'nightly': is a schedule already" in capsys.readouterr().err
    assert run_cli(["kfp", "unschedule", "nightly"]) == 0
    assert backend.recurring == []
    assert run_cli(line) == 0
    assert (len(backend.pipelines), len(backend.versions)) == (1, 1), (
        "the same pipeline is uploaded once"
    )


def test_a_schedule_keeps_what_is_promoted_and_knows_its_facts(
    backend: Api, smollm2: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "runs"
    promotion = {
        "name": "nightly",
        "run": "first",
        "version": 1,
        "ref": open_model(f"file://{smollm2}").reference,
        "least": {},
        "figures": {},
        "evaluation": "",
        "who": "",
        "time": 0.0,
    }
    Store(str(store)).put(
        "promoted.json", dump_checked_json({"promotions": [promotion]}, "promoted.json")
    )
    words = ["kfp", "schedule", "sft", "--name", "nightly", "--cron", "30 2 * * *"]
    words += ["--store", str(store), "--set", "base_model=run://nightly@promoted"]
    assert run_cli(words) == 0
    (made,) = backend.recurring
    (task,) = made["pipeline_spec"]["pipeline_spec"]["root"]["dag"]["tasks"].values()
    assert task["inputs"]["parameters"]["data"]["runtimeValue"]["constant"]["chat"] is True
    sft = find_pipeline("sft")
    sets = ["base_model=run://nightly@promoted"]
    settings: Any = configure_remote(sft, None, sets, str(store), keeps_promoted=True)
    assert settings.base_model == "run://nightly@promoted"
    # A run has the version of its beginning.
    settings = configure_remote(sft, None, sets, str(store))
    assert settings.base_model == promotion["ref"]
    words[-1] = "base_model=run://frist"
    words[4] = "other"
    for command in (words, ["kfp", "submit", "sft", "--run", "x", *words[-4:]], words[1:]):
        assert run_cli(command) == 2
        assert "base_model: 'run://frist': has no files" in capsys.readouterr().err


def test_the_rule_of_a_tick(backend: Api) -> None:
    """New data is a new run, known data is skipped, what failed is resumed, what is under way is left alone."""
    api, backend.page_size = RunApi(backend.url), 2
    own = {
        "run_id": "tick",
        "experiment_id": "e1",
        "runtime_config": {"pipeline_root": "s3://b/kfp"},
        "service_account": "runner",
    }
    wanted = {
        "schedule": "nightly",
        "store": "s3://b/runs",
        "pipeline_id": "p1",
        "pipeline_version_id": "v1",
        "x": 1,
    }

    def tick(digest: str) -> str:
        return start_scheduled_run(api, own, f"xxh3:{digest}", wanted)

    api.start_run(
        {"display_name": "nightly-tick", "experiment_id": "e1"}
    )  # nobody's run: another name
    assert tick("0123456789") == "started nightly-01234567 as r2"
    (run,) = backend.runs[1:]
    assert run["runtime_config"] == {
        **{
            "parameters": {"run": "nightly-01234567", "store": "s3://b/runs"},
            "pipeline_root": "s3://b/kfp",
        }
    }
    assert run["pipeline_version_reference"] == {"pipeline_id": "p1", "pipeline_version_id": "v1"}
    assert tick("fedcba9876") == "skipped: nightly-01234567 is under way"
    run["state"] = "FAILED"
    assert tick("0123456789") == "started nightly-01234567 as r3"
    backend.runs[2]["state"] = "SUCCEEDED"
    assert tick("0123456789") == "skipped: no new data since nightly-01234567"
    assert tick("fedcba9876") == "started nightly-fedcba98 as r4"
    backend.runs[3]["state"] = "SUCCEEDED"
    for i in range(4):  # of another schedule, newer, and on the first pages
        run_id = api.start_run({"display_name": f"nightly-eu-{i:08}", "experiment_id": "e1"})
    assert tick("0123456789") == "skipped: no new data since nightly-01234567", run_id
    own["state"] = "CANCELING"
    with pytest.raises(Interrupted):
        tick("aaaaaaaaaa")


def test_a_loop_goes_on_once(backend: Api) -> None:
    line = [
        "kfp",
        "submit",
        "grpo",
        "--run",
        "long",
        "--store",
        "s3://b/runs",
        "--pipeline-root",
        "s3://b/kfp",
    ]
    assert run_cli(line) == 0
    api = RunApi(backend.url)
    assert api.start_next_run("r1", "long") == "r2"
    assert api.start_next_run("r1", "long") == "r2", (
        "tried again, it finds the run that it has started"
    )
    first, second = backend.runs
    for key in ("display_name", "experiment_id", "pipeline_spec", "runtime_config"):
        assert first[key] == second[key]
    assert (
        api.find_newer_run(api.read_run("r1"), "long") == "r2"
        and api.find_newer_run(api.read_run("r2"), "long") is None
    )
    # Another run that the UI has started under the same display name does not continue it.
    namesake = dict(second, run_id="r3", created_at="9999")
    namesake["runtime_config"] = {"parameters": {"run": ""}}
    backend.runs.append(namesake)
    assert api.find_newer_run(api.read_run("r1"), "long") == "r2"
    assert api.start_next_run("r3", "grpo-1b2c3d4e") == "r4"
    assert backend.runs[-1]["runtime_config"]["parameters"]["run"] == "grpo-1b2c3d4e"
    del backend.runs[2:]
    assert run_cli(["kfp", "stop", "long"]) == 0
    with pytest.raises(Interrupted, match="r2 is being stopped"):
        api.start_next_run("r2", "long")
    with pytest.raises(Unavailable, match=r"kfp\.api"):
        RunApi("http://127.0.0.1:1").read_run("r1")
    with pytest.raises(UserError, match="does not answer with JSON"):
        call_api(
            "kfp.api",
            "GET",
            f"{backend.url}/apis/v1alpha1/runs/r1/nodes/wf-system-container-impl-3/log",
        )


def test_what_is_refused(
    backend: Api, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match="write five fields"):
        convert_cron("0 0 2 * * *")
    for line, told in (
        (["kfp", "status", "nobody"], "no run of that name"),
        (["kfp", "unschedule", "nobody"], "no recurring run of that name"),
        (
            ["kfp", "submit", "sft", "--run", "No Name", "--store", "s3://b/r"],
            "--run: 'No Name'",
        ),
        (
            [
                "kfp",
                "schedule",
                "sft",
                "--name",
                "a" * 32,
                "--store",
                "s3://b/r",
                "--cron",
                "0 3 * * *",
            ],
            "at most 31",
        ),
    ):
        assert run_cli(line) == 2
        assert told in capsys.readouterr().err
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", "http://127.0.0.1:1")
    assert run_cli(["kfp", "status", "demo"]) == 2
    assert "does not answer" in capsys.readouterr().err


def test_a_cluster_without_the_backend_is_asked_once_and_said_in_a_line(
    backend: Api, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    backend.missing = True
    assert run_cli(["kfp", "status", "demo"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: kfp: ") and told.count("\n") == 1
    assert 'has no Kubeflow Pipelines (services "ml-pipeline" not found); --endpoint or' in told
    assert backend.asked == 1 and not caplog.records
