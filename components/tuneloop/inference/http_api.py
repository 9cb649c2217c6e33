"""The HTTP interface of a rollout server: token ids in and out, no text.

=====================  =================================================================================================
``GET /health``        200 while a version is served whole, else 503 with the reason
``GET /version``       ``{"version", "digest", "engine", "context"}``; version -1 while nothing is served. A server that
                       follows adds ``follows``, ``trouble`` (why it is behind), ``pulled`` (the last pull)
``POST /load``         ``{"ref", "version", "force"}``: fetch a checkpoint, verify every byte, let what runs finish,
                       apply it in place, drop the prefix cache; answers like ``/version``. A server that follows pulls
                       the version instead: 409 until it is published
``POST /generate``     ``{"requests": [{"id", "prompt_ids", "seeds"}], "sampling": {"temperature", "max_tokens",
                       "stop_token_ids"}, "version", "min_version", "prompt_logprobs", "stream"}``: a stream of lines
                       ``{"index", "completions": [{"ids", "logprobs", "finish_reason", "start_version",
                       "end_version"}]}`` in the order that requests finish; an empty line each second means alive;
                       ``{"error"}`` ends it. Completions have ``versions``, one a token, where these differ; with
                       ``prompt_logprobs`` those of the prompt at temperature 1. With ``stream``, lines ``{"index",
                       "sample", "ids", "logprobs", "version"}`` come before, as tokens are made. Closing the connection
                       drops what still runs
``POST /score``        ``{"ids", "version"}`` → ``{"logprobs", "version", "digest"}``: of each id but the first, given
                       those before it, at temperature 1
``POST /verify``       compares all that the engine holds with the version it says it serves: ``{"version", "tensors",
                       "identical", "different", "unread"}``; of a server that follows
``POST /engine/…``     as a worker of a fleet that somebody refits (`tuneloop.inference.fleet`; the names are Dynamo's):
                       ``pause_generation {"mode"}``, ``update_weights_from_disk {"model_path", "weight_version"}``,
                       ``flush_cache``, ``resume_generation``, ``get_weight_version`` → ``{"status": "ok", …}``
``POST /sleep``        ``{"level"}``: give back the device's memory once what runs has finished; CUDA and ROCm only
``POST /wake_up``      take it again
=====================  =================================================================================================

Refusals are ``{"error": reason}``: 400 what was asked cannot be done; 409 another version is served than the
request demands (load it, then ask again); 503 no version is served, after a load that failed half-way until one
succeeds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from tuneloop.core.artifacts import Artifact, split_ref
from tuneloop.core.attempts import record_progress
from tuneloop.core.component import from_validation
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.store import Store
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines._follow import Follower
from tuneloop.inference.engines._loop import EngineLoop, Mode, Refused, Ticket
from tuneloop.inference.engines.vllm import Vllm

ALWAYS = ("ids", "logprobs")
"""Fields of a completion that are sent even if they are empty."""


class RequestBody(BaseModel):
    """One prompt; one seed a completion."""

    id: str
    prompt_ids: list[int]
    seeds: list[int] = Field(min_length=1)


class SamplingBody(BaseModel):
    """As `tuneloop.inference.engines.Sampling`."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 16
    stop_token_ids: tuple[int, ...] = ()


class GenerateBody(BaseModel):
    """What to generate, and which version may."""

    requests: list[RequestBody] = Field(min_length=1)
    sampling: SamplingBody = SamplingBody()
    version: int | None = None
    min_version: int | None = None
    prompt_logprobs: bool = False
    stream: bool = False


class LoadBody(BaseModel):
    """Which checkpoint to serve."""

    ref: str
    version: int | None = None
    force: bool = False


class ScoreBody(BaseModel):
    """What to score, and which version may."""

    ids: list[int] = Field(min_length=2)
    version: int | None = None


class PauseBody(BaseModel):
    """What becomes of running requests. Dynamo's callers also say ``clear_cache``, which a change does anyway."""

    mode: Mode = "wait"


class UpdateBody(BaseModel):
    """A checkpoint's ``model`` directory, or its reference; and ``<version>@<digest of the checkpoint>``."""

    model_path: str
    weight_version: Annotated[str, Field(pattern=r"^\d+@\S+$")]


class SleepBody(BaseModel):
    """How deep: 1 keeps the weights on the host, 2 drops them."""

    level: Annotated[int, Field(ge=1, le=2)] = 1


class HttpApi:
    """The HTTP side of an `EngineLoop`, which may have a follower.

    Args:
        attempts: where the starts of this server are counted: those without an answer.
    """

    def __init__(self, loop: EngineLoop, follower: Follower | None = None, attempts: Store | None = None) -> None:
        self.loop, self.follower, self.attempts = loop, follower, attempts

    def app(self) -> Any:
        """Make the ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/health", self.health),
            Route("/version", self.version),
            Route("/load", self.load, methods=["POST"]),
            Route("/generate", self.generate, methods=["POST"]),
            Route("/score", self.score, methods=["POST"]),
            Route("/verify", self.verify, methods=["POST"]),
            Route("/engine/pause_generation", self.pause, methods=["POST"]),
            Route("/engine/update_weights_from_disk", self.update, methods=["POST"]),
            Route("/engine/flush_cache", self.flush, methods=["POST"]),
            Route("/engine/resume_generation", self.resume, methods=["POST"]),
            Route("/engine/get_weight_version", self.label, methods=["POST"]),
            Route("/sleep", self.sleep, methods=["POST"]),
            Route("/wake_up", self.wake_up, methods=["POST"]),
        ]
        handlers = dict.fromkeys((Refused, UserError, Retryable, ValidationError), _refuse)
        return Starlette(routes=routes, exception_handlers=handlers)

    def served(self) -> dict[str, Any]:
        """Return what is served now."""
        engine = self.loop.engine
        status = {"version": engine.version, "digest": engine.digest, "engine": engine.name, "context": engine.context}
        if self.follower:
            pulled = self.follower.pulled and {**self.follower.pulled, "converged_s": self.follower.converged_s()}
            status |= {"follows": self.follower.store.url, "trouble": self.follower.trouble, "pulled": pulled}
        return status

    async def health(self, request: Any) -> Any:
        """Answer whether it is ready."""
        if self.loop.trouble:
            raise Refused(503, self.loop.trouble)
        return _json({"status": "ok"})

    async def version(self, request: Any) -> Any:
        """Answer with the version served."""
        return _json(self.served())

    async def load(self, request: Any) -> Any:
        """Fetch and verify beside what is running, then apply."""
        body = LoadBody.model_validate_json(await request.body())
        if self.follower:
            digest = split_ref(body.ref)[1]
            if body.version is None or digest is None:
                raise UserError("ref", body.ref, "a server that follows needs the version, and a ref with a digest")
            await asyncio.to_thread(self.follower.reach, body.version, digest, force=body.force)
        else:
            policy = await asyncio.to_thread(_fetch, body.ref)
            engine, wanted = self.loop.engine, (policy.manifest.facts["version"], policy.manifest.digest)
            if body.force or (engine.version, engine.digest) != wanted:
                await asyncio.wrap_future(change_policy(self.loop, policy))
        return _json(await asyncio.to_thread(self.served))

    async def generate(self, request: Any) -> Any:
        """Admit, then stream."""
        from starlette.responses import StreamingResponse

        body = GenerateBody.model_validate_json(await request.body())
        if body.stream and body.prompt_logprobs:
            raise UserError("stream", True, "cannot be had with prompt_logprobs; ask for one of them")
        here, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Any]]()

        def emit(index: int, message: Any) -> None:
            here.call_soon_threadsafe(events.put_nowait, (index, message))

        ticket = await self._admit(body, emit)
        lines = self._stream(ticket, events, len(body.requests))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def score(self, request: Any) -> Any:
        """Score ids with the weights that are served."""
        body = ScoreBody.model_validate_json(await request.body())
        request_body = GenerateBody(
            requests=[RequestBody(id="score", prompt_ids=body.ids, seeds=[0])],
            sampling=SamplingBody(temperature=0.0, max_tokens=1),
            version=body.version,
            prompt_logprobs=True,
        )
        here = asyncio.get_running_loop()
        scored: asyncio.Future[Any] = here.create_future()

        def emit(index: int, message: Any) -> None:
            here.call_soon_threadsafe(scored.set_result, (index, message))

        await self._admit(request_body, emit)
        index, said = await scored
        if index < 0:
            raise Refused(503, said)
        served = {"version": said[0].end_version, "digest": self.loop.engine.digest}
        return _json({"logprobs": said[0].prompt_logprobs, **served})

    async def verify(self, request: Any) -> Any:
        """Read back every tensor."""
        if self.follower is None:
            raise UserError("verify", "--policy", "only a server with --weights keeps the files to compare with")
        version, comparison = await asyncio.to_thread(self.follower.verify)
        return _json({"version": version, **asdict(comparison)})

    async def pause(self, request: Any) -> Any:
        """Generate nothing until `resume`."""
        body = PauseBody.model_validate_json(await request.body() or "{}")
        await asyncio.wrap_future(self.loop.pause(body.mode))
        return _json({"status": "ok"})

    async def update(self, request: Any) -> Any:
        """Change to a checkpoint, verified."""
        body = UpdateBody.model_validate_json(await request.body())
        if self.follower:
            raise UserError("model_path", body.model_path, "this server follows --weights; publish the version there")
        policy = await asyncio.to_thread(_fetch, _reference(body))
        await asyncio.wrap_future(change_policy(self.loop, policy))
        return await self.label(request)

    async def flush(self, request: Any) -> Any:
        """Drop the prefix cache."""
        await asyncio.wrap_future(self.loop.call(Vllm.flush))
        return _json({"status": "ok"})

    async def resume(self, request: Any) -> Any:
        """Go on after `pause`."""
        await asyncio.wrap_future(self.loop.resume())
        return _json({"status": "ok"})

    async def label(self, request: Any) -> Any:
        """Answer with the version served, as `update` was told it; empty while nothing is served."""
        engine = self.loop.engine
        return _json({"status": "ok", "version": f"{engine.version}@{engine.digest}" if engine.digest else ""})

    async def sleep(self, request: Any) -> Any:
        """Give back the device's memory."""
        body = SleepBody.model_validate_json(await request.body() or "{}")
        await asyncio.wrap_future(self.loop.sleep(body.level))
        return _json({"status": "asleep"})

    async def wake_up(self, request: Any) -> Any:
        """Take the device's memory again."""
        await asyncio.wrap_future(self.loop.wake_up())
        if self.follower:
            self.follower.wake()
        return _json({"status": "awake"})

    async def _admit(self, body: GenerateBody, emit: Callable[[int, Any], None]) -> Ticket:
        requests = [Request(r.id, r.prompt_ids, r.seeds) for r in body.requests]
        sampling = Sampling(**body.sampling.model_dump())
        admitted = self.loop.generate(
            requests,
            sampling,
            body.version,
            body.min_version,
            emit,
            prompt_logprobs=body.prompt_logprobs,
            stream=body.stream,
        )
        try:
            return await asyncio.wrap_future(admitted)
        except Refused as refused:
            if refused.status == 409 and self.follower:
                self.follower.wake()
                if self.follower.trouble:
                    raise Refused(409, f"{refused}; it cannot be pulled: {self.follower.trouble}") from refused
            raise

    async def _stream(self, ticket: Ticket, events: asyncio.Queue[tuple[int, Any]], left: int) -> AsyncIterator[bytes]:
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
                if self.attempts:
                    attempts, self.attempts = self.attempts, None
                    await asyncio.to_thread(record_progress, attempts)
        finally:
            self.loop.cancel(ticket)


def change_policy(loop: EngineLoop, policy: Artifact) -> Future[dict[str, float]]:
    """Have `policy` served."""
    return loop.change(policy.part("model"), policy.manifest.facts["version"], policy.manifest.digest)


def _reference(body: UpdateBody) -> str:
    """Return the reference of the checkpoint that is meant; of its ``model`` directory the artifact around it."""
    path, digest = Path(body.model_path), body.weight_version.partition("@")[2]
    url = str(path.parent.parent) if path.is_absolute() and path.name == "model" else split_ref(body.model_path)[0]
    return f"{url}@{digest}"


def _fetch(ref: str) -> Artifact:
    policy = Artifact(ref)
    policy.part("model")  # fetched and proved here, on a thread that nobody waits for
    return policy


def _said(completion: Completion) -> dict[str, Any]:
    """Return a completion as JSON, without what was not asked for."""
    return {name: value for name, value in asdict(completion).items() if value not in ([], None) or name in ALWAYS}


def _line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def _json(value: Any, status: int = 200) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(value, status)


async def _refuse(request: Any, error: Exception) -> Any:
    """Answer with an error of ours."""
    if isinstance(error, ValidationError):
        error = from_validation(error)
    status = error.status if isinstance(error, Refused) else 400 if isinstance(error, UserError) else 503
    return _json({"error": str(error)}, status)
