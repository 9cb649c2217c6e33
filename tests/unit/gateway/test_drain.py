"""`tuneloop gateway --local` is told to end while a session has work: that is done, fetched and saved."""

import concurrent.futures
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest

from tests.making import checkpoint_artifact
from tests.unit.gateway.test_session import MODEL, SUPERVISED, Driver, data
from tests.waiting import LIMIT_S, until
from tuneloop.core.artifacts import Artifact
from tuneloop.gateway import worker as module
from tuneloop.gateway.ledger import Entry, Gone
from tuneloop.gateway.worker import Worker

DATUM = {
    "model_input": {"chunks": [{"tokens": [5, 6, 7]}]},
    "loss_fn_inputs": {
        "target_tokens": {"data": [6, 7, 8], "dtype": "int64"},
        "weights": {"data": [0.0, 1.0, 1.0]},
    },
}


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[SimpleNamespace]:
    command = [sys.executable, "-m", "tuneloop.cli", "gateway", "--local", "--store", str(tmp_path / "store")]
    flags = ["--port", "0", "--token-file", str(tmp_path / "token")]
    with subprocess.Popen([*command, *flags], stderr=subprocess.PIPE, text=True) as process:
        try:
            url = re.search(r"http://\S+", process.stderr.readline())[0]
            process.stderr.readline()
            headers = {"Authorization": f"Bearer {(tmp_path / 'token').read_text().strip()}"}
            with httpx2.Client(base_url=url, headers=headers, timeout=LIMIT_S) as http:
                yield SimpleNamespace(http=http, process=process, home=tmp_path)
        finally:
            process.kill()


def test_what_was_accepted_before_sigterm_is_done_and_fetched_and_saved(gateway: SimpleNamespace) -> None:
    http, base = gateway.http, checkpoint_artifact(gateway.home / "base")
    session = http.post("/v1/sessions", json={}, headers={"Idempotency-Key": "a"}).json()["id"]
    model = f"{session}:train:0"

    def ask(what: str, **body: object) -> str:
        answer = http.post(f"/api/v1/{what}", json=body)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["request_id"])

    def fetch(request: str) -> httpx2.Response:
        while (answer := http.post("/api/v1/retrieve_future", json={"request_id": request})).status_code == 408:
            pass
        return answer

    asked = [ask("create_model", session_id=session, base_model=base.ref)]
    inputs = {"data": [DATUM], "loss_fn": "cross_entropy"}
    for number in range(1, 41, 2):
        asked.append(ask("forward_backward", model_id=model, seq_id=number, forward_backward_input=inputs))
        asked.append(ask("optim_step", model_id=model, seq_id=number + 1, adam_params={"learning_rate": 0.01}))
    log = gateway.home / "gateway-logs" / f"{session.partition('.')[2]}.log"
    gateway.process.send_signal(signal.SIGTERM)
    until(lambda: "is to end: takes nothing new" in log.read_text(), child=gateway.process)
    late = http.post("/api/v1/optim_step", json={"model_id": model, "seq_id": 41})
    assert late.status_code == 503 and "takes nothing new" in late.json()["error"]
    assert ask("optim_step", model_id=model, seq_id=40, adam_params={"learning_rate": 0.01}) == asked[-1], "sent again"
    assert http.post("/v1/sessions", json={}, headers={"Idempotency-Key": "b"}).status_code == 503
    with concurrent.futures.ThreadPoolExecutor(41) as pool:
        answers = list(pool.map(fetch, asked))
    assert [answer.status_code for answer in answers] == [200] * 41
    assert not [answer.json() for answer in answers if "error" in answer.json()]
    assert answers[-1].json()["metrics"]["weight_version:max"] == 20.0
    assert gateway.process.wait(LIMIT_S) == 0
    store = gateway.home / f"store/sessions/local/{session.partition('.')[2]}/train-0/weights/drained"
    assert Artifact(str(store)).manifest.facts["version"] == 20, log.read_text()
    assert f"saved tinker://{model}/weights/drained" in log.read_text()


def test_a_session_that_its_owner_ends_is_not_waited_for(gateway: SimpleNamespace) -> None:
    session = gateway.http.post("/v1/sessions", json={}, headers={"Idempotency-Key": "a"}).json()["id"]
    asked = {"session_id": session, "base_model": "nowhere"}
    assert gateway.http.post("/api/v1/create_model", json=asked).status_code == 200
    assert gateway.http.delete(f"/v1/sessions/{session}").status_code == 204
    log = (gateway.home / "gateway-logs" / f"{session.partition('.')[2]}.log").read_text()
    assert "saved" not in log


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
    assert Artifact(f"{driver.session.artifacts}/train-0/weights/drained").manifest.facts["version"] == 1
    assert not driver.session.ledger.future(behind).done()
    assert "ends with 0 requests not done, 1 that wait for an earlier one, 0 results not fetched" in caplog.text


def test_models_are_saved_in_time_however_much_was_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert Artifact(f"{driver.session.artifacts}/train-0/weights/drained").manifest.facts["version"] == 1
    assert driver.session.ledger.future(asked[0]).exception(0) is None
    with pytest.raises(Gone, match="not done: its session ends; go on from what it has saved"):
        driver.session.ledger.future(asked[-1]).result(0)
