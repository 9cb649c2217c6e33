"""The gateway as `tuneloop gateway --local` runs it: real sessions, which are asked for nothing that needs torch."""

import asyncio
import concurrent.futures
import http.server
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
import yaml
from kubernetes import client

from tests.extensions.gateway.command import build_gateway_command
from tests.waiting import LIMIT_S, until
from tuneloop.core.errors import UserError
from tuneloop.extensions.gateway import app, wire
from tuneloop.extensions.gateway.access import Caller, TokenFile
from tuneloop.extensions.gateway.app import Gateway, _find_name, build_app
from tuneloop.extensions.gateway.jobs import Jobs, _session
from tuneloop.extensions.gateway.processes import Processes
from tuneloop.extensions.gateway.sessions import (
    Quota,
    Session,
    SessionRequest,
    Settings,
    read_settings,
)
from tuneloop.inference.refusals import Refused


def list_workers(gateway: int) -> list[str]:
    """The states of the gateway's child processes that have not ended, by its process id."""
    states = subprocess.run(
        ["ps", "--ppid", str(gateway), "-o", "stat="], capture_output=True, text=True
    ).stdout
    return [state for state in states.split() if not state.startswith("Z")]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    home = tmp_path_factory.mktemp("gateway")
    config = home / "gateway.yaml"
    config.write_text(yaml.safe_dump({"default": {"sessions": 2}}))
    command = build_gateway_command(home, "--config", str(config))
    nobody = dict.fromkeys(
        ("http_proxy", "HTTP_PROXY", "ALL_PROXY"), "http://127.0.0.1:9"
    )  # not for its workers
    env = {
        **{name: value for name, value in os.environ.items() if name.lower() != "no_proxy"},
        **nobody,
    }
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env)
    url = re.search(r"http://\S+", process.stderr.readline())[0]
    told = process.stderr.readline()
    token = (home / "token").read_text().strip()
    with httpx2.Client(
        base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=LIMIT_S
    ) as client:
        yield SimpleNamespace(
            http=client, url=url, token=token, home=home, config=config, told=told, pid=process.pid
        )
    process.send_signal(signal.SIGTERM)
    assert process.wait(LIMIT_S) == 0
    left = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert f"{home}/store" not in left  # its sessions ended with it


@pytest.fixture(autouse=True)
def clean(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "gateway" in request.fixturenames:
        http = request.getfixturevalue("gateway").http
        for session in http.get("/v1/sessions").json()["sessions"]:
            assert http.delete(f"/v1/sessions/{session['id']}").status_code == 204
        assert http.get("/v1/sessions").json() == {"sessions": []}
        until(
            lambda: not list_workers(request.getfixturevalue("gateway").pid)
        )  # until then they take quota


def make(gateway: SimpleNamespace, key: str, **body: object) -> httpx2.Response:
    return gateway.http.post("/v1/sessions", json=body, headers={"Idempotency-Key": key})


def test_nobody_without_the_token(gateway: SimpleNamespace) -> None:
    for headers in (
        {},
        {"Authorization": "Bearer tml-wrong"},
        {"X-API-Key": "tml-wrong"},
        {"Authorization": "Basic x"},
    ):
        for method, path in (
            ("GET", "/v1/sessions"),
            ("POST", "/v1/sessions"),
            ("POST", "/api/v1/optim_step"),
        ):
            answer = httpx2.request(
                method, gateway.url + path, headers=headers, json={} if method == "POST" else None
            )
            assert answer.status_code == 401 and "token" in answer.json()["error"]
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    assert (
        httpx2.get(gateway.url + "/v1/sessions", headers={"X-API-Key": gateway.token}).status_code
        == 200
    )
    assert "export TINKER_BASE_URL=" in gateway.told and gateway.token not in gateway.told


def peak(gateway: SimpleNamespace) -> int:
    """Bytes of memory that it has had at most."""
    told = Path(f"/proc/{gateway.pid}/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", told)[1]) * 1024


def test_a_body_is_read_of_those_alone_who_have_a_token_and_up_to_a_limit(
    gateway: SimpleNamespace,
) -> None:
    def sent(size: int) -> Iterator[bytes]:
        yield b"{"
        for _ in range(size):
            yield bytes(2**20)

    def post(path: str, body: Iterator[bytes] | bytes, headers: dict[str, str]) -> int:
        return httpx2.post(
            f"{gateway.url}{path}", content=body, headers=headers, timeout=LIMIT_S
        ).status_code

    known, before = {"Authorization": f"Bearer {gateway.token}"}, peak(gateway)
    for path in ("/v1/sessions", "/api/v1/create_session", "/api/v1/optim_step"):
        assert post(path, b"{", {}) == 401
        assert post(path, b"[" * 100_000, known) == 422
        assert post(path, sent(128), {}) == 401
    assert (
        post("/v1/sessions", sent(2), known)
        == post("/api/v1/create_session", sent(2), known)
        == 413
    )
    assert post("/api/v1/optim_step", sent(64), known) == 413
    assert peak(gateway) - before < 100 * 2**20


def test_the_name_in_a_body_is_found_and_nothing_else_is_parsed() -> None:
    json_body = SimpleNamespace(headers={"content-type": "application/json"})
    deep = b"[" * 2**20
    for body, name in (
        (
            b' {"a": {"model_id": "x"}, "b": ["]", "}\\"", 1e9], "model_id" : "s.1:train:0", "c": '
            + deep,
            "s.1:train:0",
        ),
        (b'{"session_id": null, "request_id": "caf\\u00e9"}', "café"),
        (b'{"data": [' + b"1," * 2**20 + b'1], "sampling_session_id":"z"}', "z"),
    ):
        assert _find_name(json_body, body) == name
    unterminated = b'{"' + b'\\"' * 2**22
    for body in (
        deep,
        b'[{"model_id": "x"}]',
        unterminated,
        b'"' * 2**20,
        b"{}",
        b'{"model_id": "\\x"}',
        b'{"model_id": ""}',
    ):
        with pytest.raises(Refused) as caught:
            _find_name(json_body, body)
        assert caught.value.status == 422
    proto = SimpleNamespace(headers={"content-type": wire.PROTOBUF})
    message = wire._load_messages()["ForwardBackwardRequest"](model_id="s.1:train:0")
    assert _find_name(proto, message.SerializeToString() + b"\x1a\x00" * 2**22) == "s.1:train:0"


def test_large_bodies_keep_nobody_else_waiting(gateway: SimpleNamespace) -> None:
    """Three of 12 MiB that are as deep as they are long: none is parsed, and memory is that of their bytes."""
    known, before = {"Authorization": f"Bearer {gateway.token}"}, peak(gateway)
    body = b"[" * (12 * 2**20)
    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        sent = [
            pool.submit(
                httpx2.post,
                f"{gateway.url}/api/v1/optim_step",
                content=body,
                headers=known,
                timeout=LIMIT_S,
            )
            for _ in range(3)
        ]
        longest = 0.0
        while not all(each.done() for each in sent):
            begun = time.monotonic()
            # not /healthz, which asks for no token: a connection whose last request had none is closed after HEADERS_S
            assert gateway.http.get("/v1/sessions").status_code == 200
            longest = max(longest, time.monotonic() - begun)
            time.sleep(0.01)
    assert [each.result().status_code for each in sent] == [422] * 3
    print(
        f"others were answered within {longest:.3f} s, and {peak(gateway) - before >> 20} MiB were taken"
    )
    assert peak(gateway) - before < 125 * 2**20


def test_a_body_has_its_time_and_all_together_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Gateway(Processes(tmp_path, Settings()), TokenFile(tmp_path / "token"), f"{tmp_path}")
    headers = {"Authorization": f"Bearer {made.access.token}"}

    async def send_slowly() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(LIMIT_S)

    async def post(body: AsyncIterator[bytes] | bytes) -> httpx2.Response:
        transport = httpx2.ASGITransport(build_app(made))
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://gateway", headers=headers
        ) as http:
            return await http.post("/api/v1/optim_step", content=body)

    assert asyncio.run(post(b'{"a": "more than ten bytes"}')).status_code == 422
    monkeypatch.setattr(app, "HELD_BYTES", 10)
    refused = asyncio.run(post(b'{"a": "more than ten bytes"}'))
    assert refused.status_code == 503 and "try again" in refused.json()["error"]
    monkeypatch.setattr(app, "BODY_S", 0.1)
    late = asyncio.run(post(send_slowly()))
    assert late.status_code == 408 and "did not arrive in 0.1 s" in late.json()["error"]
    assert made.held_bytes == 0


def test_numbers_have_limits(gateway: SimpleNamespace) -> None:
    for field, value in (
        ("patience", 1e308),
        ("accelerators", 10**30),
        ("display_name", "x" * 201),
    ):
        refused = make(gateway, "n", **{field: value})
        assert refused.status_code == 422 and refused.json()["error"].startswith(f"{field}: "), (
            refused.json()
        )


def test_a_key_makes_one_session_however_often_and_at_once(gateway: SimpleNamespace) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: make(gateway, "k", display_name="mine"), range(8)))
    assert len({answer.json()["id"] for answer in answers}) == 1
    assert sorted(answer.status_code for answer in answers) == [200] * 7 + [201]
    assert [s["display_name"] for s in gateway.http.get("/v1/sessions").json()["sessions"]] == [
        "mine"
    ]
    other = make(gateway, "k", display_name="another")
    assert other.status_code == 409 and "use another key" in other.json()["error"]
    wrong = make(gateway, "l", gpus=1)
    assert wrong.status_code == 422 and "unknown key" in wrong.json()["error"]
    for path, body in (("/v1/sessions", b"{"), ("/v1/sessions", b"[]"), ("/v1/nothing", b"{}")):
        refused = gateway.http.post(
            path, content=body, headers={"content-type": "application/json"}
        )
        assert refused.status_code in (404, 422) and set(refused.json()) == {"error"}
    text = gateway.http.post("/api/v1/create_session", json={"user_metadata": "accelerators"})
    assert text.status_code == 422 and text.json()["error"].startswith(
        "user_metadata: 'accelerators'"
    )


def test_over_quota_is_refused_until_one_ends(gateway: SimpleNamespace) -> None:
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda n: make(gateway, f"q{n}"), range(5)))
    made = [answer.json()["id"] for answer in answers if answer.status_code == 201]
    over = [answer for answer in answers if answer.status_code == 429]
    assert (len(made), len(over)) == (2, 3)
    assert (
        over[0]
        .json()["error"]
        .startswith("quota: namespace 'local' has 2 of 2 sessions, and 1 more requested")
    )
    gateway.http.delete(f"/v1/sessions/{made[0]}")
    until(lambda: make(gateway, "again").status_code == 201)  # once its process is gone
    gateway.config.write_text(yaml.safe_dump({"default": {"sessions": 3}}))  # read anew
    assert make(gateway, "more").status_code == 201
    gateway.config.write_text(yaml.safe_dump({"default": {"sessions": 2}}))
    refused = make(gateway, "devices", accelerators=1)
    assert refused.status_code == 429


def test_what_is_ending_takes_its_part_of_the_quota() -> None:
    """A Job that was deleted is there until its pod is gone."""
    made = Jobs(client.ApiClient(), None)._job(
        "session-1", SessionRequest(namespace="a", accelerators=1), "me", "s3://a/b"
    )
    made["metadata"] |= {
        "creationTimestamp": "2026-01-01T00:00:00Z",
        "deletionTimestamp": "2026-01-01T00:00:09Z",
    }
    told = SimpleNamespace(data=json.dumps({**made, "status": {}}))
    session = _session(client.ApiClient().deserialize(told, "V1Job"), None)
    assert session.phase == "ending" and session.id == "a.session-1"
    with pytest.raises(Refused, match="has 1 of 1 accelerators"):
        Quota(sessions=2, accelerators=1).check(
            SessionRequest(namespace="a", accelerators=1), [session]
        )


def test_an_address_that_somebody_else_has_is_forgotten(tmp_path: Path) -> None:
    class Stranger(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.end_headers()

    with http.server.HTTPServer(("127.0.0.1", 0), Stranger) as stranger:
        threading.Thread(target=stranger.handle_request, daemon=True).start()
        made = Gateway(
            Processes(tmp_path, Settings()), TokenFile(tmp_path / "token"), f"{tmp_path}"
        )
        address, wanted = f"127.0.0.1:{stranger.server_port}", SessionRequest(namespace="local")
        before = Session("session-0", wanted, "me", "", "running", "", "key", address)
        made._running[before.id] = before
        with pytest.raises(Refused, match="its worker has moved") as caught:
            asyncio.run(
                made.forward(
                    Caller("me", namespace="local"),
                    before.id,
                    "POST",
                    "/api/v1/optim_step",
                    {},
                    b"{}",
                )
            )
        assert caught.value.status == 503 and not made._running


def test_a_group_is_a_name_of_the_namespace(gateway: SimpleNamespace) -> None:
    for wrong in ("lease://team-b/a100", "s3://elsewhere/group", "../a100"):
        refused = make(gateway, "g", lease_group=wrong)
        assert refused.status_code == 422 and refused.json()["error"].startswith(
            f"lease_group: {wrong!r}"
        )
    wanted = SessionRequest(namespace="a", lease_group="a100", patience=9)
    command = Jobs(client.ApiClient(), None)._job(
        "session-1", wanted, "me", "s3://b/sessions/a/session-1"
    )["spec"]
    flags = command["template"]["spec"]["containers"][0]["command"]
    assert flags[-6:] == [
        "--lease",
        "s3://b/sessions/a/.leases/a100",
        "--policy",
        "fifo",
        "--patience",
        "9",
    ]


def test_what_is_not_the_callers_does_not_exist(gateway: SimpleNamespace) -> None:
    assert make(gateway, "x", namespace="team-b").status_code == 403
    for id in (
        "local.session-0000000000",
        "team-b.session-0000000000",
        "session",
        "local.../x",
        "local.job",
    ):
        assert gateway.http.get(f"/v1/sessions/{id}").status_code == 404
        body = {"model_id": f"{id}:train:0"}
        assert gateway.http.post("/api/v1/optim_step", json=body).status_code == 404
    assert gateway.http.delete("/v1/sessions/team-b.session-0000000000").status_code == 404
    assert gateway.http.delete("/v1/sessions/local.session-0000000000").status_code == 204
    assert gateway.http.post("/api/v1/optim_step", json={}).status_code == 422


def test_a_session_from_its_creation_to_its_end(gateway: SimpleNamespace) -> None:
    """Its worker is asked through the gateway, and answers nobody else."""
    id = make(gateway, "life").json()["id"]
    until(lambda: gateway.http.get(f"/v1/sessions/{id}").json()["phase"] == "running")
    answer = gateway.http.post("/api/v1/session_heartbeat", json={"session_id": id})
    assert answer.json() == {"type": "session_heartbeat"}
    unknown = gateway.http.post("/api/v1/optim_step", json={"model_id": f"{id}:train:0"})
    assert unknown.status_code == 404 and "is not known here" in unknown.json()["error"]
    log = (gateway.home / "gateway-logs" / f"{id.partition('.')[2]}.log").read_text()
    worker = re.search(r"http://\S+", log)[0]
    assert httpx2.post(f"{worker}/api/v1/session_heartbeat", json={}).status_code == 401
    gateway.http.delete(f"/v1/sessions/{id}")
    until(lambda: gateway.http.get(f"/v1/sessions/{id}").status_code == 404)
    until(
        lambda: (
            gateway.http.post("/api/v1/session_heartbeat", json={"session_id": id}).status_code
            == 404
        )
    )


def test_a_worker_that_dies_is_a_session_that_failed(gateway: SimpleNamespace) -> None:
    id = gateway.http.post("/api/v1/create_session", json={"user_metadata": {}}).json()[
        "session_id"
    ]
    assert (
        gateway.http.post("/api/v1/session_heartbeat", json={"session_id": id}).status_code == 200
    )
    found = subprocess.run(
        ["pgrep", "-f", f"gateway.worker --session {id}"], capture_output=True, text=True
    ).stdout.split()
    os.kill(int(found[0]), signal.SIGKILL)

    def beat() -> httpx2.Response | None:
        answer = gateway.http.post("/api/v1/session_heartbeat", json={"session_id": id})
        return answer if answer.status_code != 503 else None

    answer = until(beat)
    assert answer.status_code == 410 and "has ended (failed): exit -9" in answer.json()["error"]
    assert gateway.http.get(f"/v1/sessions/{id}").json()["phase"] == "failed"
    assert make(gateway, "next").status_code == 201  # it counts no longer


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    made = TokenFile(tmp_path / "token")
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600 and made.token.startswith("tml-")
    assert TokenFile(tmp_path / "token").token == made.token
    (tmp_path / "token").chmod(0o644)
    with pytest.raises(UserError, match="others can read it"):
        TokenFile(tmp_path / "token")


def test_the_settings_that_manifests_ship_are_read(tmp_path: Path) -> None:
    shipped = Path(__file__).parents[3] / "manifests/components/gateway/gateway.yaml"
    (tmp_path / "gateway.yaml").write_text(
        next(yaml.safe_load_all(shipped.read_text()))["data"]["gateway.yaml"]
    )
    settings = read_settings(tmp_path / "gateway.yaml")
    assert settings.quota("tuneloop").sessions > settings.quota("another").sessions == 0
