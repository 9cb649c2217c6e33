"""A judge that misbehaves, over HTTP, and rewards that ask it."""

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tuneloop.rewards import RewardUnavailable

ADDRESS = "TESTS_JUDGE"
"""Variable that names the judge."""
COSTLY = True
FORM = {"content-type": "application/json"}
Answer = tuple[int, dict[str, str], bytes]


def good(score: float = 0.5) -> Answer:
    return 200, {}, json.dumps({"score": score}).encode()


TOO_MANY: Answer = (429, {"Retry-After": "0"}, b"slow down")


@dataclass
class Judge:
    """What a judge has been asked, and how it answers: by the number of the question and its completion.

    Attributes:
        answer: (number of the question, from 1, and the completion) → status, headers and body.
    """

    url: str = ""
    questions: list[str] = field(default_factory=list)
    answer: Callable[[int, str], Answer] = lambda number, completion: good()


@contextmanager
def serve_judge(port: int = 0) -> Iterator[Judge]:
    """Serve a judge on a thread, and name it in the environment."""
    judge = Judge()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            completion = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                judge.questions.append(completion)
                number = len(judge.questions)
            status, headers, body = judge.answer(number, completion)
            self.send_response(status)
            for name, value in (headers | FORM | {"content-length": str(len(body))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    judge.url = f"http://127.0.0.1:{server.server_port}/"
    os.environ[ADDRESS] = judge.url
    try:
        yield judge
    finally:
        server.shutdown()
        server.server_close()
        del os.environ[ADDRESS]


def ask_with_urllib(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """Ask as the plainest reward does; the gold answer needs no judge."""
    if completion == answer:
        return 1.0
    request = urllib.request.Request(os.environ[ADDRESS], json.dumps(completion).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        return float(json.loads(response.read())["score"])


def ask_with_httpx(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    import httpx

    response = httpx.post(os.environ[ADDRESS], json=completion, timeout=60)
    response.raise_for_status()
    return float(response.json()["score"])


def ask_with_requests(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    import requests

    response = requests.post(os.environ[ADDRESS], json=completion, timeout=60)
    response.raise_for_status()
    return float(response.json()["score"])


def ask_with_openai(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    import openai

    client = openai.OpenAI(base_url=os.environ[ADDRESS], api_key="none", max_retries=0)
    return float(client.post("/", body=completion, cast_to=object)["score"])  # type: ignore[index]


def ask_politely(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    try:
        return ask_with_urllib(completion, answer, metadata)
    except urllib.error.HTTPError as error:
        raise RewardUnavailable("the queue is full", retry_after_s=0.01) from error


def return_minus_one(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    return 1.0 if completion == answer else -1.0


def format_date(seconds_from_now: float, now: float) -> str:
    """Format a date as HTTP has it."""
    return formatdate(now + seconds_from_now, usegmt=True)
