"""A worker's thread, and turns on the device between sessions."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.making import checkpoint_artifact
from tests.waiting import LIMIT_S, until
from tuneloop.core import fencing
from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import UserError
from tuneloop.extensions.gateway import wire
from tuneloop.extensions.gateway import worker as module
from tuneloop.extensions.gateway.messages import CreateModel, OptimStep, SaveWeights
from tuneloop.extensions.gateway.session import Session
from tuneloop.extensions.gateway.worker import Worker
from tuneloop.sharing.lease_storage import open_lease_group
from tuneloop.training.fsdp.ranks import Ranks

MODEL = "local.session-0123456789:train:0"


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(MODEL.partition(":")[0], f"{tmp_path}/session-0123456789", lambda: Ranks("cpu"))


def test_a_worker_computes_in_its_turn_and_sleeps_between(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER_S", 0.05)
    base = checkpoint_artifact(tmp_path / "base")
    place, other = str(tmp_path / "group"), open_lease_group(str(tmp_path / "group"), who="another")
    monkeypatch.setenv(fencing.VARIABLE, str(tmp_path / "lease.json"))
    worker = Worker(session, "key", open_lease_group(place, who=session.id))
    worker.thread.start()
    try:
        with other.acquire() as held:
            request = session.create_model(CreateModel(base_model=base.ref))
            until(lambda: [request.who for request in other.read().waiting] == [session.id])
            assert (
                held.number == 1
                and not session.ledger.future(request).done()
                and not session.models
            )
        session.ledger.future(request).result(LIMIT_S)
        until(lambda: (other.read().holder, other.read().number) == (None, 2))
        assert session._asleep == [session.models[MODEL]]
        request = session.save_weights(SaveWeights(model_id=MODEL, path="x"))
        saved = Artifact(session._url(session.ledger.future(request).result(LIMIT_S)["path"]))
        assert saved.manifest.provenance["lease"]["number"] == 3
    finally:
        worker.stopping.set()
        worker.thread.join()


def test_a_worker_that_lost_its_turn_ends(tmp_path: Path) -> None:
    """It was frozen in the midst of it, for longer than the turn is safe."""
    program = f"""
import time
from tuneloop.extensions.gateway import worker
from tuneloop.extensions.gateway.session import Session
from tuneloop.sharing.lease_storage import open_lease_group
turns = open_lease_group({f"{tmp_path}/group"!r}, who="a", patience=5)
with worker.Worker(Session("a.session-1", "nowhere", dict), "key", turns)._hold_lease():
    print("has it", flush=True)
    time.sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "has it\n"
    process.send_signal(signal.SIGSTOP)
    with open_lease_group(f"{tmp_path}/group", who="b", patience=5).acquire(LIMIT_S) as held:
        process.send_signal(signal.SIGCONT)
        said = process.communicate(timeout=LIMIT_S)[1]
        assert process.returncode == 75 and "unavailable: lease 1 of group group was lost" in said
        held.check()


def test_a_worker_whose_gateway_was_killed_before_it_began_ends(tmp_path: Path) -> None:
    """Whoever asks late for its parent finds another one, and would stay for its idle hour."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    words = [
        "--session",
        "a.session-1",
        "--artifacts",
        str(tmp_path),
        "--port",
        "0",
        "--parent",
        str(gone.pid),
    ]
    command = [sys.executable, "-m", "tuneloop.extensions.gateway.worker", *words]
    done = subprocess.run(command, env={**os.environ, module.KEY: "key"}, timeout=LIMIT_S)
    assert done.returncode == 0


def test_a_busy_worker_lets_others_have_their_turn(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SHARE_S", 0.0)
    base, place = checkpoint_artifact(tmp_path / "base"), str(tmp_path / "group")
    session.create_model(CreateModel(base_model=base.ref))
    requests = [session.optim_step(OptimStep(model_id=MODEL)) for _ in range(5)]
    other = open_lease_group(place, who="another")
    worker = Worker(session, "key", open_lease_group(place, who=session.id))
    found: list[bool] = []

    def ask() -> None:
        with other.acquire():
            found.extend(session.ledger.future(request).done() for request in requests)

    asking = threading.Thread(target=ask)
    with open_lease_group(place, who="first").acquire():
        worker.thread.start()
        until(lambda: len(other.read().waiting) == 1)
        asking.start()
        until(lambda: len(other.read().waiting) == 2)
    asking.join(LIMIT_S)
    assert found == [False] * 5  # one request, the model's creation, then it was the other's turn
    with pytest.raises(UserError, match="no gradient"):
        session.ledger.future(requests[-1]).result(LIMIT_S)
    worker.stopping.set()
    worker.thread.join()


def test_a_worker_that_can_not_wake_up_ends(session: Session, tmp_path: Path) -> None:
    base = checkpoint_artifact(tmp_path / "base")
    worker = Worker(session, "key", open_lease_group(str(tmp_path / "group"), who=session.id))
    session.create_model(CreateModel(base_model=base.ref))
    session.do(session.ledger.take(0))
    session.sleep()
    del session.models[MODEL].trainer
    request = session.optim_step(OptimStep(model_id=MODEL))
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        assert (
            module._serve(
                worker, module._parse(["--session", "s", "--artifacts", "a", "--port", "0"])
            )
            == 1
        )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    with pytest.raises(AttributeError):
        session.ledger.future(request).result(0)
    assert not worker.thread.is_alive()


def test_a_refused_request_takes_its_number(session: Session, tmp_path: Path) -> None:
    base = checkpoint_artifact(tmp_path / "base")
    session.create_model(CreateModel(base_model=base.ref))
    proto = {"content-type": wire.PROTOBUF}
    about = wire._load_messages()["ForwardBackwardRequest"](model_id=MODEL, seq_id=4)
    about.data.add().model_input.add()  # neither text nor anything else
    worker = Worker(session, "key")
    worker.thread.start()
    with TestClient(worker.app(), headers={module.HEADER: "key"}) as http:

        def ask(what: str, **given: Any) -> str:
            return str(http.post(f"/api/v1/{what}", **given).json()["request_id"])

        def result(request: str) -> dict[str, Any]:
            return dict(http.post("/api/v1/retrieve_future", json={"request_id": request}).json())

        refused = [
            ask("save_weights", json={"model_id": MODEL, "seq_id": 1, "path": "a/b"}),
            ask("optim_step", json={"model_id": MODEL, "seq_id": 2, "adam_params": {"beta1": 2}}),
            ask("forward_backward", json={"model_id": MODEL, "seq_id": 3}),
            ask("forward_backward", content=about.SerializeToString(), headers=proto),
        ]
        assert refused == [f"{MODEL}:{number}" for number in (1, 2, 3, 4)]
        assert (
            ask("save_weights", json={"model_id": MODEL, "seq_id": 1, "path": "a/b"}) == refused[0]
        )  # sent again
        assert result(ask("save_weights", json={"model_id": MODEL, "seq_id": 5, "path": "x"}))[
            "path"
        ].endswith("/x")
        for request, field in zip(
            refused, ("path: 'a/b'", "adam_params.beta1: 2", "forward_backward_input", "model_i")
        ):
            assert result(request)["category"] == "user" and result(request)["error"].startswith(
                field
            )
        wrong = http.post("/api/v1/optim_step", json={"model_id": MODEL, "seq_id": "x"})
        assert wrong.status_code == 422 and wrong.json()["error"].startswith("seq_id: 'x'")
        assert wrong.headers[module.SESSION] == session.id
        heard = worker.heard
        http.post("/api/v1/session_heartbeat", json={})
        assert worker.heard == heard
        http.post("/api/v1/get_info", json={"model_id": MODEL})
        assert worker.heard > heard
    worker.stopping.set()
    worker.thread.join()


def test_turns_of_another_kind_fail_the_request_and_not_the_worker(
    session: Session, tmp_path: Path
) -> None:
    with open_lease_group(str(tmp_path / "group"), who="another", policy="lrs").acquire():
        worker = Worker(session, "key", open_lease_group(str(tmp_path / "group"), who=session.id))
        worker.thread.start()
        request = session.create_model(CreateModel(base_model="nowhere"))
        with pytest.raises(UserError, match="policy"):
            session.ledger.future(request).result(LIMIT_S)
        assert worker.thread.is_alive()
    worker.stopping.set()
    worker.thread.join()
