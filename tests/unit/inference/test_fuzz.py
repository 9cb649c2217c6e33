"""The rollout server, in a process of its own, against bodies that no client would send; its engine says digits."""

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import given

from tests.unit.fuzzing import Memory, draw_bodies, run_examples
from tests.unit.inference.rollout_server import BODY, serving
from tests.waiting import LIMIT_S

SAMPLING = {"temperature": 1.0, "max_tokens": 4, "stop_token_ids": [1]}
TWO = [*BODY["requests"], {"id": "b", "prompt_ids": [3], "seeds": [1, 2]}]
GOOD: dict[str, list[dict[str, Any]]] = {
    "/generate": [
        {"requests": TWO, "sampling": SAMPLING, "version": 0, "min_version": 0, "stream": True},
        {"requests": TWO, "sampling": SAMPLING, "prompt_logprobs": True},
    ],
    "/load": [{"ref": "nowhere@xxh3-128:00", "version": 1, "force": True}],
    "/engine/update_weights_from_disk": [
        {"model_path": "/nowhere/a/model", "weight_version": "1@xxh3-128:00"}
    ],
    "/engine/flush_cache": [{}],
    "/verify": [{}],
}
NAMED = {200, 400, 409, 413, 503}
"""404 and 405 of routes apart; 503 says why, and that asking again may help."""


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[httpx2.Client, Memory]]:
    with serving() as (child, address):
        with httpx2.Client(base_url=f"http://{address}", timeout=LIMIT_S) as http:
            yield http, (memory := Memory(child.pid))
            assert http.post("/generate", json=dict(BODY)).status_code == 200, "it serves as before"
            memory.check_growth("rollout server")


@pytest.mark.parametrize("path", GOOD)
def test_every_body_has_an_answer_that_is_named(
    served: tuple[httpx2.Client, Memory], path: str
) -> None:
    http, memory = served

    @given(draw_bodies(GOOD[path]))
    def check(body: dict[str, Any]) -> None:
        answer = http.post(
            path, content=json.dumps(body), headers={"Content-Type": "application/json"}
        )
        lines = [json.loads(line) for line in answer.text.splitlines() if line]
        assert answer.status_code in NAMED, (answer.status_code, answer.text)
        assert answer.status_code == 200 or set(lines[0]) == {"error"}, answer.text
        memory.note()

    run_examples(check)
