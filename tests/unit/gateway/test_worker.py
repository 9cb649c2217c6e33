"""A worker's thread, and turns on the device between sessions."""

import time
from pathlib import Path

import pytest

from tests.making import checkpoint_artifact
from tuneloop.errors import UserError
from tuneloop.gateway import worker as module
from tuneloop.gateway.session import CreateModel, Session
from tuneloop.gateway.worker import Worker
from tuneloop.sharing.turns import open_turns
from tuneloop.trainers.fsdp import Ranks

MODEL = "local.session-0123456789:train:0"


def until(done) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(MODEL.partition(":")[0], f"{tmp_path}/session-0123456789", lambda: Ranks("cpu"))


def test_a_worker_computes_in_its_turn_and_sleeps_between(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LINGER", 0.05)
    base = checkpoint_artifact(tmp_path / "base")
    place, other = str(tmp_path / "group"), open_turns(str(tmp_path / "group"), who="another")
    worker = Worker(session, "key", open_turns(place, who=session.id))
    worker.thread.start()
    try:
        with other.acquire() as held:
            request = session.create_model(CreateModel(session_id=session.id, base_model=base.ref))
            until(lambda: [seat.who for seat in other.read().waiting] == [session.id])
            assert held.number == 1 and not session.ledger.future(request).done() and not session.models
        session.ledger.future(request).result(30)
        until(lambda: other.read().holder is None)
        assert other.read().number == 2
        assert session._asleep == [session.models[MODEL]]
    finally:
        worker.stopping.set()
        worker.thread.join()


def test_turns_of_another_kind_fail_the_request_and_not_the_worker(session: Session, tmp_path: Path) -> None:
    with open_turns(str(tmp_path / "group"), who="another", policy="lrs").acquire():
        worker = Worker(session, "key", open_turns(str(tmp_path / "group"), who=session.id))
        worker.thread.start()
        request = session.create_model(CreateModel(session_id=session.id, base_model="nowhere"))
        with pytest.raises(UserError, match="policy"):
            session.ledger.future(request).result(30)
        assert worker.thread.is_alive()
    worker.stopping.set()
    worker.thread.join()
