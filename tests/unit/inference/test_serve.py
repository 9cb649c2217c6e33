"""The server as a process: how it ends."""

import http.client
import json
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.waiting import LIMIT_S, until
from tuneloop.core.artifacts import Artifact, Draft
from tuneloop.core.errors import UserError
from tuneloop.inference import http_api
from tuneloop.inference.engine_loop import EngineLoop
from tuneloop.inference.engines.vllm import Vllm
from tuneloop.inference.server import _open_policy, _parse

SERVE = """
from tuneloop.inference import server
code = server.main(["--host", "127.0.0.1", "--port", "0"])
"""
GATEWAY = """
import socket
from tuneloop.inference.server import UVICORN, serve_until_signalled
async def app(scope, receive, send): ...
listener = socket.create_server(("127.0.0.1", 0))
serve_until_signalled(uvicorn.Server(uvicorn.Config(app, **UVICORN)), listener)
code = 0
"""
EARLY = """
import os, signal, sys, uvicorn
run = uvicorn.Server.run
def told_before(self, **about):
    signal.raise_signal(signal.SIGTERM)
    run(self, **about)
uvicorn.Server.run = told_before
"""


@pytest.mark.parametrize("program", [SERVE, GATEWAY], ids=["serve", "gateway"])
def test_a_server_that_is_told_to_end_right_before_it_serves_ends(program: str) -> None:
    """Else nobody hears the signal, and the pod's grace period has to run out."""
    done = subprocess.run(
        [sys.executable, "-c", f"{EARLY}{program}os._exit(code)"], timeout=LIMIT_S
    )
    assert done.returncode == 0


STREAMING = """
import socket, threading, uvicorn
from tuneloop.inference.server import serve_until_signalled
async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"begun", "more_body": True})
    await receive()
    await receive()
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
drain = lambda: (print("drains", flush=True), threading.Event().wait())
serve_until_signalled(uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="warning")), listener, drain)
"""


@pytest.mark.parametrize("before", [[], [signal.SIGTERM]], ids=["at once", "while it drains"])
def test_sigint_ends_a_server_that_still_streams(before: list[signal.Signals]) -> None:
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", STREAMING], text=True, **pipes) as child:
        assert child.stdout and child.stderr
        try:
            connection = http.client.HTTPConnection(
                "127.0.0.1", int(child.stdout.readline()), timeout=LIMIT_S
            )
            connection.request("GET", "/")
            answer = connection.getresponse()
            assert answer.read(5) == b"begun"
            for number in before:
                child.send_signal(number)
                assert child.stdout.readline() == "drains\n"
            child.send_signal(signal.SIGINT)
            assert child.wait(LIMIT_S) == 0
            assert child.stderr.read() == "", "what was cut off is no fault"
        finally:
            child.kill()


FAILING = """
import os
from tuneloop.inference import server
from tuneloop.inference.engines.vllm import Vllm
def begin(self, args):
    self.deterministic, self.determinism = False, {}
    self.args, self.context, self.version, self.digest = {}, 64, 0, "sha256:00"
def step(self):
    raise RuntimeError("an illegal memory access was encountered")
Vllm.__init__, Vllm.step, Vllm.submit = begin, step, lambda *_, **how: None
os._exit(server.main(["--host", "127.0.0.1", "--port", "0"]))
"""


def test_a_server_whose_engine_has_failed_ends() -> None:
    """It could serve nothing any more, and only who started it can start another one."""
    with subprocess.Popen(
        [sys.executable, "-c", FAILING], stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stderr
        address = next(
            found[1]
            for line in child.stderr
            if (found := re.search(r"version 0 at http://(\S+)", line))
        )
        connection = http.client.HTTPConnection(address, timeout=LIMIT_S)
        body = {"requests": [{"id": "a", "prompt_ids": [1], "seeds": [0]}]}
        until(lambda: reaches(connection), child=child)
        connection.request("POST", "/generate", json.dumps(body))
        assert "an illegal memory access" in json.loads(connection.getresponse().read())["error"]
        assert child.wait(LIMIT_S) == 75
        assert (
            "the engine failed (RuntimeError: an illegal memory access"
            in child.stderr.read().splitlines()[-1]
        )


LATE = """
import os, threading, uvicorn
from tuneloop.formats.rollouts import Completion
from tuneloop.inference import server
from tuneloop.inference.engines.vllm import Vllm
ended, said, run = threading.Event(), threading.Event(), uvicorn.Server.run
def begin(self, args):
    self.deterministic, self.determinism, self.engine = False, {}, None
    self.args, self.context, self.version, self.digest = {}, 64, 0, "sha256:00"
def step(self):
    print("steps", flush=True)
    ended.wait()
    try:
        yield "0-0-0", Completion([1], [-0.5], "stop", 0, 0)
    finally:
        said.set()
def run_and_let_the_step_end(self, **about):
    run(self, **about)
    ended.set()
    said.wait()
Vllm.__init__, Vllm.step, Vllm.submit = begin, step, lambda *_, **how: None
uvicorn.Server.run, server.GRACE_S = run_and_let_the_step_end, 1
os._exit(server.main(["--host", "127.0.0.1", "--port", "0"]))
"""


def test_what_an_engine_finishes_after_its_server_has_ended_is_no_failure() -> None:
    """A step takes long on a busy machine, and may outlive the grace period; the server ended all the same."""
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", LATE], text=True, **pipes) as child:
        assert child.stdout and child.stderr
        try:
            address = next(
                found[1] for line in child.stderr if (found := re.search(r"at http://(\S+)", line))
            )
            connection = http.client.HTTPConnection(address, timeout=LIMIT_S)
            until(lambda: reaches(connection), child=child)
            body = {"requests": [{"id": "a", "prompt_ids": [1], "seeds": [0]}]}
            connection.request("POST", "/generate", json.dumps(body))
            assert child.stdout.readline() == "steps\n"
            child.send_signal(signal.SIGTERM)
            assert child.wait(LIMIT_S) == 0, child.stderr.read()
        finally:
            child.kill()


def test_a_request_waits_for_an_engine_that_sleeps_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """tests/local has the same with vLLM, which is woken."""
    monkeypatch.setattr(http_api, "WAIT_S", 0.2)
    loop = EngineLoop(Vllm({}))
    loop.asleep = loop.waking = True
    loop.start()
    with TestClient(http_api.HttpApi(loop).app()) as client:
        for _ in range(2):
            answer = client.post(
                "/generate", json={"requests": [{"id": "a", "prompt_ids": [1], "seeds": [0]}]}
            )
            assert answer.status_code == 503
            assert answer.json()["error"] == "waited 0.2 s; the engine sleeps; POST /wake_up"
        until(lambda: len(loop._held) == 2)
        loop.call(loop._release).result(LIMIT_S)
        assert len(loop._held) == 2 and loop.is_alive(), "it sleeps on"
        loop.asleep = loop.waking = False
        loop.call(loop.resume).result(LIMIT_S)
        assert not loop._held and loop.is_alive(), "what nobody waits for is dropped"
    loop.stop()
    loop.join(LIMIT_S)


def test_a_server_without_an_engine_counts_no_requests() -> None:
    """An autoscaler reads this of a server that was just started; tests/local has real counts."""
    with TestClient(http_api.HttpApi(EngineLoop(Vllm({}))).app()) as client:
        assert (
            client.get("/metrics").text
            == "vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"
        )


def reaches(connection: http.client.HTTPConnection) -> bool:
    try:
        connection.connect()
    except ConnectionRefusedError:
        return False
    return True


def test_a_server_that_is_not_told_where_listens_for_this_machine_alone() -> None:
    assert _parse([]).host == "127.0.0.1"


def test_where_an_old_checkpoint_was_deleted_a_server_boots_with_the_one_that_it_came_of(
    tmp_path: Path,
) -> None:
    """As that of a workflow which a resumed run only walks through: it samples nothing before it loads another."""
    refs: list[str] = []
    for number in range(3):
        draft = Draft(f"{tmp_path}/{number}")
        (draft.path / "model").mkdir()
        (draft.path / "model/config.json").write_text(str(number))
        (draft.path / "model/more.json").write_text(str(number))
        draft.commit(stage="policy_update", inputs={"policy": refs[-1]} if refs else {})
        refs.append(Artifact(f"{tmp_path}/{number}").ref)
    assert _open_policy(refs[2]).ref == refs[2]
    shutil.rmtree(Artifact(refs[2]).part("model"))
    (Artifact(refs[1]).part("model") / "more.json").unlink()  # its deletion was killed half-way
    assert _open_policy(refs[2]).ref == refs[0]
    shutil.rmtree(Artifact(refs[0]).part("model"))
    with pytest.raises(UserError, match="is missing"):
        _open_policy(refs[2]).part("model")
