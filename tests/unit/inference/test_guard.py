"""What a rollout server asks of its callers, and how it ends: the real one in a process of its own."""

import asyncio
import http.client
import json
import signal
import socket
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import uvicorn
from starlette.responses import PlainTextResponse

from tests.unit.inference.rollout_server import BODY, Digits, ask, serving
from tests.waiting import LIMIT_S, until
from tuneloop.core.errors import UserError
from tuneloop.core.server_token import VARIABLE, create_token_file
from tuneloop.formats.rollouts import Request
from tuneloop.inference import guard
from tuneloop.inference.engine_loop import EngineLoop
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines._client import Client
from tuneloop.inference.engines._connection import Lost
from tuneloop.inference.engines.endpoint import open_engine
from tuneloop.inference.fleet import Worker
from tuneloop.inference.http_api import HttpApi
from tuneloop.inference.server import UVICORN, bind_address

PATHS = (
    "/generate",
    "/load",
    "/verify",
    "/sleep",
    "/wake_up",
    "/engine/pause_generation",
    "/engine/get_weight_version",
)


def test_all_but_health_need_the_token_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_token_file(path := tmp_path / "token")
    token = path.read_text().strip()
    with serving(**{VARIABLE: str(path), "REFUSAL_S": "0"}) as (_, address):
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": token}):
            assert ask(address, "GET", "/version", **headers)[0] == 401
            for each in PATHS:
                status, told = ask(address, "POST", each, BODY, **headers)
                assert status == 401 and "no token of this run" in told["error"]
        assert ask(address, "GET", "/health")[0] == 200
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S) as answer:
            assert answer.status == 200, "Prometheus and autoscalers have no token"
        assert ask(address, "POST", "/generate", BODY, Authorization=f"Bearer {token}")[1][
            "completions"
        ]
        stranger, worker = Client(f"http://{address}", LIMIT_S), Worker("a", f"http://{address}")
        monkeypatch.delenv(VARIABLE, raising=False)
        with pytest.raises(
            UserError, match="answers 401: no token of this run: send Authorization"
        ):
            stranger._json("GET", "/version")
        monkeypatch.setenv(VARIABLE, str(path))
        assert stranger._json("GET", "/version")["version"] == 0
        assert worker.version() == "0@xxh3-128:00"

        path.write_text(f"{token}\nnew\n")  # both are taken, until the clients have the new one
        assert ask(address, "GET", "/version", Authorization="Bearer new")[0] == 200
        assert stranger._json("GET", "/version")["version"] == 0
        path.write_text("new\n")
        assert ask(address, "GET", "/version", Authorization=f"Bearer {token}")[0] == 401
        assert stranger._json("GET", "/version")["version"] == 0


def test_a_token_file_that_is_gone_lets_nobody_in(tmp_path: Path) -> None:
    (token := tmp_path / "token").write_text("a-token\n")
    with serving(**{VARIABLE: str(token), "REFUSAL_S": "0"}) as (_, address):
        token.unlink()
        for headers in ({}, {"Authorization": "Bearer a-token"}, {"Authorization": "Bearer "}):
            assert ask(address, "POST", "/generate", BODY, **headers)[0] == 401
        token.write_text("a-token\n")
        assert ask(address, "POST", "/generate", BODY, Authorization="Bearer a-token")[1][
            "completions"
        ]


def test_a_client_whose_token_is_the_old_one_tries_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kubelets of two nodes bring a new token at two times."""
    (tmp_path / "theirs").write_text("new\n")
    (tmp_path / "ours").write_text("old\n")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "ours"))
    with serving(**{VARIABLE: str(tmp_path / "theirs")}) as (_, address):
        with pytest.raises(Lost, match="answers 401"):
            Client(f"http://{address}", LIMIT_S)._json("GET", "/version")
        engine = open_engine(f"http://{address}", {"retry_sleep": 0.1}, LIMIT_S)
        engine.version, engine.vocab_size = 0, 64
        with ThreadPoolExecutor() as pool:
            asked = pool.submit(
                engine.generate, [Request("a", [1], [0])], Sampling(), lambda _: None
            )
            while not engine.retries:
                assert not asked.done()
            (tmp_path / "ours").write_text("new\n")
            assert asked.result(LIMIT_S)[0][0].ids == [1]


def test_without_a_file_nobody_is_asked(tmp_path: Path) -> None:
    with serving(**{VARIABLE: str(tmp_path / "none")}) as (_, address):
        assert ask(address, "POST", "/generate", BODY)[1]["completions"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("requests.0.seeds.0", 10**30),
        ("requests.0.seeds.0", -(10**30)),
        ("requests.0.seeds", [0] * 4097),
        ("requests.0.prompt_ids.1", 10**30),
        ("requests.0.prompt_ids.1", -1),
        ("sampling.temperature", float("inf")),
        ("sampling.temperature", float("nan")),
        ("sampling.max_tokens", 10**30),
        ("sampling.stop_token_ids.0", 10**30),
        ("version", 10**30),
        ("min_version", -(10**30)),
    ],
)
def test_a_number_without_a_limit_is_refused_by_its_name(
    field: str, value: object, server: str
) -> None:
    body: dict = {"requests": [{"id": "a", "prompt_ids": [1, 2], "seeds": [7]}]}
    body["sampling"] = {"temperature": 1.0, "max_tokens": 4, "stop_token_ids": [1]}
    *above, last = field.split(".")
    place: object = body
    for name in above:
        place = place[int(name)] if name.isdigit() else place[name]
    place[int(last) if last.isdigit() else last] = value
    status, told = ask(server, "POST", "/generate", body)
    assert status == 400 and told["error"].startswith(f"{field}: "), told
    assert ask(server, "POST", "/generate", BODY)[1]["completions"], "it serves others as before"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with serving() as (_, address):
        yield address


@pytest.mark.parametrize(
    ("path", "most"), [("/generate", 2**22 + 2**16), ("/load", 2**16), ("/sleep", 2**16)]
)
def test_a_body_ends_at_a_limit(path: str, most: int, server: str) -> None:
    connection = http.client.HTTPConnection(server, timeout=LIMIT_S)
    connection.putrequest("POST", path)
    connection.putheader("Content-Length", str(most + 2**20))
    connection.putheader("Content-Type", "application/json")
    connection.endheaders()
    try:
        for _ in range(most // 2**16 + 16):
            connection.send(b" " * 2**16)
    except OSError:  # it was answered, and hung up, before all was sent
        pass
    answer = connection.getresponse()
    assert answer.status == 413 and f"more than {most} bytes".encode() in answer.read()
    assert ask(server, "POST", path, b" " * most)[0] == 400, "as many are read, and are no JSON"


def test_a_prompt_as_long_as_the_context_is_taken_whatever_that_is() -> None:
    loop = EngineLoop(Digits({}))
    loop.engine.context = 2**20
    assert HttpApi(loop).limit_body("/generate") > len(
        json.dumps([1234567] * 2**20, separators=(",", ":"))
    )


def test_connections_without_headers_are_closed_and_others_are_answered() -> None:
    with serving(HEADERS_S="5") as (child, address):
        host, port = address.split(":")
        silent = [socket.create_connection((host, int(port))) for _ in range(200)]
        for each in silent[::2]:
            each.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        kept = silent.pop()
        kept.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        kept.settimeout(LIMIT_S)
        assert kept.recv(1000).startswith(b"HTTP/1.1 200")
        kept.sendall(b"GET /hea")  # the next request of a connection has the same time
        assert ask(address, "POST", "/generate", BODY)[1]["completions"]
        for each in (*silent, kept):
            each.settimeout(LIMIT_S)
            assert not each.recv(1000).startswith(b"HTTP/1.1 200"), "it was closed"
            each.close()
        assert child.poll() is None


def test_a_known_connection_is_not_closed_while_its_next_token_is_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway asks the API server for it meanwhile. One whose first token takes longer than it has is closed."""
    judged = threading.Event()

    async def app(scope: dict, receive: object, send: object) -> None:
        if scope["path"] == "/slow":
            while not judged.is_set():
                await asyncio.sleep(0.01)
        scope["state"]["caller"] = "of the run"
        await PlainTextResponse("known")(scope, receive, send)

    def judge() -> None:
        while guard.TimedProtocol.strangers:
            next(iter(guard.TimedProtocol.strangers))._judge()
        judged.set()

    monkeypatch.setattr(guard, "HEADERS_S", 10_000)
    with bind_address("127.0.0.1", 0) as listener:
        listener.listen()
        server = uvicorn.Server(uvicorn.Config(app, **UVICORN))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        for first, expected in (("/quick", b"known"), ("/slow", None)):
            judged.clear()
            connection = http.client.HTTPConnection(*listener.getsockname(), timeout=LIMIT_S)
            if first == "/quick":
                connection.request("GET", first)
                assert connection.getresponse().read() == b"known"
            connection.request("GET", "/slow")
            until(
                lambda: any(
                    each.scope and each.scope["path"] == "/slow"
                    for each in guard.TimedProtocol.strangers
                )
            )
            next(iter(guard.TimedProtocol.strangers)).loop.call_soon_threadsafe(judge)
            try:
                assert connection.getresponse().read() == expected
            except http.client.RemoteDisconnected:
                assert expected is None
            connection.close()
        server.should_exit = True
        thread.join(LIMIT_S)


def test_what_was_accepted_before_sigterm_is_answered() -> None:
    """Under load: 41 requests at once, of which none is done when it is told to end; what comes later is refused."""
    with serving(DURATION_S="2") as (child, address):
        body = {"requests": [{"id": str(i), "prompt_ids": [1], "seeds": [i]} for i in range(3)]}

        def send(_: int) -> http.client.HTTPResponse:
            connection = http.client.HTTPConnection(address, timeout=LIMIT_S)
            connection.request(
                "POST", "/generate", json.dumps(body), {"Content-Type": "application/json"}
            )
            return connection.getresponse()  # its headers: it was admitted

        with ThreadPoolExecutor(41) as pool:
            answers = list(pool.map(send, range(41)))
            child.send_signal(signal.SIGTERM)
            texts = list(pool.map(lambda answer: answer.read(), answers))
        assert [sum(b"completions" in line for line in text.split(b"\n")) for text in texts] == [
            3
        ] * 41
        assert child.wait(LIMIT_S) == 0
        assert ask(address, "GET", "/health") == (0, None)


def test_a_server_listens_at_an_address_of_ipv6() -> None:
    if not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with bind_address("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"
