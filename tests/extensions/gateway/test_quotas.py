"""What a namespace may use on one day: bytes of bodies, and tokens of its sessions, with real ones."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
import yaml

from tests.extensions.gateway.test_drain import DATUM, ask, fetch, serve
from tests.extensions.gateway.test_session import SUPERVISED, Driver, data
from tests.making import checkpoint_artifact
from tuneloop.core.artifacts import Artifact
from tuneloop.extensions.gateway import sessions
from tuneloop.extensions.gateway.access import TokenFile
from tuneloop.extensions.gateway.app import Gateway, build_app
from tuneloop.extensions.gateway.processes import Processes
from tuneloop.extensions.gateway.sessions import Meter, Settings
from tuneloop.inference.refusals import Refused


def test_bodies_have_a_quota_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What names no session counts as well."""
    (tmp_path / "gateway.yaml").write_text("default: {bytes_per_day: 100}")
    access = TokenFile(tmp_path / "token")
    made = Gateway(
        Processes(tmp_path / "logs", Settings()), access, f"{tmp_path}", tmp_path / "gateway.yaml"
    )
    headers = {"Authorization": f"Bearer {access.token}"}

    async def post(size: int) -> httpx2.Response:
        transport = httpx2.ASGITransport(build_app(made))
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://gateway", headers=headers
        ) as http:
            return await http.post("/api/v1/optim_step", content=b" " * size)

    assert asyncio.run(post(60)).status_code == 422
    refused = asyncio.run(post(60))
    assert refused.status_code == 429
    told = "quota: 'local' has 60 of 100 bytes_per_day, and 60 more requested; wait for tomorrow (UTC), or ask"
    assert refused.json()["error"].startswith(told)
    assert asyncio.run(post(40)).status_code == 422, "as many as are left"
    assert asyncio.run(post(1)).status_code == 429 and made.held_bytes == 0
    days = int(sessions.time.time() // 86400)
    monkeypatch.setattr(sessions, "time", SimpleNamespace(time=lambda: 86400.0 * (days + 1)))
    assert asyncio.run(post(60)).status_code == 422, "it is tomorrow"


def test_a_meter_begins_anew_each_day(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=86400.0 * 20000)
    monkeypatch.setattr(sessions, "time", SimpleNamespace(time=lambda: clock.now))
    meter = Meter()
    assert (meter.count("a", 5), meter.count("b", 2), meter.count("a"), meter.count("c")) == (
        5,
        2,
        5,
        0,
    )
    assert dict(meter) == {"a": 5, "b": 2}, "who only asks is not written down"
    clock.now += 86399.0
    assert meter.count("a", 1) == 6
    clock.now += 1.0
    assert meter.count("a") == 0 and not meter


def test_a_session_computes_no_more_tokens_than_it_is_left(tmp_path: Path) -> None:
    """Its own count stops what was accepted before the quota was used up."""
    driver = Driver(tmp_path, checkpoint_artifact(tmp_path / "base"))
    driver.session.token_limit = 40
    driver.forward_backward(data(**SUPERVISED), "cross_entropy")
    driver.forward_backward(data(**SUPERVISED), "cross_entropy")
    assert driver.session.meter.count("") == 32
    with pytest.raises(
        Refused,
        match=f"session '{driver.session.id}' has 32 of 40 tokens_per_day, and 16 more requested",
    ):
        driver.forward_backward(data(**SUPERVISED), "cross_entropy")
    assert driver.session.meter.count("") == 32
    driver.step()


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[SimpleNamespace]:
    (tmp_path / "gateway.yaml").write_text("default: {sessions: 2, tokens_per_day: 20}")
    with serve(tmp_path, "--config", str(tmp_path / "gateway.yaml")) as served:
        yield SimpleNamespace(**vars(served), config=tmp_path / "gateway.yaml")


@pytest.fixture
def base(tmp_path: Path) -> Artifact:
    return checkpoint_artifact(tmp_path / "base")


def sample(gateway: SimpleNamespace, session: str, number: int, **wanted: Any) -> str:
    params = {"max_tokens": 4, "stop": []}
    asked = {
        "sampling_session_id": f"{session}:sample:0",
        "seq_id": number,
        "sampling_params": params,
    }
    return ask(gateway, "asample", **asked, prompt={"chunks": [{"tokens": [5]}]}, **wanted)


def test_the_sessions_of_a_namespace_share_its_tokens(
    gateway: SimpleNamespace, base: Artifact
) -> None:
    first, second = (
        gateway.http.post("/v1/sessions", json={}, headers={"Idempotency-Key": key}).json()["id"]
        for key in "ab"
    )
    for session in (first, second):
        opened = {"session_id": session, "sampling_session_seq_id": 0, "base_model": base.ref}
        assert gateway.http.post("/api/v1/create_sampling_session", json=opened).status_code == 200
    assert (
        len(fetch(gateway, sample(gateway, first, 1)).json()["sequences"][0]["tokens"]) == 4
    )  # 5 of 20
    assert "error" not in fetch(gateway, sample(gateway, second, 1)).json()  # 10
    beyond = fetch(gateway, sample(gateway, second, 2, num_samples=3)).json()
    told = f"quota: session '{second}' has 5 of 15 tokens_per_day, and 13 more requested; wait for tomorrow"
    assert beyond["category"] == "user" and beyond["error"].startswith(told)
    assert "error" not in fetch(gateway, sample(gateway, second, 3, num_samples=2)).json()  # 19
    model = {"session_id": first, "base_model": base.ref}
    assert "error" not in fetch(gateway, ask(gateway, "create_model", **model)).json()
    inputs = {"model_id": f"{first}:train:0", "seq_id": 1}
    inputs["forward_backward_input"] = {"data": [DATUM], "loss_fn": "cross_entropy"}
    assert (
        "3 more requested"
        in fetch(gateway, ask(gateway, "forward_backward", **inputs)).json()["error"]
    )
    one = {
        "prompt": {"chunks": [{"tokens": [5]}]},
        "sampling_session_id": f"{first}:sample:0",
        "seq_id": 2,
    }
    exact = {**one, "sampling_params": {"max_tokens": 1, "stop": []}}
    assert "2 more requested" in fetch(gateway, ask(gateway, "asample", **exact)).json()["error"]
    gateway.config.write_text(yaml.safe_dump({"default": {"sessions": 2, "tokens_per_day": 19}}))
    refused = gateway.http.post("/v1/sessions", json={}, headers={"Idempotency-Key": "c"})
    assert refused.status_code == 429, "the settings are read anew all the same"
    refused = gateway.http.post("/api/v1/asample", json={**exact, "seq_id": 3})
    assert refused.status_code == 429
    assert refused.json()["error"].startswith(
        "quota: namespace 'local' has 19 of 19 tokens_per_day, and 1 more requested"
    )
    beat = gateway.http.post("/api/v1/session_heartbeat", json={"session_id": first})
    assert beat.status_code == 200, "what takes no tokens goes on"
