"""The gateway's HTTP (docs/sharing.md): sessions under ``/v1``, and under ``/api/v1`` Tinker's routes, which go to the
session's worker. The body of a request without a token is not read."""

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
from tuneloop.gateway import wire
from tuneloop.gateway.access import Access, Caller, token_of
from tuneloop.gateway.jobs import Jobs
from tuneloop.gateway.processes import Processes
from tuneloop.gateway.sampler import SamplerUse
from tuneloop.gateway.sessions import (
    ALIVE,
    LABEL,
    Meter,
    Session,
    Wanted,
    check_quota,
    read_settings,
)
from tuneloop.gateway.worker import HEADER, SESSION, TOKENS, VERSION
from tuneloop.inference.refusals import Refused, create_app

WAIT = 25.0
"""Seconds that a request waits for a starting worker; then the client must retry."""
PATIENCE = 90.0
"""Seconds within which a worker must answer: it answers a poll within 30, and queues requests that compute."""
LOOK = 0.5
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
ABOUT = ("session_id", "model_id", "sampling_session_id", "request_id")
"""The fields by which a request may name its session."""
SMALL = 2**20
LARGE = 2**25
"""Maximum bytes of a body: for the gateway itself, and for a worker (Tinker's client sends batches in 5 MB pieces)."""
HELD = 2**27
"""Maximum bytes of all bodies at a time; with the objects parsed from them they fit into the gateway's memory."""
BODY_S = 60.0
"""Seconds within which a body must arrive."""
TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+'
NAMES = re.compile(
    rb'"(?:%b)"\s*+:\s*+(%b")|%b(?:"|\\?\Z)|[\[\]{}]' % ("|".join(ABOUT).encode(), TEXT, TEXT),
    re.DOTALL,
)
"""Finds a name of `ABOUT` in JSON: the name with its value, other strings, brackets. The pattern never backtracks."""
LOOKED_AT = 2**22
"""The maximum number of matches, which takes seconds. A batch of Tinker's client has at most one in eight bytes."""
CLIENT_CONFIG = dict.fromkeys(
    (
        "pjwt_auth_enabled",
        "proto_compress_fwdbwd",
        "sample_use_retrieve_futures",
        "custom_loss_server_side",
        "sample_join_sampling_session",
    ),
    False,
)
"""Features that Tinker's client must not use, as they are not served."""
ANSWERS: JsonObject = {
    "get_server_capabilities": {"supported_models": []},
    "telemetry": {"status": "accepted"},
}
"""A base model is a checkpoint's reference, so there is no list; telemetry is dropped."""


class Gateway:
    """The sessions of callers: checks who may use which, and forwards requests to their workers."""

    def __init__(
        self, backend: Jobs | Processes, access: Access, store: str, config: Path | None = None
    ) -> None:
        self.backend = backend
        self.access = access
        self.store = store.rstrip("/")
        self.config = config
        self.settings = read_settings(config)  # an error in it shows at the start
        limits = httpx2.Limits(max_connections=None)
        self.http = httpx2.AsyncClient(
            timeout=PATIENCE, limits=limits, trust_env=False
        )  # no proxy: workers are local
        self.held = 0
        # by caller, and by session
        self.bytes = Meter()
        self.tokens = Meter()
        self.searching = asyncio.Semaphore(2)  # large bodies: other work needs threads, too
        sampler = self.settings.sampler
        self.sampler = sampler and SamplerUse(
            backend.scale_sampler, self.settings.namespaces, sampler.idle
        )
        self._creating = threading.Lock()
        self._found: dict[str, Session] = {}

    async def caller(self, headers: Any) -> Caller:
        """Return the sender of a request. Raises Refused (401)."""
        if (caller := await self.access.caller(token_of(headers))) is None:
            raise Refused(
                401, "the token is not valid here; get one whose audience is this gateway"
            )
        return caller

    def create(self, caller: Caller, wanted: Wanted, key: str) -> tuple[Session, bool]:
        """Return the caller's session of this key, and whether it is new. Creations come one after the other, so that a
        quota holds: the gateway has one replica, replaced by Recreate. Raises Refused (403, 409, 422, 429, 503)."""
        wanted = wanted.model_copy(update={"namespace": wanted.namespace or caller.namespace})
        if not wanted.namespace:
            raise Refused(422, "namespace: is required, as your token belongs to none")
        if not self.access.allowed(caller, wanted.namespace):
            raise Refused(
                403, f"namespace {wanted.namespace!r}: you may not create workflows there"
            )
        name = wanted.name(caller.user, key)
        with self._creating:
            if standing := self.backend.get(wanted.namespace, name):
                if standing.wanted != wanted:
                    raise Refused(
                        409,
                        f"key {key!r} has created {standing.id} with another body; use another key",
                    )
                return standing, False
            self.settings = read_settings(self.config)
            quota = self.settings.quota(wanted.namespace)
            quota.check(wanted, self.backend.sessions(wanted.namespace))
            store = quota.store or self.store
            self.backend.create(
                name, wanted, caller.user, f"{store}/sessions/{wanted.namespace}/{name}"
            )
        session = self.backend.get(wanted.namespace, name)
        self._found.pop(
            session.id if session else name, None
        )  # an ended session may have had this key
        if session is None:
            raise Refused(503, f"{name} was ended while it was created; create it again")
        return session, True

    def listing(self, caller: Caller, namespace: str) -> list[Session]:
        """List the sessions of a namespace. Raises Refused (403)."""
        namespace = namespace or caller.namespace
        if not namespace or not self.access.allowed(caller, namespace):
            raise Refused(403, f"namespace {namespace!r}: you may not create workflows there")
        return [
            session for session in self.backend.sessions(namespace) if session.phase != "ending"
        ]

    def get(self, caller: Caller, id: str) -> Session:
        """Return a session that the caller may use. Raises Refused (404) if it is unknown or another caller's."""
        if session := self.backend.get(*self._place(caller, id)):
            return session
        raise Refused(404, f"no session {id!r}")

    def end(self, caller: Caller, id: str) -> None:
        """End a session; nothing happens if it is gone already. Raises Refused (404) if it is another caller's."""
        self.backend.end(
            *self._place(caller, id)
        )  # it stays in `_found`: results are fetched until it is gone

    def _place(self, caller: Caller, id: str) -> tuple[str, str]:
        """Return namespace and name of a session, which need not exist, in a namespace that the caller may use."""
        parts = re.fullmatch(rf"({LABEL})\.(session-[0-9a-f]+)", id)
        if parts is None or not self.access.allowed(caller, parts[1]):
            raise Refused(404, f"no session {id!r}")
        return parts[1], parts[3]

    async def reach(self, caller: Caller, id: str) -> Session:
        """Return a session once its worker runs. Raises Refused: 404; 410, it has ended; 503, it takes too long."""
        await asyncio.to_thread(self._place, caller, id)
        if known := self._found.get(id):
            return known
        deadline = time.monotonic() + WAIT
        while True:
            session = await asyncio.to_thread(self.get, caller, id)
            if session.phase not in ALIVE:
                raise Refused(410, f"session {id} has ended ({session.phase}): {session.reason}")
            if session.phase == "running" and session.address:
                self._found[id] = session
                return session
            if time.monotonic() > deadline:
                raise Refused(503, f"session {id} is {session.phase}: {session.reason}; try again")
            await asyncio.sleep(LOOK)

    async def forward(
        self, caller: Caller, named: str, method: str, path: str, headers: Any, body: bytes
    ) -> Any:
        """Forward a request to its session's worker. Raises Refused as `reach`, and: 429, no tokens; 503, no answer."""
        id = named.partition(":")[0]
        session = await self.reach(caller, id)
        namespace = id.partition(".")[0]
        own = self.tokens.count(id)
        most = self.settings.quota(namespace).tokens_per_day
        used = sum(count for each, count in self.tokens.items() if each.startswith(f"{namespace}."))
        more = path.endswith(("/forward_backward", "/asample"))  # the worker reports how many
        check_quota(f"namespace {namespace!r}", "tokens_per_day", used, more, most)
        if self.sampler and path.endswith("/asample"):
            await asyncio.to_thread(self.sampler.start, namespace)
        elif self.sampler and ":sample:" in named:
            self.sampler.renew(namespace)
        kept = {
            TOKENS: f"{most - used + own}",
            **{n: headers[n] for n in ("content-type", "accept") if n in headers},
        }
        try:
            answer = await self.http.request(
                method,
                f"http://{session.address}{path}",
                content=body,
                headers={**kept, HEADER: session.key},
            )
        except httpx2.HTTPError as error:
            self._found.pop(id, None)  # the next attempt reads its state again
            why = f"its worker does not answer ({type(error).__name__})"
            raise Refused(503, f"session {id}: {why}; try again") from error
        if (
            answer.status_code == 401 or answer.headers.get(SESSION) != id
        ):  # another process has its address now
            self._found.pop(id, None)
            raise Refused(503, f"session {id}: its worker has moved; try again")
        self.tokens[id] = int(answer.headers.get(TOKENS, 0))
        return answer


async def _known(request: Request) -> Caller:
    gateway: Gateway = request.app.state.gateway
    request.state.caller = caller = await gateway.caller(request.headers)  # for `TimedProtocol`
    return caller


Known = Annotated[Caller, Depends(_known)]


def _at_most(limit: int) -> Callable[[Request, Caller], AsyncIterator[bytes]]:
    """Return a dependency that reads the body of an authenticated caller, up to `limit` bytes."""

    async def read(request: Request, caller: Known) -> AsyncIterator[bytes]:
        gateway = request.app.state.gateway
        sent = bytearray()
        user = caller.user
        most = gateway.settings.quota(caller.namespace).bytes_per_day
        try:
            try:
                async with asyncio.timeout(BODY_S):
                    async for part in request.stream():  # its Content-Length cannot be trusted
                        sent += part
                        gateway.held += len(part)
                        check_quota(
                            f"{user!r}", "bytes_per_day", gateway.bytes.count(user), len(part), most
                        )
                        gateway.bytes.count(user, len(part))
                        if len(sent) > limit:
                            raise Refused(
                                413, f"the body has more than {limit} bytes; send less at a time"
                            )
                        if gateway.held > HELD:
                            raise Refused(
                                503, "other requests use all memory for bodies; try again"
                            )
            except TimeoutError:
                raise Refused(
                    408, f"the body did not arrive in {BODY_S:g} s; send less at a time"
                ) from None
            yield bytes(sent)
        finally:
            gateway.held -= len(sent)

    return read


Small = Annotated[bytes, Depends(_at_most(SMALL))]
Large = Annotated[bytes, Depends(_at_most(LARGE))]


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
    def create(request: Request, body: Small, caller: Known) -> Response:
        session, new = gateway.create(caller, Wanted.model_validate(_object(body)), _key(request))
        return JSONResponse(session.public(), 201 if new else 200)

    @app.get("/v1/sessions")
    def listing(caller: Known, namespace: str = "") -> JsonObject:
        return {"sessions": [session.public() for session in gateway.listing(caller, namespace)]}

    @app.get("/v1/sessions/{id}")
    def get(id: str, caller: Known) -> JsonObject:
        return gateway.get(caller, id).public()

    @app.delete("/v1/sessions/{id}")
    @app.post("/api/v1/sessions/{id}/finish")
    def end(id: str, caller: Known) -> Response:
        gateway.end(caller, id)
        return Response(status_code=204)


def _add_tinker_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.post("/api/v1/create_session")
    def tinker_session(request: Request, body: Small, caller: Known) -> JsonObject:
        fields = _object(body)
        if not isinstance(metadata := fields.get("user_metadata") or {}, dict):
            raise UserError("user_metadata", metadata, "names and values")
        wanted = {
            name: metadata[name]
            for name in ("accelerators", "lease_group", "policy", "patience")
            if name in metadata
        }
        names = {
            "namespace": fields.get("project_id") or "",
            "display_name": fields.get("display_name") or "",
        }
        session, _ = gateway.create(
            caller, Wanted.model_validate({**names, **wanted}), _key(request)
        )
        return {"type": "create_session", "session_id": session.id}

    @app.post("/api/v1/client/config")
    @app.post("/api/v1/client/dynamic_config")
    @app.get("/api/v1/get_server_capabilities")
    @app.post("/api/v1/telemetry")
    def get_constant_answer(request: Request, caller: Known) -> JsonObject:
        return dict(ANSWERS.get(request.url.path.rpartition("/")[2], CLIENT_CONFIG))

    @app.get("/api/v1/samplers/{sampling}")
    async def sampler(request: Request, sampling: str, caller: Known) -> Response:
        return await passed(request, caller, sampling, b"")

    async def proxied(request: Request, body: Large, caller: Known) -> Response:
        if len(body) < 2**16:
            return await passed(request, caller, _find_name(request, body), body)
        async with gateway.searching:
            named = await asyncio.to_thread(_find_name, request, body)
        return await passed(request, caller, named, body)

    async def passed(request: Request, caller: Caller, named: str, body: bytes) -> Response:
        answer = await gateway.forward(
            caller, named, request.method, request.url.path, request.headers, body
        )
        headers = {name: answer.headers[name] for name in (VERSION,) if name in answer.headers}
        return Response(
            answer.content, answer.status_code, headers, answer.headers.get("content-type")
        )

    for name in PROXIED:
        app.post(f"/api/v1/{name}", name=name)(proxied)


def _key(request: Request) -> str:
    """Read the caller's idempotency key; without one, every request creates another session."""
    headers = request.headers
    return (
        headers.get("idempotency-key") or headers.get("x-idempotency-key") or secrets.token_hex(16)
    )


def _find_name(request: Request, body: bytes) -> str:
    """Find the session, model, sampling session or request that a body is about; its worker parses it."""
    if request.headers.get("content-type", "").startswith(wire.PROTOBUF):
        return wire.read_address(body)[0]
    depth = 0
    for found in itertools.islice(NAMES.finditer(body), LOOKED_AT):
        if depth == 1 and found[1] and (name := _parse_json(found[1])):
            return str(name)
        depth += {b"{": 1, b"[": 1, b"}": -1, b"]": -1}.get(found[0], 0)
    raise Refused(422, f"the body names no session: a JSON object with one of {', '.join(ABOUT)}")


def _object(body: bytes) -> JsonObject:
    """Parse a body as a JSON object."""
    if not isinstance(value := _parse_json(body), dict):
        raise Refused(422, "the body is not a JSON object")
    return value


def _parse_json(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Refused(422, "the body is not JSON") from None
