"""Exported models in a registry: the messages of Kubeflow Model Registry's own client."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from tests.compiling import compiled
from tuneloop.core.artifacts import Draft
from tuneloop.core.errors import Retryable, UserError
from tuneloop.formats.rollouts import SAMPLES
from tuneloop.kfp import register
from tuneloop.kfp.register import register_model

HANDLE = {
    "ref": "s3://b/runs/r/export@sha256:0123456789abcdef",
    "digest": "sha256:0123456789abcdef",
}
HANDLE["inputs"] = {"policy": "s3://b/runs/r/iterations/3/policy-update@sha256:fedc"}  # type: ignore[assignment]


REQUIRED = {
    "registered_models": {"name"},
    "versions": {"name", "registeredModelId"},
    "artifacts": {"artifactType", "name", "uri"},
}
"""Last part of a path → the fields that must be there, and in `OPTIONAL` those that may (model-registry 0.3)."""
OPTIONAL = {"description", "externalId", "customProperties"}


class Registry(BaseHTTPRequestHandler):
    """Keeps what is created, as Kubeflow Model Registry does: 404 where a search finds nothing."""

    kept: dict[str, list[dict[str, Any]]]

    def do_GET(self) -> None:
        url = urlparse(self.path)
        query = {k: v[0] for k, v in parse_qs(url.query).items()}
        kind = {
            "registered_model": "registered_models",
            "model_version": "versions",
            "model_artifact": "artifacts",
        }
        found = [
            each
            for each in self.kept[kind[url.path.rpartition("/")[2]]]
            if each["name"] == query["name"]
        ]
        self.reply(found[0] if found else {"code": "404"}, 200 if found else 404)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = self.path.rpartition("/")[2]
        good = REQUIRED[kind] <= set(body) <= REQUIRED[kind] | OPTIONAL and bool(body["name"])
        for value in body.get("customProperties", {}).values():
            good = good and value == {
                "string_value": value["string_value"],
                "metadataType": "MetadataStringValue",
            }
        if good:
            body["id"] = str(len(self.kept[kind]) + 1)
            self.kept[kind].append({**body, "path": self.path})
        self.reply(body, 201 if good else 422)

    def reply(self, body: Any, status: int) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def registry() -> Iterator[str]:
    Registry.kept = {kind: [] for kind in REQUIRED}
    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_model_is_registered_once(registry: str) -> None:
    for _ in range(2):
        assert register_model(registry, "sft", HANDLE) == "sft-0123456789ab"
    (artifact,) = Registry.kept["artifacts"]
    assert artifact["path"] == "/api/model_registry/v1/model_versions/1/artifacts"
    assert artifact["uri"] == "s3://b/runs/r/export"
    made_of = artifact["customProperties"]["made_of.policy"]["string_value"]
    assert made_of == HANDLE["inputs"]["policy"]  # type: ignore[index]
    assert {k: len(v) for k, v in Registry.kept.items()} == {
        "registered_models": 1,
        "versions": 1,
        "artifacts": 1,
    }
    register_model(registry, "sft", {**HANDLE, "digest": "sha256:ffff"})
    assert {k: len(v) for k, v in Registry.kept.items()} == {
        "registered_models": 1,
        "versions": 2,
        "artifacts": 2,
    }


def test_a_registry_that_is_away_is_asked_again() -> None:
    with pytest.raises(Retryable, match=r"kfp\.model_registry"):
        register_model("http://127.0.0.1:1", "sft", HANDLE)


def test_a_refusal_names_the_setting(registry: str) -> None:
    with pytest.raises(UserError, match=r"kfp\.model_registry"):
        register_model(registry, "", HANDLE)


def commit_evaluation(url: str, scores: list[float]) -> dict[str, str]:
    """Commit what `evaluate` would, and return its handle."""
    draft = Draft(url)
    rows = [{"id": str(number), "score": score} for number, score in enumerate(scores)]
    pq.write_table(pa.Table.from_pylist(rows, schema=SAMPLES), draft.path / "samples.parquet")
    return {"ref": f"{url}@{draft.commit(stage='evaluate', inputs={}, params={}).digest}"}


@pytest.mark.parametrize("is_better", [False, True])
def test_a_gate_lets_only_a_better_model_pass(
    registry: str, tmp_path: Path, is_better: bool
) -> None:
    luck = [float(number % 3 == 0) for number in range(30)]
    before = commit_evaluation(f"file://{tmp_path}/before", luck)
    # By noise one prompt more is right.
    after_scores = [1.0] * 30 if is_better else [1.0, 1.0, *luck[2:]]
    after = commit_evaluation(f"file://{tmp_path}/after", after_scores)
    handles = {"model": HANDLE, "before": before, "after": after}
    output = tmp_path / "executor_output.json"
    message = {
        "inputs": {
            "parameterValues": {"registry": registry, "model_name": "sft"},
            "artifacts": {
                name: {"artifacts": [{"metadata": handle}]} for name, handle in handles.items()
            },
        },
        "outputs": {"parameters": {"model_version": {}}, "outputFile": str(output)},
    }
    assert register.main(["--executor-input", json.dumps(message)]) == 0
    version = json.loads(output.read_text())["parameterValues"]["model_version"]
    assert len(Registry.kept["versions"]) == is_better
    noise = "nothing was registered: mean reward +0.033 on 30"
    assert version.startswith("sft-0123456789ab" if is_better else noise)


def test_a_gate_takes_the_evaluations_before_and_after(tmp_path: Path) -> None:
    for pipeline in ("sft", "grpo"):
        sets = ["kfp.model_registry=http://registry:8080", "kfp.gate=true"]
        path = compiled(pipeline, sets, tmp_path / "gated.yaml")
        spec = next(yaml.load_all(path.read_text(), yaml.CSafeLoader))
        tasks = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
        inputs = tasks["register"]["inputs"]["artifacts"]
        names = {
            name: tasks[source["taskOutputArtifact"]["producerTask"]]["taskInfo"]["name"]
            for name, source in inputs.items()
        }
        assert names == {"model": "export", "before": "evaluate-before", "after": "evaluate-after"}
    with pytest.raises(UserError, match=r"kfp\.gate: True: is a condition of kfp.model_registry"):
        compiled("sft", ["kfp.gate=true"], tmp_path / "refused.yaml")


def test_the_registration_follows_the_export(tmp_path: Path) -> None:
    path = compiled("sft", ["kfp.model_registry=http://registry:8080"], tmp_path / "sft.yaml")
    spec = next(yaml.load_all(path.read_text(), yaml.CSafeLoader))
    tasks = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert tasks["register"]["dependentTasks"] == ["export"]
    assert (
        tasks["register"]["inputs"]["parameters"]["model_name"]["runtimeValue"]["constant"] == "sft"
    )
    assert not re.search("register", compiled("sft", [], tmp_path / "plain.yaml").read_text())
