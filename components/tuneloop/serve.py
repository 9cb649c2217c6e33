"""A vLLM server that lives as long as a run and changes versions in place.

::

    python -m tuneloop.serve --policy REF --host 0.0.0.0 --port 8000 --engine-args '{"max_model_len": 1024}'

One process: the engine on a thread of its own, HTTP on the main one. Token ids in and out, no text.

=====================  =================================================================================================
``GET /health``        200 while a version is served whole, else 503 with the reason
``GET /version``       ``{"version", "digest", "engine", "context"}``; version -1 while nothing is served
``POST /load``         ``{"ref", "force"}``: fetch a checkpoint, verify every byte, let what runs finish, apply it in
                       place, drop the prefix cache; answers like ``/version``
``POST /generate``     ``{"requests": [{"id", "prompt_ids", "seeds"}], "sampling": {"temperature", "max_tokens",
                       "stop_token_ids"}, "version", "min_version"}``: a stream of lines ``{"index", "completions":
                       [{"ids", "logprobs", "finish_reason", "start_version", "end_version"}]}`` in the order that
                       requests finish; an empty line each second means alive; ``{"error"}`` ends it. Closing the
                       connection drops what still runs
``POST /score``        ``{"ids", "version"}`` → ``{"logprobs", "version", "digest"}``: of each id but the first, given
                       those before it, at temperature 1
=====================  =================================================================================================

Refusals are ``{"error": reason}``: 400 what was asked can not be done; 409 another version is served than the
request demands (load it, then ask again); 503 no version is served, after a load that failed half-way until one
succeeds. Exit codes: 0 after SIGTERM, 2 the user's mistake, 75 the store is away.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import json
import os
import signal
import socket
import sys
import typing
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from tuneloop.artifacts import Artifact
from tuneloop.component import from_validation
from tuneloop.engines import Request, Sampling
from tuneloop.engines._loop import EngineLoop, Refused, Ticket
from tuneloop.engines.vllm import Vllm
from tuneloop.errors import EXIT_RETRY, EXIT_USER, Retryable, UserError

GRACE_S = 2
"""How long running answers may take after SIGTERM: their clients try again, the pod's grace period is short."""


class RequestBody(BaseModel):
    """One prompt; one seed a completion."""

    id: str
    prompt_ids: list[int]
    seeds: list[int] = Field(min_length=1)


class SamplingBody(BaseModel):
    """As `tuneloop.engines.Sampling`."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    max_tokens: Annotated[int, Field(ge=1)] = 16
    stop_token_ids: tuple[int, ...] = ()


class GenerateBody(BaseModel):
    """What to generate, and which version may."""

    requests: list[RequestBody] = Field(min_length=1)
    sampling: SamplingBody = SamplingBody()
    version: int | None = None
    min_version: int | None = None


class LoadBody(BaseModel):
    """Which checkpoint to serve."""

    ref: str
    force: bool = False


class ScoreBody(BaseModel):
    """What to score, and which version may."""

    ids: list[int] = Field(min_length=2)
    version: int | None = None


class Server:
    """The HTTP side of an `EngineLoop`."""

    def __init__(self, loop: EngineLoop) -> None:
        self.loop = loop

    def app(self) -> Any:
        """The ASGI application."""
        from starlette.applications import Starlette
        from starlette.routing import Route

        routes = [
            Route("/health", self.health),
            Route("/version", self.version),
            Route("/load", self.load, methods=["POST"]),
            Route("/generate", self.generate, methods=["POST"]),
            Route("/score", self.score, methods=["POST"]),
        ]
        handlers = dict.fromkeys((Refused, UserError, Retryable, ValidationError), _refuse)
        return Starlette(routes=routes, exception_handlers=handlers)

    def served(self) -> dict[str, Any]:
        """What is served now."""
        engine = self.loop.engine
        return {"version": engine.version, "digest": engine.digest, "engine": engine.name, "context": engine.context}

    async def health(self, request: Any) -> Any:
        """Readiness."""
        if self.loop.trouble:
            raise Refused(503, self.loop.trouble)
        return _json({"status": "ok"})

    async def version(self, request: Any) -> Any:
        """The version served."""
        return _json(self.served())

    async def load(self, request: Any) -> Any:
        """Fetch and verify beside what is running, then apply."""
        body = LoadBody.model_validate_json(await request.body())
        policy = await asyncio.to_thread(_fetch, body.ref)
        await asyncio.wrap_future(self.loop.load(policy, force=body.force))
        return _json(self.served())

    async def generate(self, request: Any) -> Any:
        """Admit, then stream."""
        from starlette.responses import StreamingResponse

        body = GenerateBody.model_validate_json(await request.body())
        here, events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Any]]()

        def emit(index: int, said: Any) -> None:
            here.call_soon_threadsafe(events.put_nowait, (index, said))

        requests = [Request(r.id, r.prompt_ids, r.seeds) for r in body.requests]
        sampling = Sampling(**body.sampling.model_dump())
        admitted = self.loop.generate(requests, sampling, body.version, body.min_version, emit)
        ticket = await asyncio.wrap_future(admitted)
        lines = self._stream(ticket, events, len(requests))
        return StreamingResponse(lines, media_type="application/x-ndjson")

    async def score(self, request: Any) -> Any:
        """Score ids with the weights that are served."""
        body = ScoreBody.model_validate_json(await request.body())
        logprobs = await asyncio.wrap_future(self.loop.score(body.ids, body.version))
        return _json({"logprobs": logprobs, **self.served()})

    async def _stream(self, ticket: Ticket, events: asyncio.Queue[tuple[int, Any]], left: int) -> AsyncIterator[bytes]:
        try:
            while left:
                try:
                    index, said = await asyncio.wait_for(events.get(), 1.0)
                except TimeoutError:
                    yield b"\n"
                    continue
                left -= 1
                if index < 0:
                    yield json.dumps({"error": said}).encode() + b"\n"
                    return
                yield json.dumps({"index": index, "completions": [asdict(c) for c in said]}).encode() + b"\n"
        finally:
            self.loop.cancel(ticket)


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; returns the exit code."""
    try:
        options = _parse(sys.argv[1:] if argv is None else argv)
        with _bind(options.host, options.port) as listener:
            _serve(listener, Artifact(options.policy), options.engine_args)
        return 0
    except UserError as error:
        return _say(f"error: {error}", EXIT_USER)
    except Retryable as error:
        return _say(f"interrupted: {error}", EXIT_RETRY)


def _serve(listener: socket.socket, policy: Artifact, engine_args: dict[str, Any]) -> None:
    policy.path  # noqa: B018 - verified before seconds go into starting vLLM
    loop = EngineLoop(Vllm(engine_args))
    loop.start()
    loop.load(policy, force=False).result()
    import uvicorn

    config = uvicorn.Config(Server(loop).app(), log_level="warning", timeout_graceful_shutdown=GRACE_S)
    host, port = listener.getsockname()[:2]
    _say(f"serve: version {loop.engine.version} at http://{host}:{port}", 0)
    # uvicorn shuts down on these and then raises them again, for whom it found in charge: us, who return.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    uvicorn.Server(config).run(sockets=[listener])
    loop.stop()
    loop.join(GRACE_S)


def _fetch(ref: str) -> Artifact:
    policy = Artifact(ref)
    policy.path  # noqa: B018 - fetched and verified here, on a thread that nobody waits for
    return policy


def _bind(host: str, port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError("--port", port, "is taken; stop what listens there, or choose another") from error
        raise UserError("--host", host, f"port {port}: {error.strerror}; choose an address of this machine") from error
    return listener


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(prog="python -m tuneloop.serve", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--policy", required=True, metavar="REF", help="the checkpoint to start with")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one and says which (default: 8000)")
    parser.add_argument("--engine-args", type=_object, default={}, help="vLLM's EngineArgs, a JSON object")
    return parser.parse_args(argv)


def _object(text: str) -> dict[str, Any]:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError
    return value


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> typing.NoReturn:
        raise UserError(self.prog, message, "see --help")


def _json(value: Any, status: int = 200) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse(value, status)


async def _refuse(request: Any, error: Exception) -> Any:
    """What an error of ours looks like to a client."""
    if isinstance(error, ValidationError):
        error = from_validation(error)
    status = error.status if isinstance(error, Refused) else 400 if isinstance(error, UserError) else 503
    return _json({"error": str(error)}, status)


def _say(line: str, code: int) -> int:
    print(" ".join(line.split()), file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the engine's thread may be in a step, and tearing vLLM down takes seconds
