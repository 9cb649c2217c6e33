"""The HTTP interface of a rollout server, in token ids, without text.

docs/weights.md has its routes and refusals. All but ``/health`` and ``/metrics`` need the run's
token, where there is one (`tuneloop.core.server_token`).

It is an interface to other programs, too, such as a fleet's own client: routes and fields may be
added, and none is removed or renamed. `inference/server.py` starts it.

Clients of ours are `inference/engines/_client.py`, `inference/engines/endpoint.py` (only
``/generate``), `inference/fleet/__init__.py` (``/engine/…``), `extensions/fleets/autoscaler.py`
(``/metrics``) and `extensions/fleets/conformance.py`. A client may be older or newer than its server:
`GenerateBody` says what an older server does with a new field of a request, `_describe_completion`
what an older client does with a new field of an answer. ``docs/weights.md`` lists the routes; the
tests are `tests/unit/inference/test_client.py`, `tests/unit/inference/test_shared.py` and
`tests/unit/inference/test_fuzz.py`.
"""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from fastapi import Body, FastAPI
from fastapi.responses import PlainTextResponse, StreamingResponse
from pydantic import BaseModel, Field

from tuneloop.core.artifacts import Artifact, split_ref
from tuneloop.core.attempts import record_progress
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.store import Store
from tuneloop.formats.facts import VersionFacts
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.engine_loop import Emit, EngineLoop, Mode, Ticket
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines._tensors import Readback, digest_model
from tuneloop.inference.follower import Follower
from tuneloop.inference.guard import TokenGuard
from tuneloop.inference.refusals import Refused, create_app
from tuneloop.inference.served import PROBE, ServedEngine

ALWAYS = ("ids", "logprobs")
"""Fields of a completion that are sent even if they are empty."""
OPEN = ("/health", "/metrics")
"""Paths that need no token: kubelets, Prometheus and autoscalers have none."""
BATCH_BYTES = 2**22
"""Maximum bytes of a body of ``/generate``, unless one prompt needs more.

`inference/engines/_client.py: TOKENS` keeps its requests below it.
"""
ORDER_BYTES = 2**16
"""Maximum bytes of any other body."""
ID_BYTES = 8
"""Maximum bytes of a token id in a body: one prompt as long as the engine's context always fits."""
WAIT_S = 600.0
"""The maximum seconds that a request waits while the engine sleeps, wakes up or is paused."""
Status = dict[str, str]
"""The answer of a route that only says what it did."""
Version = Annotated[int, Field(ge=-(2**31), lt=2**31)]
"""A version of weights: 32 bits, as in the column ``policy_versions``
(`formats/rollouts.py: SCHEMA`).
"""


class GenerateBody(BaseModel):
    """The requests to generate for, and the versions that may answer them.

    A field that is not known here, nor in `Request` and `Sampling`, is ignored without a word: a
    newer client must not rely on it.
    """

    requests: list[Request] = Field(min_length=1, max_length=2**16)
    sampling: Sampling = Sampling()
    version: Version | None = None
    min_version: Version | None = None
    digest: str | None = None
    prompt_logprobs: bool = False
    stream: bool = False


class HttpApi:
    """The HTTP side of an `EngineLoop`.

    Attributes:
        loop: of the engine.
        follower: pulls published versions; None: clients load checkpoints.
        attempts: the store that counts this server's starts without an answer; None once it has
            given one.
        loading: held while a checkpoint is loaded, so that one load at a time waits for `used`.
        used: set once a client has generated with the weights that it loaded.
        reserved: the version and digest that was loaded last, which no other replaces before
            `reserved_until` unless it was used.
    """

    def __init__(
        self,
        loop: EngineLoop,
        follower: Follower | None = None,
        attempts: Store | None = None,
    ) -> None:
        self.loop = loop
        self.follower = follower
        self.attempts = attempts
        self.loading = threading.Lock()
        self.used = threading.Event()
        self.reserved_until = 0.0
        self.reserved: tuple[int, str] | None = None

    def app(self) -> FastAPI:
        """Build the application with all routes."""
        app = create_app(400)
        app.add_middleware(TokenGuard, open_paths=OPEN, max_bytes=self.limit_body)
        # FastAPI reads the signature of each method: it runs plain functions on threads.
        routes: dict[str, Callable[..., Any]] = {
            "GET /health": self.health,
            "GET /version": self.version,
            "GET /metrics": self.metrics,
            "POST /load": self.load,
            "POST /generate": self.generate,
            "POST /verify": self.verify,
            "POST /engine/pause_generation": self.pause,
            "POST /engine/update_weights_from_disk": self.update,
            "POST /engine/flush_cache": self.flush,
            "POST /engine/resume_generation": self.resume,
            "POST /engine/get_weight_version": self.label,
            "POST /sleep": self.sleep,
            "POST /wake_up": self.wake_up,
        }
        for route, answer in routes.items():
            method, path = route.split()
            app.add_api_route(path, answer, methods=[method], response_model=None)
        return app

    def limit_body(self, path: str) -> int:
        """Return the maximum bytes of a body.

        Parsing it (100 ms for 4 MiB of token ids) delays all other requests. A route that is added
        has `ORDER_BYTES`, unless it gets a limit here.
        """
        if path != "/generate":
            return ORDER_BYTES
        return ORDER_BYTES + max(BATCH_BYTES, ID_BYTES * self.loop.engine.context)

    def served(self) -> JsonObject:
        """Describe the version that is served, and how it came here.

        `Client._load` of `inference/engines/_client.py` reads it, and makes ``tensors`` a
        `TensorProof`. ``pulled`` becomes a note of the stage (`EngineReport`).
        """
        engine = self.loop.engine
        status: JsonObject = {
            "version": engine.version,
            "digest": engine.digest,
            "engine": engine.name,
            "context": engine.context,
        }
        if engine.tensor_proof:
            status["tensors"] = asdict(engine.tensor_proof)
        if engine.determinism:
            status["determinism"] = engine.determinism
        follower = self.follower
        if follower:
            # Read before `pulled`, which is set before `changing` is reset: a client that sees the
            # new version also sees its pull.
            if follower.changing == status["version"]:
                status |= {"version": -1, "digest": ""}
            status["follows"] = follower.store.url
            status["trouble"] = follower.trouble
            status["pulled"] = follower.pulled
            if follower.pulled:
                status["pulled"] = follower.pulled | {"converged_s": follower.converged_s()}
        return status

    async def health(self) -> Status:
        """Answer 503 while no version is served, so that nothing is routed here."""
        if self.loop.trouble:
            raise Refused(503, self.loop.trouble)
        return {"status": "ok"}

    async def version(self) -> JsonObject:
        """Answer with the version that is served, even if it is none."""
        return self.served()

    async def metrics(self) -> PlainTextResponse:
        """Answer in Prometheus' format, under the names that vLLM's own server has.

        `extensions/fleets/autoscaler.py: REQUESTS` reads them, from servers of any engine.
        """
        running, waiting = self.loop.engine.count_requests()
        return PlainTextResponse(
            f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n"
        )

    def load(
        self,
        ref: Annotated[str, Body()],
        version: Annotated[Version | None, Body()] = None,
        force: Annotated[bool, Body()] = False,
        keep_s: Annotated[float, Body(ge=0, le=60)] = 0.0,
    ) -> JsonObject:
        """Fetch and verify a policy while requests run, then change to it.

        No other load replaces it for `keep_s` seconds or until it has generated, so that clients
        that load different policies all get to generate.
        """
        if self.follower:
            digest = split_ref(ref)[1]
            if version is None or digest is None:
                remedy = "a server that follows needs the version, and a ref with a digest"
                raise UserError("ref", ref, remedy)
            self.follower.reach(version, digest, force=force)
            return self.served()
        policy = _fetch(ref)
        engine = self.loop.engine
        target = (VersionFacts.read(policy).version, policy.manifest.digest)
        with self.loading:
            if force or (engine.version, engine.digest) != target:
                if target != self.reserved:
                    self.used.wait(max(0.0, self.reserved_until - time.monotonic()))
                change_policy(self.loop, policy).result()
                self.used.clear()
                self.reserved = target
                self.reserved_until = time.monotonic() + keep_s
            return self.served()

    async def generate(self, body: GenerateBody) -> StreamingResponse:
        """Generate completions, and answer with a line of JSON for each request that is done."""
        if body.stream and body.prompt_logprobs:
            remedy = "cannot be combined with prompt_logprobs; request one of them"
            raise UserError("stream", True, remedy)
        http_loop = asyncio.get_running_loop()
        events = asyncio.Queue[tuple[int, Any]]()

        def emit(index: int, message: Any) -> None:
            # After the server has ended this fails, for which the engine is not to blame.
            with contextlib.suppress(RuntimeError):
                http_loop.call_soon_threadsafe(events.put_nowait, (index, message))

        ticket = await self._admit(body, emit)
        # Scores only prove weights.
        if not body.prompt_logprobs:
            self.used.set()
        answer = self._stream(ticket, events, body)
        return StreamingResponse(answer, media_type="application/x-ndjson")

    def verify(self) -> JsonObject:
        """Compare all that the engine holds with the files that it was loaded from."""
        if self.follower:
            version, comparison = self.follower.verify()
        else:
            version, comparison = self.loop.call(self._compare_files).result()
        return {"version": version, **asdict(comparison)}

    def _compare_files(self) -> tuple[int, Readback]:
        engine = self.loop.engine
        if engine.files is None:
            raise Refused(503, self.loop.trouble)
        try:
            return engine.version, engine.compare_files(engine.files, every=1)
        except OSError as error:
            remedy = f"the files of the version are gone ({error}); load it again"
            raise UserError("verify", str(engine.files), remedy) from error

    async def pause(self, mode: Annotated[Mode, Body(embed=True)] = "wait") -> Status:
        """Generate nothing until `resume`.

        Dynamo's callers also say ``clear_cache``, which a change does anyway.
        """
        return await self._run(self.loop.pause, mode)

    async def update(
        self,
        model_path: Annotated[str, Body()],
        weight_version: Annotated[str, Body(pattern=r"^\d+@\S+$")],
    ) -> Status:
        """Serve a verified checkpoint.

        `model_path` is its ``model`` directory or its reference, and `weight_version`
        ``<version>@<its digest>``.
        """
        if self.follower:
            remedy = "this server follows --weights; publish the version there"
            raise UserError("model_path", model_path, remedy)
        path = Path(model_path)
        digest = weight_version.partition("@")[2]
        # The checkpoint is the artifact around the directory.
        is_directory = path.is_absolute() and path.name == "model"
        url = str(path.parent.parent) if is_directory else split_ref(model_path)[0]
        policy = await asyncio.to_thread(_fetch, f"{url}@{digest}")
        await asyncio.wrap_future(change_policy(self.loop, policy))
        return await self.label()

    async def flush(self) -> Status:
        """Drop all cached keys and values."""
        return await self._run(self.loop.engine.flush)

    async def resume(self) -> Status:
        """End a pause."""
        return await self._run(self.loop.resume)

    async def label(self) -> Status:
        """Answer with the `weight_version` that is served; empty while there is none."""
        engine = self.loop.engine
        version = f"{engine.version}@{engine.digest}" if engine.digest else ""
        return {"status": "ok", "version": version}

    async def sleep(self, level: Annotated[int, Body(embed=True, ge=1, le=2)] = 1) -> Status:
        """Release the device's memory: level 1 keeps the weights on the host, 2 drops them."""
        return await self._run(self.loop.sleep, level, status="asleep")

    async def wake_up(self) -> Status:
        """Take the device's memory again; a server that follows also loads its weights."""
        answer = await self._run(self.loop.wake_up, status="awake")
        if self.follower:
            self.follower.wake()
        return answer

    async def _run(self, work: Callable[..., None], *args: Any, status: str = "ok") -> Status:
        """Run `work` on the engine's thread, and answer once it is done."""
        await asyncio.wrap_future(self.loop.call(work, *args))
        return {"status": status}

    async def _admit(self, body: GenerateBody, emit: Emit) -> Ticket:
        """Have the engine's thread admit a request. Raises Refused as `EngineLoop.generate`."""
        admitted = self.loop.call(
            self.loop.generate,
            body.requests,
            body.sampling,
            body.version,
            body.min_version,
            emit,
            body.digest,
            prompt_logprobs=body.prompt_logprobs,
            stream=body.stream,
        )
        answer: asyncio.Future[Ticket] = asyncio.wrap_future(admitted)
        try:
            while not (await asyncio.wait({answer}, timeout=WAIT_S))[0]:
                # Else weights are being changed, which takes a limited time.
                if self.loop.paused or self.loop.waking:
                    reason = self.loop.trouble or "generation is paused"
                    raise Refused(503, f"waited {WAIT_S:g} s; {reason}")
            return answer.result()
        except Refused as refused:
            if refused.status == 409 and self.follower:
                self.follower.wake()
                if self.follower.trouble:
                    reason = f"{refused}; it cannot be pulled: {self.follower.trouble}"
                    raise Refused(409, reason) from refused
            raise
        finally:
            # The client has left before it was admitted.
            if not answer.done():
                answer.cancel()
                admitted.add_done_callback(self._drop)

    def _drop(self, admitted: "Future[Ticket]") -> None:
        """Cancel a request that was admitted just as its client left."""
        if not admitted.cancelled() and not admitted.exception():
            self.loop.cancel(admitted.result())

    async def _stream(
        self,
        ticket: Ticket,
        events: asyncio.Queue[tuple[int, Any]],
        body: GenerateBody,
    ) -> AsyncIterator[bytes]:
        """Yield the lines of an answer. If the client hangs up, the rest is cancelled."""
        remaining = len(body.requests)
        try:
            while remaining:
                try:
                    index, message = await asyncio.wait_for(events.get(), 1.0)
                except TimeoutError:
                    # An empty line tells a slow server from a dead one.
                    yield b"\n"
                    continue
                if index < 0:
                    yield _encode_line({"error": message})
                    return
                if isinstance(message, tuple):
                    sample, tokens = message
                    yield _encode_line({"index": index, "sample": sample} | asdict(tokens))
                    continue
                remaining -= 1
                completions = [_describe_completion(completion) for completion in message]
                yield _encode_line({"index": index, "completions": completions})
                # A proof of the weights is no progress.
                if self.attempts and not body.prompt_logprobs:
                    attempts = self.attempts
                    self.attempts = None
                    await asyncio.to_thread(record_progress, attempts)
        finally:
            self.loop.cancel(ticket)


def change_policy(loop: EngineLoop, policy: Artifact) -> Future[dict[str, float]]:
    """Have `policy` served, once the tensors that the engine holds are those of its files."""
    model = policy.part("model")
    # Reading the files takes as long as changing to them, so it is done before the pause.
    digest = digest_model(model)

    def check(engine: ServedEngine) -> None:
        proof = engine.summarize(engine.compare_files(model, PROBE), digest)
        if proof.different:
            raise RuntimeError(
                f"{proof.different} of {proof.tensors} tensors of the engine differ from the "
                f"files, {proof.example} among them"
            )
        engine.tensor_proof = proof

    version = VersionFacts.read(policy).version
    return loop.call(loop.change, model, version, policy.manifest.digest, check=check)


def _fetch(ref: str) -> Artifact:
    """Fetch and verify a checkpoint's model, on a thread that blocks no other request."""
    policy = Artifact(ref)
    policy.part("model")
    return policy


def _describe_completion(completion: Completion) -> JsonObject:
    """Return a completion as JSON, without fields that were not requested.

    Clients refuse a field that their `Completion` does not have: one that is added has to be empty,
    and so left out, unless the request asks for it.
    """
    fields = asdict(completion)
    return {
        name: field for name, field in fields.items() if name in ALWAYS or field not in ([], None)
    }


def _encode_line(message: JsonObject) -> bytes:
    return json.dumps(message).encode() + b"\n"
