"""A gateway, a rollout server and their honest callers beside hostile ones; benchmarks/hostile_connections.py has more
of these, and the times."""

import asyncio
import contextlib
import http.client
import http.server
import json
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kubernetes import client

from benchmarks.hostile_connections import KINDS, SERVERS, besiege
from tests.unit.inference.rollout_server import ROOT, serving
from tests.waiting import LIMIT_S, until
from tuneloop.core.server_token import VARIABLE, create_token_file
from tuneloop.extensions.gateway.access import Caller, TokenReviews
from tuneloop.inference.refusals import Refused


@pytest.mark.parametrize("server", SERVERS)
def test_honest_requests_are_all_answered_beside_a_hundred_hostile_connections(
    server: str, tmp_path: Path
) -> None:
    """Of each kind of the benchmark; it goes on after them."""
    with SERVERS[server](tmp_path) as honest:
        measures, opened = besiege(honest, 100, 3.0, 1.0)
    assert opened.keys() == KINDS.keys()
    assert all(count >= 10 for count in opened.values())
    for each in measures:
        assert each.times and each.other == {}, each


@pytest.fixture
def token(tmp_path: Path) -> tuple[str, str]:
    """Path and text of a run's token."""
    create_token_file(tmp_path / "token")
    return str(tmp_path / "token"), (tmp_path / "token").read_text().strip()


def connect(address: str) -> socket.socket:
    host, _, port = address.partition(":")
    return socket.create_connection((host, int(port)), timeout=LIMIT_S)


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed it; what it has sent before is read."""
    connection.settimeout(0.01)
    try:
        while connection.recv(2**16):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True


def ask_version(connection: http.client.HTTPConnection, token: str) -> int:
    connection.request("GET", "/version", headers={"Authorization": f"Bearer {token}"})
    answer = connection.getresponse()
    answer.read()
    return answer.status


def test_the_oldest_of_too_many_without_a_token_make_room(token: tuple[str, str]) -> None:
    with serving(**{VARIABLE: token[0], "STRANGERS": "20", "HEADERS_S": "100000"}) as (_, address):
        kept = http.client.HTTPConnection(address, timeout=LIMIT_S)
        assert ask_version(kept, token[1]) == 200
        refused = http.client.HTTPConnection(address, timeout=LIMIT_S)
        assert ask_version(refused, "wrong") == 401 and refused.sock is None, (
            "it was told that it is closed"
        )
        silent = [connect(address) for _ in range(60)]
        until(lambda: sum(map(is_closed, silent)) == 40)
        assert [is_closed(each) for each in silent] == [True] * 40 + [False] * 20
        assert ask_version(kept, token[1]) == 200, "it is the oldest of all, and was not closed"
        assert ask_version(http.client.HTTPConnection(address, timeout=LIMIT_S), token[1]) == 200
        for each in silent:
            each.close()


def flood(connection: socket.socket, part: bytes) -> None:
    """Send for as long as the other side holds the connection, and read nothing."""
    connection.settimeout(0.2)
    try:
        while True:
            with contextlib.suppress(TimeoutError):
                connection.sendall(part)
    except OSError:
        connection.close()


def test_a_refused_caller_does_not_hold_its_connection(token: tuple[str, str]) -> None:
    """Neither by a body that goes on after the 401, nor by asking without end and reading nothing."""
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
    with serving(**{VARIABLE: token[0], "HEADERS_S": "3"}) as (child, address):
        kept = http.client.HTTPConnection(address, timeout=LIMIT_S)
        assert ask_version(kept, token[1]) == 200
        drips, deaf = connect(address), connect(address)
        drips.sendall(head % 10**6)
        threads = [
            threading.Thread(target=flood, args=args)
            for args in ((drips, b"a"), (deaf, head % 0 * 1000))
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join(LIMIT_S)
            assert not each.is_alive(), "it was closed"
        assert ask_version(kept, token[1]) == 200, "who has a token keeps his"
        limits = Path(f"/proc/{child.pid}/limits").read_text()
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        assert int(limits.partition("Max open files")[2].split()[0]) >= min(hard, 2**16)


def test_what_is_no_http_is_answered_late_and_once(token: tuple[str, str]) -> None:
    """One that is gone by then leaves no word in the log, in which a line for each would be a stranger's to write."""
    with serving(**{VARIABLE: token[0], "REFUSAL_S": "0.5"}) as (child, address):
        begun = time.monotonic()
        stays, gone = connect(address), connect(address)
        for each in (stays, gone):
            each.sendall(b"\x16\x03\x01 no HTTP\r\n\r\n")
        gone.close()
        answer = b"".join(iter(lambda: stays.recv(2**16), b""))
        assert (
            time.monotonic() - begun >= 0.5
            and answer.startswith(b"HTTP/1.1 400 ")
            and answer.count(b"HTTP") == 2
        )
        assert ask_version(http.client.HTTPConnection(address, timeout=LIMIT_S), token[1]) == 200
        child.send_signal(signal.SIGTERM)
        assert child.stderr and child.stderr.read() == ""


class ReviewServer(http.server.ThreadingHTTPServer):
    """An API server that knows one token, and takes as long for others as `decided` is not set."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ReviewHandler)
        self.decided, self.asked, self.known = threading.Event(), 0, 0


class ReviewHandler(http.server.BaseHTTPRequestHandler):
    server: ReviewServer

    def do_POST(self) -> None:
        given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["spec"]["token"]
        if given == "known":
            self.server.known += 1
        else:
            self.server.asked += 1
            assert self.server.decided.wait(LIMIT_S)
        user = {"username": "system:serviceaccount:team-a:ci"}
        status = {"authenticated": given == "known", "audiences": ["gateway"], "user": user}
        text = json.dumps({"spec": {"token": given}, "status": status}).encode()
        self.send_response(201)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def reviews() -> Iterator[tuple[ReviewServer, TokenReviews]]:
    with ReviewServer() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        api = client.ApiClient(client.Configuration(host=f"http://127.0.0.1:{server.server_port}"))
        yield server, TokenReviews(api, "gateway")
        server.decided.set()
        server.shutdown()


def test_a_flood_of_tokens_makes_no_known_caller_wait(
    reviews: tuple[ReviewServer, TokenReviews], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API server has not decided on any of a hundred others; the known one is asked for again meanwhile."""
    server, access = reviews

    async def flood_and_ask() -> None:
        assert await access.caller("known") == Caller(
            "system:serviceaccount:team-a:ci", namespace="team-a"
        )
        assert await access.caller("known") and server.known == 1, "it is remembered"
        others = [asyncio.create_task(access.caller(f"other-{number}")) for number in range(100)]
        while server.asked < 4:
            await asyncio.sleep(0.01)
        monkeypatch.setattr("tuneloop.extensions.gateway.access.REMEMBERED_S", 0.0)
        assert await access.caller("known") and server.known == 2
        assert server.asked == 4 and not any(each.done() for each in others)
        server.decided.set()
        assert await asyncio.gather(*others) == [None] * 100

    asyncio.run(flood_and_ask())


def test_a_refused_token_is_asked_for_once_and_drives_out_no_caller(
    reviews: tuple[ReviewServer, TokenReviews], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, access = reviews
    server.decided.set()
    monkeypatch.setattr("tuneloop.extensions.gateway.access.MOST_ANSWERS", 2)
    monkeypatch.setattr("tuneloop.extensions.gateway.access.REMEMBERED_S", 3600.0)

    async def ask() -> None:
        assert await access.caller("known")
        for _ in range(3):
            assert await access.caller("wrong") is None
        assert server.asked == 1, "it is remembered"
        for number in range(3):
            assert await access.caller(f"other-{number}") is None
        assert await access.caller("known") and (server.asked, server.known) == (4, 1)
        assert await access.caller("other-2") is None and server.asked == 4
        assert await access.caller("wrong") is None and server.asked == 5, (
            "more than two are not remembered"
        )
        monkeypatch.setattr("tuneloop.extensions.gateway.access.REMEMBERED_S", 0.0)
        assert await access.caller("wrong") is None and server.asked == 6

    asyncio.run(ask())


def test_who_would_wait_behind_too_many_tokens_is_to_try_again(
    reviews: tuple[ReviewServer, TokenReviews], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, access = reviews
    monkeypatch.setattr("tuneloop.extensions.gateway.access.MOST_WAITING", 9)

    async def flood() -> None:
        others = [asyncio.create_task(access.caller(f"other-{number}")) for number in range(20)]
        while server.asked < 4 or sum(each.done() for each in others) < 11:
            await asyncio.sleep(0.01)
        server.decided.set()
        answers = await asyncio.gather(*others, return_exceptions=True)
        refused = [each for each in answers if isinstance(each, Refused)]
        assert [each.status for each in refused] == [503] * 11 and "9 tokens wait" in str(
            refused[0]
        )
        assert answers.count(None) == 9 and server.asked == 9
        assert await access.caller("known"), "there is room again"

    asyncio.run(flood())


@pytest.mark.slow
def test_the_benchmark_runs(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "benchmarks/hostile_connections.py",
        "--connections",
        "10",
        "--seconds",
        "1",
    ]
    told = subprocess.run(
        [*command, "--idle", "0.5"], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert told.returncode == 0, told.stderr
    assert [line.split()[0] for line in told.stdout.splitlines()[2:5]] == [
        "idle",
        "attacked",
        "after",
    ]
