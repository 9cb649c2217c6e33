"""The client against kfp's own SDK and an HTTP server that keeps runs as API v2beta1 of KFP 2.17 shapes them.

What is recorded below has the shape of what a KFP 2.17.0 API server answered.
"""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest

from tuneloop.cli import run_cli
from tuneloop.core.errors import UserError
from tuneloop.kfp import client

NODES = {
    "wf-1": {"id": "wf-1", "name": "wf", "type": "DAG", "displayName": "wf", "templateName": "entrypoint"},
    "wf-2": {
        **{"id": "wf-2", "name": "wf.root.sft-driver", "type": "Pod", "displayName": "sft-driver"},
        **{"templateName": "system-container-driver", "startedAt": "2026-11-21T08:00:01Z"},
    },
    "wf-3": {
        **{"id": "wf-3", "name": "wf.root.sft.executor", "type": "Pod", "displayName": "executor"},
        **{"templateName": "system-container-impl", "startedAt": "2026-11-21T08:00:02Z"},
    },
    "wf-4": {
        **{"id": "wf-4", "name": "wf.root.export.executor(0)", "type": "Pod", "displayName": "executor(0)"},
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
    {"display_name": "evaluate", "state": "RUNNING", "start_time": "2026-11-21T08:00:08Z"},
    {"display_name": "exit-handler-1.onExit", "state": "RUNNING", "start_time": "2026-11-21T08:00:09Z"},
    {"display_name": "sft-x7", "state": "RUNNING", "child_tasks": [{"pod_name": "sft-x7-123"}]},
]


class Backend(ThreadingHTTPServer):
    """What the API server keeps."""

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.recurring: list[dict[str, Any]] = []
        self.missing, self.asked = False, 0
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """The part of API v2beta1 (and v1) that the client needs."""

    server: Backend

    def do_GET(self) -> None:
        url = urlparse(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        match url.path.removeprefix("/apis/").split("/"):
            case ["v2beta1", "healthz"] if self.server.missing:
                self.server.asked += 1
                self.reply({"message": 'services "ml-pipeline" not found'}, 404)
            case ["v2beta1", "healthz"]:
                self.reply({"multi_user": False})
            case ["v2beta1", "experiments"]:
                self.reply({"experiments": [{"experiment_id": "e1", "display_name": "tuneloop"}]})
            case ["v2beta1", "runs"]:
                self.reply({"runs": self.named(self.server.runs, query)[::-1]})
            case ["v2beta1", "runs", run_id]:
                self.reply(next(run for run in self.server.runs if run["run_id"] == run_id))
            case ["v2beta1", "recurringruns"]:
                self.reply({"recurringRuns": self.named(self.server.recurring, query)})
            case ["v1beta1", "runs", run_id]:
                workflow = {"metadata": {"name": "wf"}, "status": {"nodes": NODES}}
                self.reply({"run": {"id": run_id}, "pipeline_runtime": {"workflow_manifest": json.dumps(workflow)}})
            case ["v1alpha1", "runs", _, "nodes", pod, "log"] if pod in LOGS:
                self.reply(LOGS[pod])
            case _:
                self.reply({"error_message": "Failed to read logs: pods not found"}, 500)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "null")
        path = urlparse(self.path).path
        if path == "/apis/v2beta1/runs":
            made = {**body, "run_id": f"r{len(self.server.runs) + 1}", "state": "RUNNING"}
            self.server.runs.append(made | {"run_details": {"task_details": TASKS}})
            self.reply(made)
        elif path == "/apis/v2beta1/recurringruns":
            self.server.recurring.append({**body, "recurring_run_id": f"j{len(self.server.recurring) + 1}"})
            self.reply(self.server.recurring[-1])
        elif match := re.fullmatch(r"/apis/v2beta1/runs/(\w+):terminate", path):
            next(run for run in self.server.runs if run["run_id"] == match[1])["state"] = "CANCELED"
            self.reply({})
        else:
            self.reply({"error_message": f"no {path}"}, 404)

    def do_DELETE(self) -> None:
        name = self.path.rpartition("/")[2]
        self.server.recurring = [each for each in self.server.recurring if each["recurring_run_id"] != name]
        self.reply({})

    def named(self, listed: list[dict[str, Any]], query: dict[str, str]) -> list[dict[str, Any]]:
        (predicate,) = json.loads(query["filter"])["predicates"]
        assert (predicate["operation"], predicate["key"]) == ("EQUALS", "display_name")
        return [each for each in listed if each["display_name"] == predicate["stringValue"]]

    def reply(self, body: Any, code: int = 200) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(code)
        self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    with Backend() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("KF_PIPELINES_ENDPOINT", server.url)
        yield server
        server.shutdown()


def test_a_run_from_submission_to_its_end(backend: Backend, capsys: pytest.CaptureFixture[str]) -> None:
    line = ["submit", "sft", "--to", "kfp", "--run", "demo", "--store", "s3://b/runs", "--pipeline-root", "s3://b/kfp"]
    assert run_cli(line) == 0
    (run,) = backend.runs
    assert run["runtime_config"] == {
        "parameters": {"run": "demo", "store": "s3://b/runs"},
        "pipeline_root": "s3://b/kfp",
    }
    executors = run["pipeline_spec"]["pipeline_spec"]["deploymentSpec"]["executors"]
    assert executors["exec-sft"]["container"]["image"] == "tuneloop/trainer:dev"
    assert "exec-sft" in run["pipeline_spec"]["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]

    assert run_cli(line) == 2
    assert "is under way as r1" in capsys.readouterr().err
    assert run_cli(["status", "demo", "--to=kfp"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^ *sft +SUCCEEDED +5$", shown, re.M)
    assert re.search(r"^ *evaluate-after +RUNNING", shown, re.M), "as the pipeline calls it"
    assert not any(word in shown for word in ("driver", "executor", "onExit", "sft-x7"))
    assert run_cli(["status", "demo", "--to=kfp", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["id"]) == ("demo", "r1")
    assert {"task": "sft", "phase": "SUCCEEDED", "seconds": 5.0, "message": ""} in told["tasks"]
    assert run_cli(["kfp", "logs", "demo"]) == 0
    assert capsys.readouterr().out == "sft | sft: step 1\nsft | sft: step 2\n"  # export's pod is gone
    assert run_cli(["kfp", "stop", "demo"]) == 0
    assert backend.runs[0]["state"] == "CANCELED"
    assert run_cli(line) == 0, "resumes"
    assert client.find_run(client.connect_to_kfp(backend.url), "demo").run_id == "r2"


def test_schedule(backend: Backend) -> None:
    line = ["schedule", "sft", "--to", "kfp", "--name", "nightly", "--store", "s3://b/runs", "--cron", "30 2 * * 1-5"]
    assert run_cli(line) == 0
    (made,) = backend.recurring
    assert made["trigger"] == {"cron_schedule": {"cron": "0 30 2 * * 1-5"}}
    assert (made["max_concurrency"], made["no_catchup"], made["mode"]) == (1, True, "ENABLE")
    assert made["runtime_config"]["parameters"]["run"] == "nightly-[[ScheduledTime]]"
    assert run_cli(["kfp", "unschedule", "nightly"]) == 0
    assert backend.recurring == []


def test_what_is_refused(backend: Backend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="write five fields"):
        client.six_fields("0 0 2 * * *")
    for line, told in (
        (["kfp", "status", "nobody"], "no run of that name"),
        (["kfp", "unschedule", "nobody"], "no recurring run of that name"),
        (["submit", "sft", "--to", "airflow"], "argo or kfp"),
    ):
        assert run_cli(line) == 2
        assert told in capsys.readouterr().err
    monkeypatch.setenv("KF_PIPELINES_ENDPOINT", "http://127.0.0.1:1")
    assert run_cli(["kfp", "status", "demo"]) == 2
    assert "does not answer" in capsys.readouterr().err


def test_a_cluster_without_the_backend_is_asked_once_and_said_in_a_line(
    backend: Backend, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    backend.missing = True
    assert run_cli(["kfp", "status", "demo"]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: kfp: ") and told.count("\n") == 1
    assert 'has no Kubeflow Pipelines (services "ml-pipeline" not found); --endpoint or' in told
    assert backend.asked == 1 and not caplog.records
