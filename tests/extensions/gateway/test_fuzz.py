"""A session's worker, and the gateway's own requests, against bodies that no client would send."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from tests.extensions.gateway.test_drain import ask, fetch, serve
from tests.making import checkpoint_artifact
from tests.unit.fuzzing import Memory, draw_bodies, run_examples
from tests.waiting import LIMIT_S
from tuneloop.extensions.gateway.access import TokenFile
from tuneloop.extensions.gateway.app import Gateway, build_app
from tuneloop.extensions.gateway.messages import CreateModel
from tuneloop.extensions.gateway.processes import Processes
from tuneloop.extensions.gateway.session import Session
from tuneloop.extensions.gateway.sessions import Quota, SessionRequest, Settings
from tuneloop.extensions.gateway.worker import HEADER, Worker
from tuneloop.training.fsdp.ranks import Ranks

ID = "local.session-0123456789"
MODEL = f"{ID}:train:0"
NAMED = {200, 404, 408, 409, 410, 422, 503}


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    home = tmp_path_factory.mktemp("worker")
    base = checkpoint_artifact(home / "base")
    made = Worker(session := Session(ID, f"{home}/session-0123456789", lambda: Ranks("cpu")), "key")
    made.thread.start()
    session.ledger.future(session.create_model(CreateModel(base_model=base.ref))).result(LIMIT_S)
    with TestClient(made.app(), headers={HEADER: "key"}, raise_server_exceptions=False) as http:
        yield SimpleNamespace(http=http, session=session, base=base.ref)
        assert made.thread.is_alive(), "it computes as before"
    made.stopping.set()
    made.thread.join(LIMIT_S)


def list_good_bodies(base: str, session: str = ID) -> dict[str, list[dict[str, Any]]]:
    model = f"{session}:train:0"
    numbers = {"model_id": model, "seq_id": 10**6}
    tensors = {
        "target_tokens": {"data": [6, 7], "dtype": "int64"},
        "weights": {"data": [0.0, 1.0], "dtype": "float32"},
    }
    datum = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 6]}]},
        "loss_fn_inputs": tensors,
    }
    given = {"data": [datum], "loss_fn": "cross_entropy", "loss_fn_config": {"a": 1.0}}
    adam = {
        "learning_rate": 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
        "weight_decay": 0.1,
        "grad_clip_norm": 1.0,
    }
    lora = {"rank": 2, "seed": 1, "train_unembed": False}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [5]}]}
    params = {
        "max_tokens": 2,
        "seed": 1,
        "stop": [1],
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
    }
    asked = {"sampling_session_id": f"{session}:sample:0", "seq_id": 1, "num_samples": 2}
    return {
        "create_model": [
            {"session_id": session, "model_seq_id": 1, "base_model": base, "lora_config": lora}
        ],
        "load_weights": [{**numbers, "path": "tinker://a/weights/b", "optimizer": True}],
        "forward_backward": [
            {"model_id": model, "forward_backward_input": given, "forward_only": False}
        ],
        "optim_step": [{"model_id": model, "adam_params": adam}, {**numbers, "adam_params": adam}],
        "save_weights_for_sampler": [
            {"model_id": model, "path": None, "sampling_session_seq_id": 3, "ttl_seconds": 9}
        ],
        "asample": [
            {**asked, "prompt": prompt, "sampling_params": params, "prompt_logprobs": True}
        ],
        "create_sampling_session": [
            {"session_id": session, "sampling_session_seq_id": 1, "base_model": base}
        ],
        "retrieve_future": [{"request_id": f"{model}:0"}],
        "get_info": [{"model_id": model}],
        "session_heartbeat": [{"session_id": session}],
    }


@pytest.mark.parametrize("name", list_good_bodies(""))
def test_a_worker_answers_every_body(worker: SimpleNamespace, name: str) -> None:
    """What it takes is computed, and what then goes wrong is the caller's mistake, said in one line."""
    if name == "asample":
        opened = {"session_id": ID, "sampling_session_seq_id": 0, "base_model": worker.base}
        assert worker.http.post("/api/v1/create_sampling_session", json=opened).status_code == 200

    @given(draw_bodies(list_good_bodies(worker.base)[name]))
    def check(body: dict[str, Any]) -> None:
        answer = worker.http.post(f"/api/v1/{name}", content=json.dumps(body))
        assert answer.status_code in NAMED, (answer.status_code, answer.text)
        assert answer.status_code == 200 or "error" in answer.json()
        if (
            answer.status_code != 200
            or not (request := answer.json().get("request_id"))
            or name == "retrieve_future"
        ):
            return
        stream = worker.session.ledger._streams[request.rpartition(":")[0]]
        if stream.following is not None and int(request.rpartition(":")[2]) >= stream.following:
            return  # it waits for those before it
        result = worker.http.post("/api/v1/retrieve_future", json={"request_id": request}).json()
        assert result.get("category") != "server", result

    run_examples(check)


def test_the_gateway_answers_every_session_that_is_asked_for(tmp_path: Path) -> None:
    config = tmp_path / "gateway.yaml"
    config.write_text("default: {sessions: 0}")
    made = Gateway(
        Processes(tmp_path / "logs", Settings(default=Quota(sessions=0))),
        TokenFile(tmp_path / "token"),
        "s",
        config,
    )
    headers = {
        "Authorization": f"Bearer {(tmp_path / 'token').read_text().strip()}",
        "Idempotency-Key": "a",
    }
    wanted = SessionRequest(
        namespace="local", accelerators=1, display_name="x", lease_group="a"
    ).model_dump()
    tinker = {
        "project_id": "local",
        "display_name": "x",
        "user_metadata": {"accelerators": "1", "patience": "3"},
    }
    with TestClient(build_app(made), headers=headers, raise_server_exceptions=False) as http:

        @given(draw_bodies([wanted]), draw_bodies([tinker]))
        def check(body: dict[str, Any], other: dict[str, Any]) -> None:
            for path, sent in (("/v1/sessions", body), ("/api/v1/create_session", other)):
                answer = http.post(path, content=json.dumps(sent))
                assert answer.status_code in {403, 422, 429}, (answer.status_code, answer.text)
                assert set(answer.json()) == {"error"}

        run_examples(check)


def test_a_gateway_and_a_session_do_not_grow(tmp_path: Path) -> None:
    """Both as processes of their own, which are asked for all things by turns, in the order of drawing."""
    with serve(tmp_path) as gateway:
        session = gateway.http.post(
            "/v1/sessions", json={}, headers={"Idempotency-Key": "a"}
        ).json()["id"]
        base = checkpoint_artifact(tmp_path / "base").ref
        made = ask(gateway, "create_model", session_id=session, base_model=base)
        assert "error" not in fetch(gateway, made).json()
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base}
        assert gateway.http.post("/api/v1/create_sampling_session", json=opened).status_code == 200
        (pid,) = subprocess.run(
            ["pgrep", "-of", f"worker --session {session}"], capture_output=True
        ).stdout.split()
        memories = {"gateway": Memory(gateway.process.pid), "session": Memory(int(pid))}
        good = list_good_bodies(base, session)
        bodies = st.sampled_from(list(good)).flatmap(
            lambda name: st.tuples(st.just(name), draw_bodies(good[name]))
        )

        @given(bodies)
        def check(drawn: tuple[str, dict[str, Any]]) -> None:
            name, body = drawn
            answer = gateway.http.post(f"/api/v1/{name}", content=json.dumps(body))
            assert answer.status_code in {*NAMED, 429}, (name, answer.status_code, answer.text)
            for memory in memories.values():
                memory.note()

        run_examples(check, least=3 * Memory.WARM)
        beat = gateway.http.post("/api/v1/session_heartbeat", json={"session_id": session})
        assert beat.status_code == 200 and gateway.process.poll() is None, "they serve as before"
        for name, memory in memories.items():
            memory.check_growth(name)
