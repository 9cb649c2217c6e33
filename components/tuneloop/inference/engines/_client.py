"""The client of `tuneloop.inference.server`: an `Engine` over HTTP.

Requests are sent in groups, up to `PROMPTS` and `TOKENS` per POST. The reply is a stream of JSON
lines, one per finished request, with empty lines while nothing has finished: they tell a slow
server from a dead one. Closing the connection makes the server drop what it still runs.

When the server is lost, the client keeps the completions that it has and waits until the address
answers again. It loads the policy there, as a restarted server boots with its own ``--policy``,
verifies it again, and requests the rest.

`inference/served.py` (`open_client`) opens it for stages, and the gateway for sessions
(`extensions/gateway/sampler.py`). Its requests and answers are those of `inference/http_api.py`:
both change together, and a server may be older or newer than its client. An older server ignores a
new field of a request. A new field of a completion is an error here.
"""

import ipaddress
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tuneloop.core.artifacts import Artifact
from tuneloop.core.errors import Retryable, UserError, print_diagnostic
from tuneloop.core.http import POLL_S, Response, Unanswered
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.formats.facts import VersionFacts
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.engines import Done, Engine, EngineReport, Sampling, TensorProof
from tuneloop.inference.engines._connection import (
    Ended,
    Form,
    Lost,
    open_answer,
    read_form,
    read_message,
    read_messages,
)

Value = TypeVar("Value")
Finished = dict[int, list[Completion]]
"""Key of a request → its completions."""
PROMPTS = 4096
"""Maximum requests in one POST; `GenerateBody` of `inference/http_api.py` takes more."""
TOKENS = 2**19
"""Maximum tokens in one POST, of requests that are padded to the longest: a server accepts 4 MiB
(`inference/http_api.py: BATCH_BYTES`).

A token id takes up to 8 bytes, a seed 24, the rest of a prompt 256 (`_count_requests_per_post`).
"""
LOSSES = 3
"""The client gives up after so many losses in a row without a finished request in between."""
IN_WORKFLOW = "TUNELOOP_NODE_NAME"
"""Set in every pod, on a cluster and on this machine (`argo/pod_fields.py`, `kfp/template.py`)."""
HERE_S = 1800.0
"""Seconds that a local workflow's server may be away.

It is restarted at the same address, and loads for minutes.
"""
ELSEWHERE_S = 30.0
"""Seconds that another server may be away.

The new address of a restarted pod is only known to the next attempt of the stage.
"""


class Client:
    """`Remote` over a running server.

    Every call waits while the server is away. It raises Retryable where that takes too long, where
    the server is lost `LOSSES` times in a row or is not ready in time, and UserError where the
    server refuses the request.

    Args:
        endpoint: ``http://host:port``.
        timeout_s: seconds without a byte after which the server counts as dead; also the limit for
            loading a version.
        sleeps: the server leases its device: `load` wakes it, and `close` puts it to sleep at
            level 2, which drops the weights, or keeps them in vLLM's snapshot. Untested: it needs
            a GPU.
        deterministic: require a deterministic server, and discard a lost POST whole: its rest would
            be another batch.
        patience_s: seconds that the server may be away; default: `HERE_S` or `ELSEWHERE_S`, and
            outside a workflow 0 for an address that never answered.

    Attributes:
        name: of the engine that the server has; vLLM's until a policy is loaded.
        fail_fast: give up on a lost server at once; other replicas take its requests.
        pulled: the timings of the last pull, if the server follows published versions.
        determinism: `ServedEngine.determinism` of a deterministic server.
        keep_s: seconds for which the server keeps the weights that `load` loads, unless it
            generates with them sooner.
    """

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
        self.name = "vllm"
        self.endpoint = endpoint.rstrip("/")
        self.timeout_s = timeout_s
        self.sleeps = sleeps
        self.deterministic = deterministic
        self.context = 0
        self.version = -1
        self.digest = ""
        self.pulled: JsonObject = {}
        self.determinism: JsonObject = {}
        self.fail_fast = False
        self.keep_s = 0.0
        self.check: Callable[[], None] = lambda: None
        self.prove: Callable[[Engine], None] = lambda _: None
        self._is_loopback = _is_loopback(parts.hostname)
        self._patience_s = patience_s
        self._policy: Artifact | None = None
        self._tensor_proof: JsonObject | None = None
        self._has_answered = False
        self._is_renewing = False
        self._has_given_up = False

    def load(self, policy: Artifact, *, force: bool = False) -> None:
        self._persist(lambda: self._load(policy, force))
        self._policy = policy

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        done: Done,
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
        *,
        prompt_logprobs: bool = False,
    ) -> None:
        """Add the missing completions to `results`, under the keys of `requests`.

        `inference/engines/_replicas.py` calls it, so that what a lost server finished is kept.
        """
        batch = _count_requests_per_post(requests.values())

        def attempt() -> None:
            missing = [key for key in requests if key not in results]
            while missing:
                part = {key: requests[key] for key in missing[:batch]}
                self._post(part, len(requests), sampling, results, done, prompt_logprobs)
                missing = missing[batch:]

        self._persist(attempt, self._renew, results, len(requests))

    def score(self, ids: Sequence[int]) -> list[float]:
        results: Finished = {}
        request = Request("score", list(ids), [0])
        sampling = Sampling(0.0, 1)
        self.generate_into({0: request}, sampling, results, lambda _: None, prompt_logprobs=True)
        return results[0][0].prompt_logprobs or []

    def report(self) -> EngineReport:
        return EngineReport(pulled=self.pulled, determinism=self.determinism)

    def read_back(self, policy: Artifact) -> TensorProof | None:
        """Return what the server found when it read back the tensors of the version it serves.

        None from a server that does not do that.
        """
        if self._tensor_proof is None:
            return None
        return self._read(TensorProof, self._tensor_proof)

    def close(self) -> None:
        """Release the device if it is leased; connections live only as long as a call."""
        if self.sleeps and not self._has_given_up:
            self._persist(lambda: self._json("POST", "/sleep", {"level": 2}))

    # A server that is lost

    def _persist(
        self,
        attempt: Callable[[], Value],
        renew: Callable[[], None] = lambda: None,
        results: Finished | None = None,
        total: int = 0,
    ) -> Value:
        """Return the result of `attempt`, which is repeated after each loss of the server.

        Args:
            attempt: raises Lost if the server is lost.
            renew: called once the server answers again; makes it ready for `attempt`.
            results: what the attempts have finished so far.
            total: requests that the attempts have to finish.
        """
        # The outer call counts a loss that happens while the server is made ready.
        if self._is_renewing:
            return attempt()
        losses = 0
        finished_before = 0
        is_ready = True
        while True:
            try:
                if not is_ready:
                    renew()
                    is_ready = True
                return attempt()
            except Lost as lost:
                finished = len(results or ())
                is_ready = False
                losses = 1 if finished > finished_before else losses + 1
                finished_before = finished
                if losses == LOSSES:
                    self._has_given_up = True
                    raise Retryable(
                        f"{lost}; lost {losses} times in a row without a request finished"
                    ) from lost
                self._await_return(lost, finished, total)

    def _renew(self) -> None:
        """Load and verify the policy again, as the server may be another process now."""
        if self._policy is None:
            return
        self._is_renewing = True
        try:
            self._load(self._policy, False)
            self.prove(self)
        finally:
            self._is_renewing = False

    def _await_return(self, lost: Lost, finished: int, total: int) -> None:
        """Wait until the server answers again, whatever it serves."""
        progress = f"; {finished} of {total} requests are finished, and kept" if total else ""
        next_step = "looks for it once more" if self.fail_fast else "waits for it"
        print_diagnostic(f"engine: lost the server ({lost}){progress}; {next_step}", 0)
        start = time.monotonic()
        while True:
            self.check()
            time.sleep(POLL_S)
            try:
                self._json("GET", "/version")
                break
            except Lost as still:
                seconds = time.monotonic() - start
                if seconds > self._choose_patience():
                    self._has_given_up = True
                    raise Lost(f"{still}; it has been away for {seconds:.0f} s") from lost
        seconds = time.monotonic() - start
        demand = f"; asks it for the {total - finished} requests that are left" if total else ""
        line = f"engine: {self.endpoint} answers again after {seconds:.1f} s{demand}"
        print_diagnostic(line, 0)

    def _choose_patience(self) -> float:
        """Return the seconds that the server may be away."""
        if self.fail_fast:
            return 0.0
        if self._patience_s is not None:
            return self._patience_s
        if IN_WORKFLOW in os.environ:
            return HERE_S if self._is_loopback else ELSEWHERE_S
        return ELSEWHERE_S if self._has_answered else 0.0

    # Requests

    def _load(self, policy: Artifact, force: bool) -> None:
        """Have the policy served, and take over what the server says of itself (``/version``)."""
        if self.sleeps:
            self._json("POST", "/wake_up", {})
        served = self._json("GET", "/version")
        version = VersionFacts.read(policy).version
        if force or (served["version"], served["digest"]) != (version, policy.manifest.digest):
            request = {"ref": policy.ref, "version": version, "force": force}
            if self.keep_s:
                request["keep_s"] = self.keep_s
            served = self._json("POST", "/load", request)
        self.name = served.get("engine", self.name)
        self.context = served["context"]
        self.version = served["version"]
        self.digest = served["digest"]
        self.pulled = served.get("pulled") or {}
        self._tensor_proof = served.get("tensors")
        self.determinism = served.get("determinism") or {}
        if self.deterministic and not self.determinism:
            remedy = (
                "its server is not deterministic; start it with "
                "--engine-args '{\"deterministic\": true}'"
            )
            raise UserError("--endpoint", self.endpoint, remedy)

    def _post(
        self,
        requests: Mapping[int, Request],
        total: int,
        sampling: Sampling,
        results: Finished,
        done: Done,
        prompt_logprobs: bool,
    ) -> None:
        """Have `requests` completed by one POST. Raises Lost where its answer breaks off."""
        keys = list(requests)
        # A deterministic batch counts only whole: its completions are kept apart until the last one
        # has arrived.
        received: Finished = {} if self.deterministic else results
        finished_before = len(results) if self.deterministic else 0
        finished_after = len(results) + len(keys)
        body: JsonObject = {
            "requests": [asdict(request) for request in requests.values()],
            "sampling": asdict(sampling),
            "version": self.version,
            # Where nothing was loaded, any weights will do.
            "digest": self.digest or None,
        }
        if prompt_logprobs:
            body["prompt_logprobs"] = True
        finished = len(results)
        with self._open("POST", "/generate", body) as response:
            for answer in read_messages(response):
                ended = self._read(Ended, answer)
                completions = [self._read(Completion, fields) for fields in ended.completions]
                # The engine gave it up: what is not finished is asked for again.
                if any(completion.finish_reason == "abort" for completion in completions):
                    raise Lost("a completion was aborted")
                received[keys[ended.index]] = completions
                finished = finished_before + len(received)
                done(finished)
                if finished == finished_after:
                    break
            else:
                raise Lost(f"broke off after {finished} of {total} requests")
        results.update(received)

    def _read(self, form: type[Form], fields: JsonMapping) -> Form:
        """Read a part of an answer. Raises UserError: it is of a newer or an older server."""
        return read_form(form, fields, self.endpoint, "run the same release here and there")

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
                    self._has_answered = True
                    yield response
                    return
            except Lost as lost:
                self._has_answered = self._has_answered or lost.status is not None
                # If the server had the policy, 409 means that it is another process now, or that
                # another policy was loaded.
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


def _count_requests_per_post(requests: Iterable[Request]) -> int:
    """Count the requests that fit into one POST, if each is as long as the longest."""
    # A seed has up to 24 bytes, as 3 tokens; the fields of a request 256, as 32.
    sizes = [len(request.prompt_ids) + 3 * len(request.seeds) + 32 for request in requests]
    return min(PROMPTS, TOKENS // max(sizes, default=1)) or 1


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
