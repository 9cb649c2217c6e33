"""An endpoint of another make: the protocol over a small Markov model, with faults to plant.

Standard library and NumPy; it knows nothing of tuneloop.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

VOCABULARY = 64
TOKEN_S = 0.002
"""Seconds a token of a flood takes; requests queue behind one another."""


class Model:
    """Next-token logits from the last two tokens; another version has other ones."""

    def __init__(self, version: int) -> None:
        rng = np.random.default_rng(version)
        self.last, self.before = rng.normal(0, 1.5, (2, VOCABULARY, VOCABULARY))

    def logprobs(self, ids: list[int], temperature: float = 1.0) -> Any:
        logits = (self.last[ids[-1]] + self.before[ids[-2] if len(ids) > 1 else 0]) / (
            temperature or 1.0
        )
        logits = logits - logits.max()
        return logits - np.log(np.exp(logits).sum())


class Peer:
    """What the endpoint answers; `fault` names the one thing that it does wrong."""

    def __init__(self, version: int = 3, fault: str = "") -> None:
        self.version, self.fault = version, fault
        self.model = Model(version - 1 if fault == "stale weights" else version)
        self.queue = threading.Lock()
        self.lost_after: int | None = None
        """Break off the next stream after so many tokens, once."""
        self.asked: list[dict[str, Any]] = []

    def refuse(self, body: dict[str, Any]) -> tuple[int, str] | None:
        wanted, least = body.get("version"), body.get("min_version")
        if self.fault not in (
            "serves any version",
            "echoes the demanded version",
        ) and wanted not in (
            None,
            self.version,
        ):
            return 409, f"serves {self.version}"
        if self.fault != "ignores the minimum" and least is not None and least > self.version:
            return 409, f"serves {self.version}"
        for request in body["requests"]:
            bad = not request["prompt_ids"] or not all(
                0 <= i < VOCABULARY for i in request["prompt_ids"]
            )
            if bad and self.fault != "takes any ids":
                return 400, "no such ids"
        return None

    def complete(
        self, request: dict[str, Any], sample: int, body: dict[str, Any]
    ) -> Iterator[tuple[int, float]]:
        """Tokens and their log-probabilities."""
        how = body["sampling"]
        ids = [i % VOCABULARY for i in request["prompt_ids"]] or [0]
        if self.fault == "retokenizes the prompt":
            ids = [b for a, b in zip([-1, *ids], ids) if b != a + 1 and b % 7]
        seed = request["seeds"][sample]
        if self.fault == "ignores seeds":
            seed = 0
        rng = np.random.default_rng(time.time_ns() if self.fault == "samples at random" else seed)
        limit = how["max_tokens"] + (self.fault == "one token too many")
        for _ in range(limit):
            dist = self.model.logprobs(ids, how["temperature"])
            if self.fault == "cuts the distribution":
                dist = np.where(dist >= np.sort(dist)[-5], dist, -np.inf)
                dist = dist - np.log(np.exp(dist).sum())
            token = int(
                dist.argmax() if not how["temperature"] else rng.choice(VOCABULARY, p=np.exp(dist))
            )
            raw = self.fault == "log-probabilities before temperature" or not how["temperature"]
            yield token, float((self.model.logprobs(ids) if raw else dist)[token])
            ids = [*ids, token]
            if token in how["stop_token_ids"] and self.fault != "runs past stop tokens":
                return

    def scores(self, ids: list[int]) -> list[float]:
        known = [i % VOCABULARY for i in ids]
        made = [float(self.model.logprobs(known[:k])[known[k]]) for k in range(1, len(known))]
        return (
            made[1:] + made[:1] if self.fault == "shifts the prompt's log-probabilities" else made
        )

    def lines(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        version = self.version + 1 if self.fault == "another version echoed" else self.version
        if self.fault == "echoes the demanded version":
            version = body.get("version") or version
        order = list(enumerate(body["requests"]))
        for index, request in reversed(order):
            made = []
            for sample in range(len(request["seeds"])):
                tokens = []
                for token, logprob in self.complete(request, sample, body):
                    tokens.append((token, logprob))
                    if body.get("stream") and not (
                        self.fault == "streams too little" and len(tokens) == 2
                    ):
                        yield {
                            "index": index,
                            "sample": sample,
                            "ids": [token],
                            "logprobs": [logprob],
                            "version": version,
                        }
                    if self.lost_after is not None and len(tokens) >= self.lost_after:
                        self.lost_after = None
                        return
                    if len(request["seeds"]) >= 64 and body["sampling"]["max_tokens"] > 100:
                        time.sleep(TOKEN_S)
                        yield {}  # a sign of life, and how hanging up is noticed
                stopped = tokens[-1][0] in body["sampling"]["stop_token_ids"]
                if stopped and self.fault == "drops the stop token":
                    tokens.pop()
                if self.fault == "loses a log-probability":
                    tokens[-1] = (tokens[-1][0], float("nan"))
                said = {
                    "ids": [t for t, _ in tokens],
                    "logprobs": [p for _, p in tokens],
                    "finish_reason": "stop" if stopped else "length",
                    "start_version": version,
                    "end_version": version,
                }
                if self.fault in ODD:
                    said |= ODD[self.fault]
                if body.get("prompt_logprobs"):
                    said["prompt_logprobs"] = self.scores(request["prompt_ids"])
                made.append(said)
            swapped = self.fault == "mixes answers up" and len(order) > 1
            yield {"index": len(order) - 1 - index if swapped else index, "completions": made}


ODD: dict[str, dict[str, Any]] = {
    "ids that are no integers": {"ids": [5.0, 6.0], "logprobs": [-1.0, -1.0]},
    "an id beyond the vocabulary": {"ids": [5, 99999999], "logprobs": [-1.0, -1.0]},
    "a negative id": {"ids": [5, -1], "logprobs": [-1.0, -1.0]},
    "log-probabilities as text": {"ids": [5], "logprobs": ["-1"]},
    "a version as text": {"start_version": "3"},
    "no ids": {"ids": None},
    "a reason of its own": {"finish_reason": "tired"},
    "a field of its own": {"mood": "good"},
}
"""Faults of a completion's form → what it says instead."""


@contextmanager
def serving(peer: Peer) -> Iterator[str]:
    """Its URL, while it serves; requests are worked on one after the other."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self.path != "/generate":
                self.send_error(404)
                return
            peer.asked.append(body)
            refused = peer.refuse(body)
            self.send_response(refused[0] if refused else 200)
            self.end_headers()
            if refused:
                self.wfile.write(json.dumps({"error": refused[1]}).encode())
                return
            with peer.queue:
                self.work(body)

        def work(self, body: dict[str, Any]) -> None:
            gone = False
            for line in peer.lines(body):
                try:
                    if not gone:
                        self.wfile.write(json.dumps(line).encode() + b"\n" if line else b"\n")
                except OSError:
                    gone = peer.fault == "works for who hung up"
                    if not gone:
                        return

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()
