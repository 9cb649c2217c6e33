"""The HTTP interface of a rollout server, in token ids, without text. docs/weights.md has its routes and refusals. All
but ``/health`` and ``/metrics`` need the run's token, where there is one (`tuneloop.core.server_token`)."""

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
from tuneloop.inference.engine_loop import EngineLoop, Mode, Ticket
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines._tensors import Readback, digest_model
from tuneloop.inference.engines.vllm import Vllm
from tuneloop.inference.follower import Follower
from tuneloop.inference.guard import TokenGuard
from tuneloop.inference.refusals import Refused, create_app

ALWAYS = ("ids", "logprobs")
"""Fields of a completion that are sent even if they are empty."""
OPEN = ("/health", "/metrics")
"""Paths that need no token: kubelets, Prometheus and autoscalers have none."""
BATCH_BYTES = 2**22
ORDER_BYTES = 2**16
ID_BYTES = 8
"""Maximum bytes of a body of ``/generate``, unless one prompt needs more; of other bodies; of a token id in a body."""
WAIT_S = 600.0
"""The maximum seconds that a request waits while the engine sleeps, wakes up or is paused."""
Version = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class GenerateBody(BaseModel):
    """The requests to generate for, and the versions that may answer them."""

    requests: list[Request] = Field(min_length=1, max_length=2**16)
    sampling: Sampling = Sampling()
    version: Version | None = None
    min_version: Version | None = None
    digest: str | None = None
    prompt_logprobs: bool = False
    stream: bool = False


class HttpApi:
    """The HTTP side of an `EngineLoop`. `attempts`: the store that counts this server's starts without an answer."""

    def __init__(
        self, loop: EngineLoop, follower: Follower | None = None, attempts: Store | None = None
    ) -> None:
        self.loop = loop
        self.follower = follower
        self.attempts = attempts
        self.loading = threading.Lock()
        self.used = threading.Event()
        self.kept_until = 0.0
        self.kept: tuple[int, str] | None = None

    def app(self) -> FastAPI:
        app = create_app(400)
        app.add_middleware(TokenGuard, open_paths=OPEN, max_bytes=self.limit_body)
        gets: JsonObject = {
            "/health": self.health,
            "/version": self.version,
            "/metrics": self.metrics,
        }
        posts: dict[str, Callable[..., Any]] = {
            "/load": self.load,
            "/generate": self.generate,
            "/verify": self.verify,
            "/engine/pause_generation": self.pause,
            "/engine/update_weights_from_disk": self.update,
            "/engine/flush_cache": self.flush,
            "/engine/resume_generation": self.resume,
            "/engine/get_weight_version": self.label,
            "/sleep": self.sleep,
            "/wake_up": self.wake_up,
        }
        for method, routes in (("GET", gets), ("POST", posts)):
            for path, answer in routes.items():
                app.add_api_route(path, answer, methods=[method], response_model=None)
        return app

    def limit_body(self, path: str) -> int:
        """Return the maximum bytes of a body: parsing it (100 ms for 4 MiB of token ids) delays all other requests."""
        return ORDER_BYTES + (
            max(BATCH_BYTES, ID_BYTES * self.loop.engine.context) if path == "/generate" else 0
        )

    def served(self) -> JsonObject:
        engine = self.loop.engine
        status = {
            "version": engine.version,
            "digest": engine.digest,
            "engine": engine.name,
            "context": engine.context,
        }
        if engine.tensor_proof:
            status["tensors"] = asdict(engine.tensor_proof)
        if engine.determinism:
            status["determinism"] = engine.determinism
        if self.follower:  # in this order: `pulled` is set before `changing` is reset
            status |= (
                {"version": -1, "digest": ""} if self.follower.changing == status["version"] else {}
            )
            pulled = self.follower.pulled and {
                **self.follower.pulled,
                "converged_s": self.follower.converged_s(),
            }
            status |= {
                "follows": self.follower.store.url,
                "trouble": self.follower.trouble,
                "pulled": pulled,
            }
        return status

    async def health(self) -> dict[str, str]:
        if self.loop.trouble:
            raise Refused(503, self.loop.trouble)
        return {"status": "ok"}

    async def version(self) -> JsonObject:
        return self.served()

    async def metrics(self) -> PlainTextResponse:
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
        """Fetch and verify a policy while requests run, then change to it. No other load replaces it for `keep_s`
        seconds or until it has generated, so that clients that load different policies all get to generate."""
        if self.follower:
            digest = split_ref(ref)[1]
            if version is None or digest is None:
                raise UserError(
                    "ref", ref, "a server that follows needs the version, and a ref with a digest"
                )
            self.follower.reach(version, digest, force=force)
        else:
            policy = _fetch(ref)
            engine = self.loop.engine
            wanted = (VersionFacts.read(policy).version, policy.manifest.digest)
            with self.loading:
                if force or (engine.version, engine.digest) != wanted:
                    if wanted != self.kept:
                        self.used.wait(max(0.0, self.kept_until - time.monotonic()))
                    change_policy(self.loop, policy).result()
                    self.used.clear()
                    self.kept = wanted
                    self.kept_until = time.monotonic() + keep_s
                return self.served()
        return self.served()

    async def generate(self, body: GenerateBody) -> StreamingResponse:
        if body.stream and body.prompt_logprobs:
            raise UserError(
                "stream", True, "cannot be combined with prompt_logprobs; request one of them"
            )
        here = asyncio.get_running_loop()
        events = asyncio.Queue[tuple[int, Any]]()

        def emit(index: int, message: Any) -> None:
            with contextlib.suppress(
                RuntimeError
            ):  # the server has ended, and the engine is not to blame
                here.call_soon_threadsafe(events.put_nowait, (index, message))

        ticket = await self._admit(body, emit)
        if not body.prompt_logprobs:  # which prove weights
            self.used.set()
        return StreamingResponse(
            self._stream(ticket, events, body), media_type="application/x-ndjson"
        )

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

    async def pause(self, mode: Annotated[Mode, Body(embed=True)] = "wait") -> dict[str, str]:
        """Generate nothing until `resume`; Dynamo's callers also say ``clear_cache``, which a change does anyway."""
        return await self._have(self.loop.pause, mode)

    async def update(
        self,
        model_path: Annotated[str, Body()],
        weight_version: Annotated[str, Body(pattern=r"^\d+@\S+$")],
    ) -> dict[str, str]:
        """Serve a verified checkpoint, given by its ``model`` directory or reference and ``<version>@<its digest>``."""
        if self.follower:
            raise UserError(
                "model_path", model_path, "this server follows --weights; publish the version there"
            )
        path = Path(model_path)
        digest = weight_version.partition("@")[2]
        around = path.is_absolute() and path.name == "model"  # its parent is the artifact
        url = str(path.parent.parent) if around else split_ref(model_path)[0]
        policy = await asyncio.to_thread(_fetch, f"{url}@{digest}")
        await asyncio.wrap_future(change_policy(self.loop, policy))
        return await self.label()

    async def flush(self) -> dict[str, str]:
        return await self._have(self.loop.engine.flush)

    async def resume(self) -> dict[str, str]:
        return await self._have(self.loop.resume)

    async def label(self) -> dict[str, str]:
        """Answer with the version served, as `update` was told it; empty while nothing is served."""
        engine = self.loop.engine
        return {
            "status": "ok",
            "version": f"{engine.version}@{engine.digest}" if engine.digest else "",
        }

    async def sleep(
        self, level: Annotated[int, Body(embed=True, ge=1, le=2)] = 1
    ) -> dict[str, str]:
        """Release the device's memory: level 1 keeps the weights on the host, level 2 drops them."""
        return await self._have(self.loop.sleep, level, status="asleep")

    async def wake_up(self) -> dict[str, str]:
        answer = await self._have(self.loop.wake_up, status="awake")
        if self.follower:
            self.follower.wake()
        return answer

    async def _have(
        self, work: Callable[..., None], *args: Any, status: str = "ok"
    ) -> dict[str, str]:
        """Run `work` on the engine's thread, and answer once it is done."""
        await asyncio.wrap_future(self.loop.call(work, *args))
        return {"status": status}

    async def _admit(self, body: GenerateBody, emit: Callable[[int, Any], None]) -> Ticket:
        how = {"prompt_logprobs": body.prompt_logprobs, "stream": body.stream}
        versions = body.version, body.min_version
        admitted = self.loop.call(
            self.loop.generate, body.requests, body.sampling, *versions, emit, body.digest, **how
        )
        answer: asyncio.Future[Ticket] = asyncio.wrap_future(admitted)
        try:
            while not (await asyncio.wait({answer}, timeout=WAIT_S))[0]:
                if (
                    self.loop.paused or self.loop.waking
                ):  # else weights are being changed, which takes a limited time
                    raise Refused(
                        503, f"waited {WAIT_S:g} s; {self.loop.trouble or 'generation is paused'}"
                    )
            return answer.result()
        except Refused as refused:
            if refused.status == 409 and self.follower:
                self.follower.wake()
                if self.follower.trouble:
                    raise Refused(
                        409, f"{refused}; it cannot be pulled: {self.follower.trouble}"
                    ) from refused
            raise
        finally:
            if not answer.done():  # the client has left
                answer.cancel()
                admitted.add_done_callback(self._drop)

    def _drop(self, admitted: "Future[Ticket]") -> None:
        """Cancel a request that was admitted just as its client left."""
        if not admitted.cancelled() and not admitted.exception():
            self.loop.cancel(admitted.result())

    async def _stream(
        self, ticket: Ticket, events: asyncio.Queue[tuple[int, Any]], body: GenerateBody
    ) -> AsyncIterator[bytes]:
        left = len(body.requests)
        try:
            while left:
                try:
                    index, message = await asyncio.wait_for(events.get(), 1.0)
                except TimeoutError:
                    yield b"\n"
                    continue
                if index < 0:
                    yield _line({"error": message})
                    return
                if isinstance(message, tuple):
                    yield _line({"index": index, "sample": message[0], **asdict(message[1])})
                    continue
                left -= 1
                yield _line({"index": index, "completions": [_said(c) for c in message]})
                if self.attempts and not body.prompt_logprobs:  # a proof is no progress
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

    def check(engine: Vllm) -> None:
        proof = engine.summarize(engine.compare_files(model), digest)
        if proof.different:
            raise RuntimeError(
                f"{proof.different} of {proof.tensors} tensors of the engine differ from the "
                f"files, {proof.example} among them"
            )
        engine.tensor_proof = proof

    version = VersionFacts.read(policy).version
    return loop.call(loop.change, model, version, policy.manifest.digest, check=check)


def _fetch(ref: str) -> Artifact:
    policy = Artifact(ref)
    policy.part("model")  # fetched and verified here, on a thread that blocks no other request
    return policy


def _said(completion: Completion) -> JsonObject:
    """Return a completion as JSON, without fields that were not requested."""
    return {
        name: value
        for name, value in asdict(completion).items()
        if value not in ([], None) or name in ALWAYS
    }


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
