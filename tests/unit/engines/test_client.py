"""The client against servers that misbehave; the real one is in tests/local."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.policies import commit_policy
from tuneloop.engines import Request, Sampling
from tuneloop.engines._client import Client
from tuneloop.errors import Retryable, UserError

REQUESTS = [Request("a", [1, 2], [0]), Request("b", [3], [1])]
SAID = {"ids": [5], "logprobs": [-0.5], "finish_reason": "stop", "start_version": 4, "end_version": 4}


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler, int], None]) -> Iterator[str]:
    """A server that answers each request by `answer(handler, number of the request)`."""
    count = 0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.do_POST()

        def do_POST(self) -> None:
            nonlocal count
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            count += 1
            answer(self, count)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def reply(handler: BaseHTTPRequestHandler, status: int, *lines: object) -> None:
    handler.send_response(status)
    handler.end_headers()
    handler.wfile.write(b"".join(b"\n" if line is None else json.dumps(line).encode() + b"\n" for line in lines))


def ask(endpoint: str, timeout_s: float = 60.0, seen: list[int] | None = None) -> list[list[int]]:
    made = Client(endpoint, timeout_s).generate(REQUESTS, Sampling(1.0, 4, ()), (seen or []).append)
    return [c.ids for group in made for c in group]  # type: ignore[misc]


def line(index: int, token: int) -> dict[str, object]:
    return {"index": index, "completions": [{**SAID, "ids": [token]}]}


def test_answers_come_back_in_the_order_of_the_requests() -> None:
    with serving(lambda h, _: reply(h, 200, None, line(1, 7), None, line(0, 6))) as endpoint:
        assert ask(endpoint) == [[6], [7]]


def test_waits_while_the_version_is_loading() -> None:
    def answer(handler: BaseHTTPRequestHandler, number: int) -> None:
        if number < 3:
            reply(handler, 409, {"error": "serves version 3"})
        else:
            reply(handler, 200, line(0, 6), line(1, 7))

    with serving(answer) as endpoint:
        assert ask(endpoint) == [[6], [7]]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda h, _: reply(h, 200, line(0, 6)), "broke off after 1 of 2"),
        (lambda h, _: reply(h, 200, line(0, 6), {"error": "the engine failed"}), "the engine failed"),
        (lambda h, _: reply(h, 503, {"error": "no version is loaded whole"}), "no version is loaded whole"),
        (lambda h, _: reply(h, 500), "answers 500"),
        (lambda h, _: h.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n{not json"), "JSONDecodeError"),
        (lambda h, _: None, "is `python -m tuneloop.serve` running there?"),
    ],
    ids=["breaks off", "engine fails", "poisoned", "bug", "garbage", "hangs up"],
)
def test_a_failing_server_is_worth_another_try(answer: Callable[..., None], said: str) -> None:
    with serving(answer) as endpoint, pytest.raises(Retryable, match=said):
        ask(endpoint)


def test_a_silent_server_is_given_up() -> None:
    release = threading.Event()
    with serving(lambda h, _: release.wait(60) and None) as endpoint, pytest.raises(Retryable, match="TimeoutError"):
        try:
            ask(endpoint, timeout_s=0.3)
        finally:
            release.set()


def test_409_is_given_up_in_time() -> None:
    with serving(lambda h, _: reply(h, 409, {"error": "serves version 3"})) as endpoint:
        with pytest.raises(Retryable, match="serves version 3"):
            ask(endpoint, timeout_s=2.0)  # in which the first answer is there, on a busy machine, too


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(Retryable, match=r"http://127\.0\.0\.1:9: ConnectionRefusedError"):
        Client("http://127.0.0.1:9", 1.0).load(commit_policy(tmp_path / "c"))


def test_a_refusal_is_the_users_mistake() -> None:
    with serving(lambda h, _: reply(h, 400, {"error": "request 0: too long"})) as endpoint:
        with pytest.raises(UserError, match="request 0: too long"):
            ask(endpoint)


def test_a_device_that_is_had_by_turns(tmp_path: Path) -> None:
    policy, asked = commit_policy(tmp_path / "c"), list[str]()
    served = {"version": 0, "digest": policy.manifest.digest, "context": 64}

    def answer(handler: BaseHTTPRequestHandler, _: int) -> None:
        asked.append(handler.path)
        reply(handler, 200, served)

    with serving(answer) as endpoint:
        for sleeps in (False, True):
            client = Client(endpoint, 60.0, sleeps=sleeps)
            client.load(policy, force=True)
            client.close()
    assert asked == ["/version", "/load", "/wake_up", "/version", "/load", "/sleep"]


@pytest.mark.parametrize("endpoint", ["localhost:8000", "ftp://x", "http://", ""])
def test_an_endpoint_is_a_url(endpoint: str) -> None:
    with pytest.raises(UserError, match="absolute URL"):
        Client(endpoint, 1.0)
