"""A session, or `tuneloop gateway --local`, is told to end while there is work: that is done, fetched and saved."""

import concurrent.futures
import contextlib
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from tests.extensions.gateway.command import build_gateway_command
from tests.extensions.gateway.test_session import MODEL, SUPERVISED, Driver, data
from tests.making import checkpoint_artifact
from tests.waiting import LIMIT_S, until
from tuneloop.core.artifacts import Artifact
from tuneloop.extensions.gateway import worker as module
from tuneloop.extensions.gateway.ledger import Entry
from tuneloop.extensions.gateway.processes import Processes
from tuneloop.extensions.gateway.sessions import SessionRequest, Settings, WorkerPod
from tuneloop.extensions.gateway.worker import Worker
from tuneloop.inference.refusals import Refused

STEPS = 8
DATUM = {
    "model_input": {"chunks": [{"tokens": [5, 6, 7]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [6, 7, 8], "dtype": "int64"},
        "weights": {"data": [0.0, 1.0, 1.0]},
    },
}


@contextlib.contextmanager
def serve(home: Path, *more: str) -> Iterator[SimpleNamespace]:
    """A gateway for sessions on this machine, and a client of its."""
    command = build_gateway_command(home, *more)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = re.search(r"http://\S+", process.stderr.readline())[0]
            process.stderr.readline()
            headers = {"Authorization": f"Bearer {(home / 'token').read_text().strip()}"}
            with httpx2.Client(base_url=url, headers=headers, timeout=LIMIT_S) as http:
                yield SimpleNamespace(http=http, process=process, home=home)
        finally:
            process.kill()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """One for the tests below, the last of which ends it."""
    with serve(tmp_path_factory.mktemp("gateway")) as served:
        yield served


def ask(gateway: SimpleNamespace, what: str, **body: object) -> str:
    while " is starting" in (answer := gateway.http.post(f"/api/v1/{what}", json=body)).text:
        assert answer.status_code == 503, answer.text
    assert answer.status_code == 200, answer.text
    return str(answer.json()["request_id"])


def fetch(gateway: SimpleNamespace, request: str) -> httpx2.Response:
    asked = {"request_id": request}
    while (answer := gateway.http.post("/api/v1/retrieve_future", json=asked)).status_code == 408:
        pass
    return answer


def begin_session(gateway: SimpleNamespace, key: str) -> tuple[str, list[str], Path]:
    """A session that was asked for a model and eight steps: its id, the requests, and what it will log to."""
    session = gateway.http.post("/v1/sessions", json={}, headers={"Idempotency-Key": key}).json()[
        "id"
    ]
    model, base = f"{session}:train:0", checkpoint_artifact(gateway.home / f"base-{key}")
    asked = [ask(gateway, "create_model", session_id=session, base_model=base.ref)]
    inputs = {"data": [DATUM], "loss_fn": "cross_entropy"}
    for number in range(1, 2 * STEPS, 2):
        asked.append(
            ask(
                gateway,
                "forward_backward",
                model_id=model,
                seq_id=number,
                forward_backward_input=inputs,
            )
        )
        step = {"seq_id": number + 1, "adam_params": {"learning_rate": 0.01}}
        asked.append(ask(gateway, "optim_step", model_id=model, **step))
    return session, asked, gateway.home / "gateway-logs" / f"{session.partition('.')[2]}.log"


def check_done(gateway: SimpleNamespace, asked: list[str]) -> None:
    """All that was asked for is done, and its results are fetched."""
    with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
        answers = list(pool.map(lambda request: fetch(gateway, request), asked))
    assert [answer.status_code for answer in answers] == [200] * (1 + 2 * STEPS)
    assert not [answer.json() for answer in answers if "error" in answer.json()]
    assert answers[-1].json()["metrics"]["weight_version:max"] == STEPS


def check_saved(gateway: SimpleNamespace, session: str, log: Path) -> None:
    store = (
        gateway.home / f"store/sessions/local/{session.partition('.')[2]}/train-0/weights/drained"
    )
    assert Artifact(str(store)).manifest.facts["version"] == STEPS, log.read_text()
    assert f"saved tinker://{session}:train:0/weights/drained" in log.read_text()


def test_a_session_ends_behind_what_its_owner_asked_for(gateway: SimpleNamespace) -> None:
    """It counts as ended at once; its results are there until it is gone, its process then is no more."""
    session, asked, log = begin_session(gateway, "a")
    (worker,) = subprocess.run(
        ["pgrep", "-P", str(gateway.process.pid), "-f", f"worker --session {session}"],
        capture_output=True,
    ).stdout.split()
    assert gateway.http.delete(f"/v1/sessions/{session}").status_code == 204
    assert gateway.http.get("/v1/sessions").json() == {"sessions": []}
    assert gateway.http.delete(f"/v1/sessions/{session}").status_code == 204
    check_done(gateway, asked)
    until(lambda: not Path(f"/proc/{worker.decode()}").exists(), child=gateway.process)
    check_saved(gateway, session, log)
    beat = {"session_id": session}
    until(
        lambda: gateway.http.post("/api/v1/session_heartbeat", json=beat).status_code == 404,
        child=gateway.process,
    )


def test_what_was_accepted_before_sigterm_is_done_and_fetched_and_saved(
    gateway: SimpleNamespace,
) -> None:
    session, asked, log = begin_session(gateway, "b")
    gateway.process.send_signal(signal.SIGTERM)
    until(lambda: "is ending: accepts no new requests" in log.read_text(), child=gateway.process)
    again = {
        "model_id": f"{session}:train:0",
        "seq_id": 2 * STEPS,
        "adam_params": {"learning_rate": 0.01},
    }
    late = gateway.http.post("/api/v1/optim_step", json={**again, "seq_id": 2 * STEPS + 1})
    assert late.status_code == 503 and "its session is ending" in late.json()["error"]
    assert ask(gateway, "optim_step", **again) == asked[-1], "sent again"
    assert (
        gateway.http.post("/v1/sessions", json={}, headers={"Idempotency-Key": "c"}).status_code
        == 503
    )
    check_done(gateway, asked)
    assert gateway.process.wait(LIMIT_S) == 0
    check_saved(gateway, session, log)


def freeze(process: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
    process.send_signal(signal.SIGSTOP)
    until(
        lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    )
    return process


def test_nobody_takes_the_place_of_one_that_ends_and_one_that_hangs_is_killed(
    tmp_path: Path,
) -> None:
    processes = Processes(tmp_path, Settings(), "cpu")
    place = (
        "session-1",
        SessionRequest(namespace="local"),
        "me",
        f"{tmp_path}/sessions/local/session-1",
    )
    try:
        processes.create(*place)
        first = freeze(processes.children["session-1"].process)
        processes.end("local", "session-1")
        assert [each.phase for each in processes.sessions("local")] == ["ending"]
        with pytest.raises(Refused, match="session-1 is ending"):
            processes.create(*place)
        first.send_signal(signal.SIGCONT)
        assert first.wait(LIMIT_S) in (0, -signal.SIGTERM)
        assert processes.sessions("local") == [] and processes.get("local", "session-1") is None
        processes.create(*place)
        processes.settings = Settings(worker=WorkerPod().model_copy(update={"grace": 0.2}))
        second = freeze(processes.children["session-1"].process)
        processes.end("local", "session-1")
        assert second.wait(LIMIT_S) == -signal.SIGKILL
    finally:
        processes.close()


def test_a_request_whose_predecessor_never_came_does_not_keep_models_from_being_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "FETCH_S", 0.0)
    driver = Driver(tmp_path, checkpoint_artifact(tmp_path / "base"))
    driver.forward_backward(data(**SUPERVISED), "cross_entropy")
    driver.step()
    behind = driver.session.ledger.submit(MODEL, 9, Entry("9", lambda _: [None]))
    worker = Worker(driver.session, "key")
    worker.thread.start()
    worker.drain(2 * LIMIT_S)
    worker.stopping.set()
    assert (
        Artifact(f"{driver.session.artifacts}/train-0/weights/drained").manifest.facts["version"]
        == 1
    )
    assert not driver.session.ledger.future(behind).done()
    assert (
        "ends with 0 requests not done, 1 that wait for an earlier one, 0 results not fetched"
        in caplog.text
    )


def test_models_are_saved_in_time_however_much_was_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left then is refused: whoever goes on from what was saved has to send it again."""
    monkeypatch.setattr(module, "FETCH_S", 0.0)
    driver = Driver(tmp_path, checkpoint_artifact(tmp_path / "base"))
    driver.forward_backward(data(**SUPERVISED), "cross_entropy")
    driver.step()
    asked = [
        driver.session.ledger.submit(MODEL, None, Entry(str(number), lambda _: [time.sleep(0.1)]))
        for number in range(3000)
    ]
    worker = Worker(driver.session, "key")
    worker.thread.start()
    worker.drain(module.MARGIN_S + 16)
    worker.stopping.set()
    assert (
        Artifact(f"{driver.session.artifacts}/train-0/weights/drained").manifest.facts["version"]
        == 1
    )
    assert driver.session.ledger.future(asked[0]).exception(0) is None
    with pytest.raises(
        Refused, match="not done: its session is ending; continue from its checkpoints"
    ):
        driver.session.ledger.future(asked[-1]).result(0)


def test_a_session_that_nobody_asks_for_anything_saves_its_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FETCH_S", 0.0)
    driver = Driver(tmp_path, checkpoint_artifact(tmp_path / "base"))
    driver.forward_backward(data(**SUPERVISED), "cross_entropy")
    driver.step()
    worker = Worker(driver.session, "key")
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def fall_idle() -> None:
        until(lambda: signal.getsignal(signal.SIGTERM) != handlers[signal.SIGTERM])
        worker.heard = float("-inf")

    threading.Thread(target=fall_idle).start()
    try:
        options = ["--session", "s", "--artifacts", "a", "--port", "0", "--idle", "100"]
        assert module._serve(worker, module._parse(options)) == 0
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert (
        Artifact(f"{driver.session.artifacts}/train-0/weights/drained").manifest.facts["version"]
        == 1
    )
