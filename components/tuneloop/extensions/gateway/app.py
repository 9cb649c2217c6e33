"""The gateway's HTTP (docs/sharing.md): sessions under ``/v1``, Tinker's routes under ``/api/v1``.

Tinker's routes go to the session's worker. The body of a request without a token is not read.

It runs in the gateway's process, of which there is one: quotas are counted in its memory. Nothing
of a session is stored here.
"""

import asyncio
import itertools
import json
import re
import secrets
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Annotated, Any

import httpx2
from fastapi import Depends, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.extensions.gateway import wire
from tuneloop.extensions.gateway.access import Access, Caller, token_of
from tuneloop.extensions.gateway.jobs import Jobs
from tuneloop.extensions.gateway.processes import Processes
from tuneloop.extensions.gateway.sampler import SamplerUse
from tuneloop.extensions.gateway.sessions import (
    ALIVE,
    LABEL,
    Meter,
    Session,
    SessionRequest,
    check_quota,
    read_settings,
)
from tuneloop.extensions.gateway.worker import HEADER, SESSION, TOKENS, VERSION
from tuneloop.inference.refusals import Refused, create_app

START_WAIT_S = 25.0
"""Seconds that a request waits for a starting worker; then the client must retry."""
ANSWER_S = 90.0
"""Seconds within which a worker must answer: it answers a poll within 30, and queues requests that
compute."""
LOOK_S = 0.5
"""Seconds between two looks at a session that is waited for."""
PROXIED = (
    "create_model",
    "load_weights",
    "forward_backward",
    "optim_step",
    "save_weights",
    "save_weights_for_sampler",
    "asample",
    "create_sampling_session",
    "retrieve_future",
    "get_info",
    "session_heartbeat",
)
"""Routes of Tinker below ``/api/v1`` that are passed on to the session's worker, which answers the
same ones (`worker.py: Worker.app`). One that uses tokens is named in `Gateway._check_tokens`,
too."""
NAME_FIELDS = ("session_id", "model_id", "sampling_session_id", "request_id")
"""The fields of a body by which a request may name its session, model, sampling session or request.
A request whose body names it in another field is refused before a worker sees it."""
OWN_BODY_BYTES = 2**20
WORKER_BODY_BYTES = 2**25
"""Maximum bytes of a body: for the gateway itself, and for a worker (Tinker's client sends batches
in 5 MB pieces)."""
HELD_BYTES = 2**27
"""Maximum bytes of all bodies at a time; with the objects parsed from them they fit into the
gateway's memory (`resources` in `manifests/components/gateway/gateway.yaml`)."""
THREAD_BYTES = 2**16
"""Bytes of a body from which on it is searched on a thread, as other requests wait meanwhile."""
BODY_S = 60.0
"""Seconds within which a body must arrive."""
TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+'
NAMES = re.compile(
    rb'"(?:%b)"\s*+:\s*+(%b")|%b(?:"|\\?\Z)|[\[\]{}]'
    % ("|".join(NAME_FIELDS).encode(), TEXT, TEXT),
    re.DOTALL,
)
"""Finds a name of `NAME_FIELDS` in JSON: the name with its value, other strings, brackets.

The pattern never backtracks."""
MOST_MATCHES = 2**22
"""The maximum number of matches, which takes seconds. A batch of Tinker's client has at most one in
eight bytes."""
DEPTHS = {b"{": 1, b"[": 1, b"}": -1, b"]": -1}
"""Bracket → by how much it changes the depth of what follows."""
CLIENT_CONFIG: JsonObject = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "custom_loss_server_side": False,
    "sample_join_sampling_session": False,
}
"""Features that Tinker's client must not use, as they are not served."""
ANSWERS: JsonObject = {
    "get_server_capabilities": {"supported_models": []},
    "telemetry": {"status": "accepted"},
}
"""A base model is a checkpoint's reference, so there is no list; telemetry is dropped."""


class Gateway:
    """The sessions of callers: checks who may use which, and forwards requests to their workers.

    Attributes:
        held_bytes: of all bodies that are being read or forwarded.
        bytes: used today by each caller.
        tokens: used today by each session, as its worker reports.
    """

    def __init__(
        self,
        backend: Jobs | Processes,
        access: Access,
        store: str,
        config: Path | None = None,
    ) -> None:
        """Serve the sessions of `backend`, whose artifacts lie below the URL `store`.

        Raises UserError if the file `config` of settings is wrong.
        """
        self.backend = backend
        self.access = access
        self.store = store.rstrip("/")
        self.config = config
        self.settings = read_settings(config)
        # Callers poll for results, each over a connection of its own.
        # Workers are in the same network, so no proxy is asked.
        limits = httpx2.Limits(max_connections=None)
        self.http = httpx2.AsyncClient(timeout=ANSWER_S, limits=limits, trust_env=False)
        self.held_bytes = 0
        self.bytes = Meter()
        self.tokens = Meter()
        # Large bodies are searched two at a time, as other work needs threads, too.
        self.searching = asyncio.Semaphore(2)
        self.sampler: SamplerUse | None = None
        if self.settings.sampler:
            idle_s = self.settings.sampler.idle
            self.sampler = SamplerUse(backend.scale_sampler, self.settings.namespaces, idle_s)
        self._creating = threading.Lock()
        # Sessions whose workers run, with their addresses.
        self._running: dict[str, Session] = {}

    async def caller(self, headers: Any) -> Caller:
        """Return the sender of a request. Raises Refused (401)."""
        caller = await self.access.caller(token_of(headers))
        if caller is None:
            remedy = "get one whose audience is this gateway"
            raise Refused(401, f"the token is not valid here; {remedy}")
        return caller

    def create(self, caller: Caller, request: SessionRequest, key: str) -> tuple[Session, bool]:
        """Return the caller's session of this key, and whether it is new.

        Creations come one after the other, so that a quota holds: the gateway has one replica,
        replaced by Recreate. Raises Refused (403, 409, 422, 429, 503).
        """
        namespace = request.namespace or caller.namespace
        if not namespace:
            raise Refused(422, "namespace: is required, as your token belongs to none")
        self._check_allowed(caller, namespace)
        request = request.model_copy(update={"namespace": namespace})
        name = request.name(caller.user, key)
        with self._creating:
            existing = self.backend.get(namespace, name)
            if existing:
                if existing.request != request:
                    problem = f"key {key!r} has created {existing.id} with another body"
                    raise Refused(409, f"{problem}; use another key")
                return existing, False
            self.settings = read_settings(self.config)
            quota = self.settings.quota(namespace)
            quota.check(request, self.backend.sessions(namespace))
            artifacts = f"{quota.store or self.store}/sessions/{namespace}/{name}"
            self.backend.create(name, request, caller.user, artifacts)
        session = self.backend.get(namespace, name)
        if session is None:
            raise Refused(503, f"{name} was ended while it was created; create it again")
        # A session that has ended may have had this key, and another address.
        self._running.pop(session.id, None)
        return session, True

    def _check_allowed(self, caller: Caller, namespace: str) -> None:
        if not self.access.allowed(caller, namespace):
            raise Refused(403, f"namespace {namespace!r}: you may not create workflows there")

    def listing(self, caller: Caller, namespace: str) -> list[Session]:
        """List the sessions of a namespace, by default the caller's own. Raises Refused (403)."""
        namespace = namespace or caller.namespace
        if not namespace:
            raise Refused(403, "namespace '': you may not create workflows there")
        self._check_allowed(caller, namespace)
        sessions = self.backend.sessions(namespace)
        return [session for session in sessions if session.phase != "ending"]

    def get(self, caller: Caller, id: str) -> Session:
        """Return a session that the caller may use.

        Raises Refused (404) if it is unknown or another caller's.
        """
        namespace, name = self._split_id(caller, id)
        session = self.backend.get(namespace, name)
        if session is None:
            raise Refused(404, f"no session {id!r}")
        return session

    def end(self, caller: Caller, id: str) -> None:
        """End a session; nothing happens if it is gone already.

        Raises Refused (404) if it is another caller's.
        """
        # It stays in `_running`, as results are fetched until it is gone.
        namespace, name = self._split_id(caller, id)
        self.backend.end(namespace, name)

    def _split_id(self, caller: Caller, id: str) -> tuple[str, str]:
        """Return namespace and name of a session, which need not exist, in a namespace that the
        caller may use.
        """
        parts = re.fullmatch(rf"({LABEL})\.(session-[0-9a-f]+)", id)
        if parts is None or not self.access.allowed(caller, parts[1]):
            raise Refused(404, f"no session {id!r}")
        return parts[1], parts[3]

    async def reach(self, caller: Caller, id: str) -> Session:
        """Return a session once its worker runs.

        Raises Refused: 404; 410, it has ended; 503, it takes too long.
        """
        await asyncio.to_thread(self._split_id, caller, id)
        if id in self._running:
            return self._running[id]
        deadline = time.monotonic() + START_WAIT_S
        while True:
            session = await asyncio.to_thread(self.get, caller, id)
            if session.phase not in ALIVE:
                raise Refused(410, f"session {id} has ended ({session.phase}): {session.reason}")
            # Kept until it does not answer: to ask Kubernetes at each request takes longer than it.
            if session.phase == "running" and session.address:
                self._running[id] = session
                return session
            if time.monotonic() > deadline:
                raise Refused(503, f"session {id} is {session.phase}: {session.reason}; try again")
            await asyncio.sleep(LOOK_S)

    async def forward(
        self,
        caller: Caller,
        name: str,
        method: str,
        path: str,
        headers: Any,
        body: bytes,
    ) -> Any:
        """Forward a request to its session's worker, and return the worker's answer.

        Args:
            name: of the session, or of its model, sampling session or request.

        Raises Refused as `reach`, and: 429, no tokens; 503, no answer.
        """
        id = name.partition(":")[0]
        session = await self.reach(caller, id)
        namespace = id.partition(".")[0]
        remaining = self._check_tokens(namespace, path)
        if self.sampler and path.endswith("/asample"):
            await asyncio.to_thread(self.sampler.start, namespace)
        elif self.sampler and ":sample:" in name:
            self.sampler.renew(namespace)
        forwarded = {HEADER: session.secret, TOKENS: f"{remaining + self.tokens.count(id)}"}
        for header in ("content-type", "accept"):
            if header in headers:
                forwarded[header] = headers[header]
        url = f"http://{session.address}{path}"
        try:
            # A request that computes is answered with its id at once, so no answer takes long.
            answer = await self.http.request(method, url, content=body, headers=forwarded)
        except httpx2.HTTPError as error:
            # The next attempt reads its state again.
            self._running.pop(id, None)
            problem = f"its worker does not answer ({type(error).__name__})"
            raise Refused(503, f"session {id}: {problem}; try again") from error
        # Another process may have its address now.
        if answer.status_code == 401 or answer.headers.get(SESSION) != id:
            self._running.pop(id, None)
            raise Refused(503, f"session {id}: its worker has moved; try again")
        self.tokens[id] = int(answer.headers.get(TOKENS, 0))
        return answer

    def _check_tokens(self, namespace: str, path: str) -> int:
        """Return how many tokens a namespace may still use today; refuse a request for more.

        The worker counts the tokens of a request, and refuses it by the same limit (`session.py:
        Session._use_tokens`).
        """
        # To count for a name begins a new day, if it is one.
        self.tokens.count("")
        limit = self.settings.quota(namespace).tokens_per_day
        prefix = f"{namespace}."
        used = sum(count for name, count in self.tokens.items() if name.startswith(prefix))
        # The worker knows how many tokens such a request has; here it is at least one.
        requested = path.endswith(("/forward_backward", "/asample"))
        check_quota(f"namespace {namespace!r}", "tokens_per_day", used, requested, limit)
        return limit - used


async def _authenticate(request: Request) -> Caller:
    gateway: Gateway = request.app.state.gateway
    caller = await gateway.caller(request.headers)
    # `TimedProtocol` closes the connections of strangers.
    request.state.caller = caller
    return caller


Authenticated = Annotated[Caller, Depends(_authenticate)]


def _at_most(limit: int) -> Callable[[Request, Caller], AsyncIterator[bytes]]:
    """Return a dependency that reads the body of an authenticated caller, up to `limit` bytes."""

    async def read(request: Request, caller: Authenticated) -> AsyncIterator[bytes]:
        gateway: Gateway = request.app.state.gateway
        body = bytearray()
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    # Its Content-Length cannot be trusted.
                    async for part in request.stream():
                        body += part
                        gateway.held_bytes += len(part)
                        _check_body(gateway, caller, len(body), len(part), limit)
            except TimeoutError:
                problem = f"the body did not arrive in {BODY_S:g} s"
                raise Refused(408, f"{problem}; send less at a time") from None
            yield bytes(body)
        finally:
            gateway.held_bytes -= len(body)

    return read


def _check_body(gateway: Gateway, caller: Caller, size: int, added: int, limit: int) -> None:
    """Count `added` bytes of a body that has `size` bytes so far; refuse it if it is too large."""
    daily_limit = gateway.settings.quota(caller.namespace).bytes_per_day
    used = gateway.bytes.count(caller.user)
    check_quota(f"{caller.user!r}", "bytes_per_day", used, added, daily_limit)
    gateway.bytes.count(caller.user, added)
    if size > limit:
        raise Refused(413, f"the body has more than {limit} bytes; send less at a time")
    if gateway.held_bytes > HELD_BYTES:
        raise Refused(503, "other requests use all memory for bodies; try again")


Small = Annotated[bytes, Depends(_at_most(OWN_BODY_BYTES))]
Large = Annotated[bytes, Depends(_at_most(WORKER_BODY_BYTES))]


def build_app(gateway: Gateway) -> FastAPI:
    """Build the application."""
    app = create_app(422)
    app.state.gateway = gateway
    _add_session_routes(app, gateway)
    _add_tinker_routes(app, gateway)
    return app


def _add_session_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/healthz")
    @app.get("/api/v1/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.post("/v1/sessions")
    def create(request: Request, body: Small, caller: Authenticated) -> Response:
        fields = SessionRequest.model_validate(_object(body))
        session, is_new = gateway.create(caller, fields, _key(request))
        return JSONResponse(session.public(), 201 if is_new else 200)

    @app.get("/v1/sessions")
    def listing(caller: Authenticated, namespace: str = "") -> JsonObject:
        return {"sessions": [session.public() for session in gateway.listing(caller, namespace)]}

    @app.get("/v1/sessions/{id}")
    def get(id: str, caller: Authenticated) -> JsonObject:
        return gateway.get(caller, id).public()

    @app.delete("/v1/sessions/{id}")
    @app.post("/api/v1/sessions/{id}/finish")
    def end(id: str, caller: Authenticated) -> Response:
        gateway.end(caller, id)
        return Response(status_code=204)


def _add_tinker_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/api/v1/create_session")
    def tinker_session(request: Request, body: Small, caller: Authenticated) -> JsonObject:
        body_fields = _object(body)
        metadata = body_fields.get("user_metadata") or {}
        if not isinstance(metadata, dict):
            raise UserError("user_metadata", metadata, "names and values")
        fields = {
            "namespace": body_fields.get("project_id") or "",
            "display_name": body_fields.get("display_name") or "",
        }
        # Tinker's client has no options for these, but passes on its user's metadata.
        for name in ("accelerators", "lease_group", "policy", "patience"):
            if name in metadata:
                fields[name] = metadata[name]
        session, _ = gateway.create(caller, SessionRequest.model_validate(fields), _key(request))
        return {"type": "create_session", "session_id": session.id}

    @app.post("/api/v1/client/config")
    @app.post("/api/v1/client/dynamic_config")
    @app.get("/api/v1/get_server_capabilities")
    @app.post("/api/v1/telemetry")
    def get_constant_answer(request: Request, caller: Authenticated) -> JsonObject:
        return dict(ANSWERS.get(request.url.path.rpartition("/")[2], CLIENT_CONFIG))

    @app.get("/api/v1/samplers/{sampling}")
    async def sampler(request: Request, sampling: str, caller: Authenticated) -> Response:
        return await forward(request, caller, sampling, b"")

    async def forward_named(request: Request, body: Large, caller: Authenticated) -> Response:
        if len(body) < THREAD_BYTES:
            name = _find_name(request, body)
        else:
            async with gateway.searching:
                name = await asyncio.to_thread(_find_name, request, body)
        return await forward(request, caller, name, body)

    async def forward(request: Request, caller: Caller, name: str, body: bytes) -> Response:
        answer = await gateway.forward(
            caller, name, request.method, request.url.path, request.headers, body
        )
        headers = {VERSION: answer.headers[VERSION]} if VERSION in answer.headers else {}
        content_type = answer.headers.get("content-type")
        return Response(answer.content, answer.status_code, headers, content_type)

    for name in PROXIED:
        app.post(f"/api/v1/{name}", name=name)(forward_named)


def _key(request: Request) -> str:
    """Read the caller's idempotency key; without one, every request creates another session."""
    headers = request.headers
    key = headers.get("idempotency-key") or headers.get("x-idempotency-key")
    return key or secrets.token_hex(16)


def _find_name(request: Request, body: bytes) -> str:
    """Find the session, model, sampling session or request that a body names.

    Only its worker parses the body, which may have megabytes of numbers.
    """
    if request.headers.get("content-type", "").startswith(wire.PROTOBUF):
        return wire.read_address(body)[0]
    depth = 0
    for match in itertools.islice(NAMES.finditer(body), MOST_MATCHES):
        # A name inside of another object is not the request's.
        if depth == 1 and match[1]:
            name = _parse_json(match[1])
            if name:
                return str(name)
        depth += DEPTHS.get(match[0], 0)
    fields = ", ".join(NAME_FIELDS)
    raise Refused(422, f"the body names no session: a JSON object with one of {fields}")


def _object(body: bytes) -> JsonObject:
    """Parse a body as a JSON object."""
    value = _parse_json(body)
    if not isinstance(value, dict):
        raise Refused(422, "the body is not a JSON object")
    return value


def _parse_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Refused(422, "the body is not JSON") from None
