"""The client of `tuneloop.serve`: an `Engine` at the other end of HTTP.

Requests are sent grouped, one POST a batch; the reply is a stream of JSON lines, one a finished request, with
empty lines in between while nothing has finished, so that a dead server is told from a slow one. Closing the
connection makes the server drop what it still runs.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from tuneloop.artifacts import Artifact
from tuneloop.engines import Completion, Request, Sampling
from tuneloop.errors import Retryable, UserError


class Client:
    """`Engine` over a running server.

    Args:
        endpoint: ``http://host:port``.
        timeout_s: seconds without a byte after which the server counts as dead; also how long to wait for it to
            load a version.
        sleeps: it has its device by turns: it is woken to load, and put to sleep on `close`, where it drops its weights
            (vLLM's level 2): there are others by the time it is woken. Not run: there was no GPU.

    Attributes:
        pulled: where the server follows published versions, what the last pull took.

    Every call raises `Retryable` where the server can not be reached, breaks off or is not ready in time, and
    `UserError` where it refuses what was asked.
    """

    name = "vllm"

    def __init__(self, endpoint: str, timeout_s: float, *, sleeps: bool = False) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError("--endpoint", endpoint, "must be an absolute URL: http://host:port")
        self.endpoint, self.timeout_s, self._parts, self.sleeps = endpoint.rstrip("/"), timeout_s, parts, sleeps
        self.context, self.version, self.digest = 0, -1, ""
        self.pulled: dict[str, Any] = {}

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        if self.sleeps:
            self._json("POST", "/wake_up", {})
        served = self._json("GET", "/version")
        about = policy.manifest.facts["version"], policy.manifest.digest
        if force or (served["version"], served["digest"]) != about:
            asked = {"ref": policy.ref, "version": policy.manifest.facts["version"], "force": force}
            served = self._json("POST", "/load", asked)
        self.context, self.version, self.digest = served["context"], served["version"], served["digest"]
        self.pulled = served.get("pulled") or {}

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, done: Callable[[int], None]
    ) -> list[list[Completion]]:
        body = {"requests": [asdict(r) for r in requests], "sampling": asdict(sampling), "version": self.version}
        results: dict[int, list[Completion]] = {}
        with self._open("POST", "/generate", body) as reply:
            while len(results) < len(requests):
                line = reply.readline()
                if not line:
                    raise Retryable(f"{self.endpoint}: broke off after {len(results)} of {len(requests)} requests")
                if line.strip():
                    said = json.loads(line)
                    if "error" in said:
                        raise Retryable(f"{self.endpoint}: {said['error']}")
                    results[said["index"]] = [Completion(**c) for c in said["completions"]]
                done(len(results))
        return [results[i] for i in range(len(requests))]

    def score(self, ids: Sequence[int]) -> list[float]:
        scored: list[float] = self._json("POST", "/score", {"ids": list(ids), "version": self.version})["logprobs"]
        return scored

    def close(self) -> None:
        """Give the device back, if it is had by turns; connections live as long as a call."""
        if self.sleeps:
            self._json("POST", "/sleep", {"level": 2})

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        with self._open(method, path, body) as reply:
            return json.loads(reply.read())

    @contextmanager
    def _open(self, method: str, path: str, body: Any = None) -> Iterator[http.client.HTTPResponse]:
        """An answered request with status 200; asked again while the server is loading (409)."""
        deadline = time.monotonic() + self.timeout_s
        secure = self._parts.scheme == "https"
        connect = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = connect(self._parts.hostname or "", self._parts.port, timeout=self.timeout_s)
        data = None if body is None else json.dumps(body).encode()
        try:
            while True:
                connection.request(
                    method, self._parts.path.rstrip("/") + path, data, {"Content-Type": "application/json"}
                )
                reply = connection.getresponse()
                if reply.status == 200:
                    yield reply
                    return
                self._refused(reply, time.monotonic() > deadline)
                time.sleep(0.2)
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise Retryable(f"{self.endpoint}: {reason}; is `python -m tuneloop.serve` running there?") from error
        finally:
            connection.close()

    def _refused(self, reply: http.client.HTTPResponse, late: bool) -> None:
        """Raise what the answer means; return where asking again may help."""
        text = reply.read().decode(errors="replace")
        try:
            text = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError):
            text = text[:300]
        if reply.status < 500 and reply.status != 409:
            raise UserError("--endpoint", self.endpoint, f"answers {reply.status}: {text}")
        if late or reply.status != 409:
            raise Retryable(f"{self.endpoint}: answers {reply.status}: {text}")
