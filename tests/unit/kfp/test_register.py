"""Exported models in a registry: the messages of Kubeflow Model Registry's own client."""

import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import pytest
import yaml

from tests.compiling import compiled
from tuneloop.core.errors import Retryable, UserError
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


def test_the_registration_follows_the_export(tmp_path: Path) -> None:
    path = compiled("sft", ["kfp.model_registry=http://registry:8080"], tmp_path / "sft.yaml")
    spec = next(yaml.load_all(path.read_text(), yaml.CSafeLoader))
    tasks = spec["components"]["comp-exit-handler-1"]["dag"]["tasks"]
    assert tasks["register"]["dependentTasks"] == ["export"]
    assert (
        tasks["register"]["inputs"]["parameters"]["model_name"]["runtimeValue"]["constant"] == "sft"
    )
    assert not re.search("register", compiled("sft", [], tmp_path / "plain.yaml").read_text())
