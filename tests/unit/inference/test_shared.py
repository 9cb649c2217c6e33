"""A server whose callers load weights by turns: what one has loaded stays until it has generated."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from tests.unit.inference.rollout_server import BODY, Digits
from tests.waiting import LIMIT_S, until
from tuneloop.inference import http_api
from tuneloop.inference.engine_loop import EngineLoop
from tuneloop.inference.engines._tensors import Readback
from tuneloop.inference.http_api import HttpApi


class Changing(Digits):
    def change(self, model: Path, version: int, digest: str) -> None:
        self.version, self.digest = version, digest

    def compare_files(self, model: Path, every: int = 1) -> Readback:
        return Readback(1, 1, [], [])


def fetch(ref: str) -> Any:
    """An artifact of version 1, whose digest is its name."""
    manifest = SimpleNamespace(facts={"version": 1}, digest=ref)
    return SimpleNamespace(url=ref, part=Path, manifest=manifest)


def test_weights_stay_until_they_were_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_api, "_fetch", fetch)
    monkeypatch.setattr(http_api, "digest_model", str)
    (loop := EngineLoop(Changing({}))).start()
    api = HttpApi(loop)
    with TestClient(api.app()) as http:

        def load(digest: str) -> None:
            answer = http.post("/load", json={"ref": digest, "version": 1, "keep_s": 60})
            assert answer.json()["digest"] == digest

        def generate(digest: str, **more: bool) -> int:
            return http.post(
                "/generate", json={**BODY, "version": 1, "digest": digest, **more}
            ).status_code

        load("a")
        (other := threading.Thread(target=load, args="b")).start()
        until(lambda: api.loading.locked() or not other.is_alive())
        assert generate("a", prompt_logprobs=True) == 200, "a proof is no use"
        assert generate("b") == 409 and generate("a") == 200
        other.join(LIMIT_S)
        assert generate("a") == 409 and generate("b") == 200
    loop.stop()
