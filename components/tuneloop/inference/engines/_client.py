"""The client of `tuneloop.inference.server`: an `Engine` over HTTP.

Requests are sent in groups, up to `PROMPTS` and `TOKENS` per POST. The reply is a stream of JSON lines, one per
finished request, with empty lines while nothing has finished: they tell a slow server from a dead one. Closing the
connection makes the server drop what it still runs.

When the server is lost, the client keeps the completions that it has, waits until the address answers again, loads the
policy there (a restarted server boots with its own ``--policy``), verifies it again, and requests the rest.
"""

import ipaddress
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.http import POLL_S, Response, Unanswered
from tuneloop.core.json_types import JsonObject
from tuneloop.formats.facts import VersionFacts
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.engines import Done, Engine, Sampling, TensorProof
from tuneloop.inference.engines._connection import Lost, open_answer, read_message, read_messages

Value = TypeVar("Value")
Finished = dict[int, list[Completion]]
PROMPTS = 4096
TOKENS = 2**19
"""Limits of one POST: a server accepts 4 MiB; a token id takes up to 8 bytes, a seed 24, the rest of a prompt 256."""
LOSSES = 3
"""The client gives up after so many losses of the server in a row without a finished request in between."""
IN_WORKFLOW = "TUNELOOP_NODE_NAME"
"""Set in every pod, on a cluster and on this machine."""
HERE_S = 1800.0
"""Seconds that a local workflow's server may be away: it is restarted at the same address, and loads for minutes."""
ELSEWHERE_S = 30.0
"""Seconds that another server may be away: a restarted pod's new address is only known to the stage's next attempt."""


class Client:
    """`Remote` over a running server.

    Every call waits while the server is away. It raises Retryable where that takes too long, where the server is lost
    `LOSSES` times in a row or is not ready in time, and UserError where the server refuses the request.

    Args:
        endpoint: ``http://host:port``.
        timeout_s: seconds without a byte after which the server counts as dead; also the limit for loading a version.
        sleeps: the server leases its device: `load` wakes it, and `close` puts it to sleep at vLLM's level 2,
            which drops the weights, or keeps them in its snapshot. Untested: it needs a GPU.
        deterministic: require a deterministic server, and discard a lost POST whole: its rest would be another batch.
        patience_s: seconds that the server may be away; default: `HERE_S` or `ELSEWHERE_S`, and outside a workflow 0
            for an address that never answered.

    Attributes:
        fail_fast: give up on a lost server at once; other replicas take its requests.
        pulled: the timings of the last pull, if the server follows published versions.
        determinism: `Vllm.determinism` of a deterministic server.
        keep_s: seconds for which the server keeps the weights that `load` loads, unless it generates with them sooner.
    """

    name = "vllm"

    def __init__(
        self,
        endpoint: str,
        timeout_s: float,
        *,
        sleeps: bool = False,
        deterministic: bool = False,
        patience_s: float | None = None,
    ) -> None:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError("--endpoint", endpoint, "must be an absolute URL: http://host:port")
        self.endpoint = endpoint.rstrip("/")
        self.timeout_s = timeout_s
        self._parts = parts
        self.sleeps = sleeps
        self._patience_s = patience_s
        self._met = False
        self.context = 0
        self.version = -1
        self.digest = ""
        self.pulled: JsonObject = {}
        self.deterministic = deterministic
        self.determinism = JsonObject()
        self.fail_fast = False
        self.keep_s = 0.0
        self.check: Callable[[], None] = lambda: None
        self.prove: Callable[[Engine], None] = lambda _: None
        self._policy: Artifact | None = None
        self._tensor_proof: JsonObject | None = None
        self._renewing = False
        self._given_up = False

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        self._persist(lambda: self._load(policy, force))
        self._policy = policy

    def generate(
        self, requests: Sequence[Request], sampling: Sampling, done: Done
    ) -> list[list[Completion]]:
        results: Finished = {}
        self.generate_into(dict(enumerate(requests)), sampling, results, done)
        return [results[i] for i in range(len(requests))]

    def generate_into(
        self,
        requests: Mapping[int, Request],
        sampling: Sampling,
        results: Finished,
        done: Done,
        **more: Any,
    ) -> None:
        """Add the missing completions to `results`, under the keys of `requests`. `more`: other fields of the body."""

        longest = max(
            (len(each.prompt_ids) + 3 * len(each.seeds) + 32 for each in requests.values()),
            default=1,
        )
        size = min(PROMPTS, TOKENS // longest) or 1

        def attempt() -> None:
            while left := [i for i in requests if i not in results][:size]:
                waiting = [asdict(requests[i]) for i in left]
                finished = len(results) + len(left)
                made, before = (
                    (dict[int, list[Completion]](), len(results))
                    if self.deterministic
                    else (results, 0)
                )
                body = {
                    "requests": waiting,
                    "sampling": asdict(sampling),
                    "version": self.version,
                } | more
                body["digest"] = self.digest or None  # nothing was loaded: any weights will do
                with self._open("POST", "/generate", body) as response:
                    for answer in read_messages(response):
                        made[left[answer["index"]]] = [
                            Completion(**c) for c in answer["completions"]
                        ]
                        done(before + len(made))
                        if before + len(made) == finished:
                            break
                    else:
                        raise Lost(
                            f"broke off after {before + len(made)} of {len(requests)} requests"
                        )
                results.update(made)

        self._persist(attempt, self._renew, lambda: len(results), len(requests))

    def score(self, ids: Sequence[int]) -> list[float]:
        results: Finished = {}
        request = Request("score", list(ids), [0])
        sampling = Sampling(0.0, 1)
        self.generate_into({0: request}, sampling, results, lambda _: None, prompt_logprobs=True)
        return results[0][0].prompt_logprobs or []

    def read_back(self, policy: Artifact) -> TensorProof | None:
        """Return what the server found when it read back the tensors of the version that it serves;
        None from a server that does not do that."""
        if self._tensor_proof is None:
            return None
        try:
            return TensorProof(**self._tensor_proof)
        except TypeError as error:
            remedy = f"describes its tensors in another form ({error}); update the server"
            raise UserError("--endpoint", self.endpoint, remedy) from error

    def close(self) -> None:
        """Release the device if it is leased; connections live only as long as a call."""
        if self.sleeps and not self._given_up:
            self._persist(lambda: self._json("POST", "/sleep", {"level": 2}))

    # A server that is lost

    def _persist(
        self,
        attempt: Callable[[], Value],
        renew: Callable[[], None] = lambda: None,
        finished: Callable[[], int] = lambda: 0,
        total: int = 0,
    ) -> Value:
        """Return the result of `attempt`, which is repeated after each loss of the server, once the server answers
        again and `renew` has made it ready. `finished` counts the finished requests of `total`."""
        if self._renewing:  # the outer call counts this loss
            return attempt()
        losses = 0
        before = 0
        renewed = True
        while True:
            try:
                if not renewed:
                    renew()
                    renewed = True
                return attempt()
            except Lost as lost:
                now = finished()
                renewed = False
                losses = 1 if now > before else losses + 1
                before = now
                if losses == LOSSES:
                    self._given_up = True
                    raise Retryable(
                        f"{lost}; lost {losses} times in a row without a request finished"
                    ) from lost
                self._await_return(lost, now, total)

    def _renew(self) -> None:
        """Load and verify the policy again, as the server may be another process now."""
        if self._policy is None:
            return
        self._renewing = True
        try:
            self._load(self._policy, False)
            self.prove(self)
        finally:
            self._renewing = False

    def _await_return(self, lost: Lost, finished: int, total: int) -> None:
        """Wait until the server answers again, whatever it serves."""
        kept = f"; {finished} of {total} requests are finished, and kept" if total else ""
        _say(
            f"lost the server ({lost}){kept}; {'looks for it once more' if self.fail_fast else 'waits for it'}"
        )
        begun = time.monotonic()
        while True:
            self.check()
            time.sleep(POLL_S)
            try:
                self._json("GET", "/version")
                break
            except Lost as still:
                if (seconds := time.monotonic() - begun) > self._patience():
                    self._given_up = True
                    raise Lost(f"{still}; it has been away for {seconds:.0f} s") from lost
        left = f"; asks it for the {total - finished} requests that are left" if total else ""
        _say(f"{self.endpoint} answers again after {time.monotonic() - begun:.1f} s{left}")

    def _patience(self) -> float:
        if self.fail_fast:
            return 0.0
        if self._patience_s is not None:
            return self._patience_s
        if IN_WORKFLOW in os.environ:
            return HERE_S if _is_loopback(self._parts.hostname or "") else ELSEWHERE_S
        return ELSEWHERE_S if self._met else 0.0

    # What is asked

    def _load(self, policy: Artifact, force: bool) -> None:
        if self.sleeps:
            self._json("POST", "/wake_up", {})
        served = self._json("GET", "/version")
        wanted = VersionFacts.read(policy).version, policy.manifest.digest
        if force or (served["version"], served["digest"]) != wanted:
            request = {"ref": policy.ref, "version": wanted[0], "force": force}
            request |= {"keep_s": self.keep_s} if self.keep_s else {}
            served = self._json("POST", "/load", request)
        self.context = served["context"]
        self.version = served["version"]
        self.digest = served["digest"]
        self.pulled = served.get("pulled") or {}
        self._tensor_proof = served.get("tensors")
        self.determinism = served.get("determinism") or {}
        if self.deterministic and not self.determinism:
            remedy = "its server is not deterministic; start it with --engine-args '{\"deterministic\": true}'"
            raise UserError("--endpoint", self.endpoint, remedy)

    def _json(self, method: str, path: str, body: Any = None) -> Any:
        with self._open(method, path, body) as response:
            return read_message(response.read())

    @contextmanager
    def _open(self, method: str, path: str, body: Any = None) -> Iterator[Response]:
        """Yield an answer with status 200; ask again while the server is loading (409)."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                with open_answer(
                    method,
                    self.endpoint + path,
                    server=self.endpoint,
                    timeout_s=self.timeout_s,
                    body=body,
                    check=self.check,
                ) as response:
                    self._met = True
                    yield response
                    return
            except Lost as lost:
                self._met = self._met or lost.status is not None
                # If the server had the policy, 409 means that it is another process now, or that another policy was
                # loaded.
                has_changed = self._policy is not None and path != "/load"
                if lost.status != 409 or has_changed:
                    raise self._locate(lost) from lost
                if time.monotonic() > deadline:
                    raise Retryable(f"{self.endpoint}: {lost}") from lost
            self.check()
            time.sleep(POLL_S)

    def _locate(self, lost: Lost) -> Lost:
        """Return a loss whose message names the server."""
        is_unanswered = isinstance(lost.__cause__, Unanswered | ValueError)
        hint = "; is `python -m tuneloop.inference.server` running there?" if is_unanswered else ""
        return Lost(f"{self.endpoint}: {lost}{hint}", lost.status)


def _say(line: str) -> None:
    print(f"engine: {line}", file=sys.stderr, flush=True)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
