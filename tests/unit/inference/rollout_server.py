"""A rollout server as a process, `tuneloop.inference.server` whole but for its engine, which says digits."""

import http.client
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.waiting import until
from tuneloop.formats.rollouts import Completion
from tuneloop.inference import guard, refusals, server
from tuneloop.inference.engines import Sampling, vllm
from tuneloop.inference.engines.vllm import Vllm
from tuneloop.kube import resize

ROOT = Path(__file__).parents[3]
BODY: Mapping[str, Any] = {"requests": [{"id": "a", "prompt_ids": [1, 2], "seeds": [7]}]}


class Digits(Vllm):
    """An engine of 64 tokens that says one of them for each prompt, after `DURATION_S` seconds."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        self.deterministic, self.determinism = False, {}
        self.args, self.context, self.version, self.digest = dict(args), 64, 0, "xxh3-128:00"
        self.engine, self.suspended = None, []
        self.dtype, self.files, self.tensor_proof = "float32", None, None
        self.duration_s = float(os.environ.get("DURATION_S", 0))
        self.running: dict[str, float] = {}

    def submit(
        self, key: str, prompt_ids: Sequence[int], seed: int, sampling: Sampling, **_: bool
    ) -> None:
        if not prompt_ids or max(prompt_ids) > 63:
            raise ValueError("prompt ids must be at least one, from 0 to 63")
        self.running[key] = time.monotonic() + self.duration_s

    def abort(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.running.pop(key, None)

    def flush(self) -> None: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self) -> None: ...

    def step(self) -> Iterator[tuple[str, Completion]]:
        time.sleep(0.001)
        for key in [key for key, end in self.running.items() if time.monotonic() > end]:
            del self.running[key]
            yield key, Completion([1], [-0.5], "stop", 0, 0)


@contextmanager
def serving(*flags: str, **env: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the process and its ``host:port`` once it serves."""
    command = [sys.executable, "-m", "tests.unit.inference.rollout_server", "--port", "0", *flags]
    about: Any = {
        "stderr": subprocess.PIPE,
        "text": True,
        "cwd": ROOT,
        "env": {**os.environ, **env},
    }
    with subprocess.Popen(command, **about) as child:
        assert child.stderr
        try:
            address = next(
                found[1] for line in child.stderr if (found := re.search(r"at http://(\S+)", line))
            )
            until(lambda: ask(address, "GET", "/health")[0] == 200, child=child)
            yield child, address
        finally:
            child.kill()


def ask(address: str, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and JSON of an answer, its last line; status 0 where nobody answers."""
    connection = http.client.HTTPConnection(address, timeout=300)
    try:
        text = body if isinstance(body, bytes | None) else json.dumps(body)
        connection.request(method, path, text, {"Content-Type": "application/json", **headers})
        answer = connection.getresponse()
        lines = [line for line in answer.read().split(b"\n") if line]
        return answer.status, json.loads(lines[-1]) if lines else None
    except (OSError, http.client.HTTPException):
        return 0, None
    finally:
        connection.close()


if __name__ == "__main__":
    guard.HEADERS_S = float(os.environ.get("HEADERS_S", guard.HEADERS_S))
    refusals.REFUSAL_S = float(os.environ.get("REFUSAL_S", refusals.REFUSAL_S))
    guard.STRANGERS = int(os.environ.get("STRANGERS", guard.STRANGERS))
    resize.ACCOUNT_FILES = os.environ.get("ACCOUNT_FILES", resize.ACCOUNT_FILES)
    resize.PAUSE_S = 0.05
    vllm.Vllm = Digits  # type: ignore[misc]
    os._exit(server.main(sys.argv[1:]))
