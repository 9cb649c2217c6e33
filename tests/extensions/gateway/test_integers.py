"""Integers of requests: each has its range, and one beyond is refused at once, and not by the engine later."""

import copy
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel, TypeAdapter

from tests.extensions.gateway.test_fuzz import ID, list_good_bodies, worker
from tuneloop.extensions.gateway import messages, sessions
from tuneloop.extensions.gateway.resident import AdamParams
from tuneloop.inference import http_api, sandbox_server

__all__ = ["worker"]
BEYOND = (10**30, -(10**30), 2**63, 1e300)
MODELS = [
    *messages.Body.__subclasses__(),
    AdamParams,
    sessions.SessionRequest,
    http_api.GenerateBody,
    sandbox_server.Program,
]


def find_integers(schema: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Find the integers of a JSON schema: where each is, and what is said of it."""
    if isinstance(schema, dict):
        if schema.get("type") == "integer":
            yield path, schema
        for name, part in schema.items():
            yield from find_integers(part, f"{path}/{name}")
    elif isinstance(schema, list):
        for number, part in enumerate(schema):
            yield from find_integers(part, f"{path}/{number}")


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_each_integer_of_a_request_has_a_range(model: type[BaseModel]) -> None:
    for path, integer in find_integers(TypeAdapter(model).json_schema()):
        assert {"minimum", "exclusiveMinimum"} & integer.keys(), path
        assert {"maximum", "exclusiveMaximum"} & integer.keys(), path


def replace_integers(body: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a body in which one integer is beyond its range."""

    def walk(value: Any, path: list[Any]) -> Iterator[list[Any]]:
        if isinstance(value, int) and not isinstance(value, bool):
            yield path
        if isinstance(value, dict | list):
            for key, part in value.items() if isinstance(value, dict) else enumerate(value):
                yield from walk(part, [*path, key])

    for path in walk(body, []) if isinstance(body, dict | list) else ():
        for beyond in BEYOND:
            changed = copy.deepcopy(body)
            inside = changed
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = beyond
            yield "/".join(map(str, path)), changed


def test_an_integer_beyond_its_range_is_refused(worker: SimpleNamespace) -> None:
    """``stop: [10**30]`` was accepted, and the result was a server error."""
    opened = {"session_id": ID, "sampling_session_seq_id": 0, "base_model": worker.base}
    assert worker.http.post("/api/v1/create_sampling_session", json=opened).status_code == 200
    tried = set()
    for name, bodies in list_good_bodies(worker.base).items():
        for body in bodies:
            for path, changed in replace_integers(body):
                answer = worker.http.post(f"/api/v1/{name}", content=json.dumps(changed))
                assert answer.status_code == 422, (name, path, answer.status_code, answer.text)
                assert "error" in answer.json()
                tried.add(path.rpartition("/")[0] if path[-1].isdigit() else path)
    assert {"sampling_params/stop", "sampling_params/top_k", "sampling_params/seed"} <= tried


@pytest.mark.parametrize("stop", [[-1], [2**31], [1] * 4097, [10**30, 1], [True, 10**30]])
def test_stop_tokens_that_no_model_has_are_refused(worker: SimpleNamespace, stop: Any) -> None:
    body = list_good_bodies(worker.base)["asample"][0]
    params = body["sampling_params"] | {"stop": stop}
    answer = worker.http.post("/api/v1/asample", json=body | {"sampling_params": params})
    assert answer.status_code == 422, answer.text
