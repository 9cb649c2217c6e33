"""An HTTP server that keeps runs as API v2beta1 of KFP 2.17 shapes them: no run of it computes anything.

Answers have the shape of what a KFP 2.17.0 API server answered; a run that is sent must be a message of kfp's own
client.
"""

import base64
import gzip
import json
import operator
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse


class Api(ThreadingHTTPServer):
    """What the API server keeps.

    Attributes:
        runs: by creation; each as a message of the API.
        task_details: of each run.
        nodes: of each run's workflow.
        compressed: whether Argo has compressed these.
        logs: pod → text.
        missing: whether the address has no Kubeflow Pipelines.
        asked: how often somebody asked an address that has none.
        status: of all answers about runs; 200: they are answered.
        page_size: the most runs in an answer.
    """

    def __init__(self) -> None:
        self.runs: list[dict[str, Any]] = []
        self.recurring: list[dict[str, Any]] = []
        self.pipelines: list[dict[str, Any]] = []
        self.versions: list[dict[str, Any]] = []
        self.task_details: list[dict[str, Any]] = []
        self.nodes: dict[str, dict[str, Any]] = {}
        self.logs: dict[str, str] = {}
        self.missing, self.compressed, self.asked, self.page_size = False, False, 0, 100
        self.status = 200
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    """The part of API v2beta1 (and v1) that the client needs."""

    server: Api

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
            case ["v2beta1", "runs", *_] if self.server.status != 200:
                self.reply({"message": "the database is away"}, self.server.status)
            case ["v2beta1", "runs"]:
                assert query["sort_by"] == "created_at desc"
                found = sorted(
                    self.named(self.server.runs, query),
                    key=lambda run: run["created_at"],
                    reverse=True,
                )
                at, size = (
                    int(query.get("page_token", 0)),
                    min(int(query["page_size"]), self.server.page_size),
                )
                more = {"next_page_token": str(at + size)} if len(found) > at + size else {}
                self.reply({"runs": found[at : at + size], **more})
            case ["v2beta1", "runs", run_id]:
                self.reply(next(run for run in self.server.runs if run["run_id"] == run_id))
            case ["v2beta1", "recurringruns"]:
                self.reply({"recurringRuns": self.named(self.server.recurring, query)})
            case ["v1beta1", "runs", run_id]:
                status: dict[str, Any] = {"nodes": self.server.nodes}
                if self.server.compressed:
                    packed = gzip.compress(json.dumps(self.server.nodes).encode())
                    status = {"nodes": None, "compressedNodes": base64.b64encode(packed).decode()}
                workflow = {"metadata": {"name": "wf"}, "status": status}
                self.reply(
                    {
                        "run": {"id": run_id},
                        "pipeline_runtime": {"workflow_manifest": json.dumps(workflow)},
                    }
                )
            case ["v1alpha1", "runs", _, "nodes", pod, "log"] if pod in self.server.logs:
                self.reply(self.server.logs[pod])
            case ["v2beta1", "pipelines"]:
                self.reply({"pipelines": self.named(self.server.pipelines, query)})
            case ["v2beta1", "pipelines", pipeline, "versions"]:
                mine = [each for each in self.server.versions if each["pipeline_id"] == pipeline]
                self.reply({"pipeline_versions": self.named(mine, query)})
            case _:
                self.reply({"error_message": "Failed to read logs: pods not found"}, 500)

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers["Content-Length"] or 0))
        url = urlparse(self.path)
        path, query = url.path, {k: v[0] for k, v in parse_qs(url.query).items()}
        if path == "/apis/v2beta1/pipelines/upload":
            self.server.pipelines.append(
                {"pipeline_id": f"p{len(self.server.pipelines) + 1}", "display_name": query["name"]}
            )
            self.reply(self.server.pipelines[-1])
            return
        if path == "/apis/v2beta1/pipelines/upload_version":
            number = f"v{len(self.server.versions) + 1}"
            made = {
                "pipeline_version_id": number,
                "pipeline_id": query["pipelineid"],
                "display_name": query["name"],
            }
            self.server.versions.append(made)
            self.reply(made)
            return
        body = json.loads(data or "null")
        if path == "/apis/v2beta1/runs":
            check_message(body, "V2beta1Run")
            made = {**body, "run_id": f"r{len(self.server.runs) + 1}", "state": "RUNNING"}
            made["created_at"] = f"2026-11-22T08:{len(self.server.runs):02}:00Z"
            self.server.runs.append(
                made | {"run_details": {"task_details": self.server.task_details}}
            )
            self.reply(made)
        elif path == "/apis/v2beta1/recurringruns":
            self.server.recurring.append(
                {**body, "recurring_run_id": f"j{len(self.server.recurring) + 1}"}
            )
            self.reply(self.server.recurring[-1])
        elif match := re.fullmatch(r"/apis/v2beta1/runs/(\w+):terminate", path):
            next(run for run in self.server.runs if run["run_id"] == match[1])["state"] = (
                "CANCELING"
            )
            self.reply({})
        else:
            self.reply({"error_message": f"no {path}"}, 404)

    def do_DELETE(self) -> None:
        name = self.path.rpartition("/")[2]
        self.server.recurring = [
            each for each in self.server.recurring if each["recurring_run_id"] != name
        ]
        self.reply({})

    def named(self, listed: list[dict[str, Any]], query: dict[str, str]) -> list[dict[str, Any]]:
        (predicate,) = json.loads(query["filter"])["predicates"]
        assert predicate["key"] == "display_name"
        match: Any = {"EQUALS": operator.eq, 1: operator.eq, "IS_SUBSTRING": operator.contains}[
            predicate["operation"]
        ]
        return [each for each in listed if match(each["display_name"], predicate["stringValue"])]

    def reply(self, body: Any, code: int = 200) -> None:
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        self.send_response(code)
        self.send_header(
            "Content-Type", "text/plain" if isinstance(body, str) else "application/json"
        )
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serve_api() -> Iterator[Api]:
    """Serve the API for as long as the block lasts."""
    with Api() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def check_message(body: Mapping[str, Any], kind: str) -> None:
    """Refuse fields that a message of kfp's own client does not have, or of another type."""
    from kfp_server_api import ApiClient, models

    known = getattr(models, kind).attribute_map.values()
    assert set(body) <= set(known), set(body) - set(known)
    ApiClient()._ApiClient__deserialize(body, kind)
