"""The process of one session, with HTTP on the main thread and torch on another::

    TUNELOOP_SESSION_KEY=… python -m tuneloop.extensions.gateway.worker --session team-a.session-1 \\
        --artifacts URL --port 8000

It answers the gateway, which knows the key (header ``X-Session-Key``). Tinker's client library
calls ``/api/v1/…``: a ``POST`` that computes answers ``{"request_id"}`` at once, and
``retrieve_future`` has the result. With ``--lease`` it computes only while it holds its group's
lease (`tuneloop.sharing.leases`), as long as requests follow one another. At SIGTERM, and after
``--idle`` seconds without a request, it executes its accepted requests, and saves the models
(`Worker.drain`). Exit codes: 0 after that; 1 if the models on the device are lost; 75 if it lost
its lease.

Who starts it: the Job that `jobs.py` writes, or `processes.py` here. The headers are named once,
here, and used by `app.py`, too.
"""

import argparse
import asyncio
import contextlib
import functools
import hmac
import json
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Body, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders

from tuneloop.core import fencing
from tuneloop.core.component import convert_validation_error
from tuneloop.core.errors import Retryable, UserError, print_diagnostic, report_error, report_errors
from tuneloop.core.json_types import JsonObject
from tuneloop.core.program import Parser
from tuneloop.core.threads import repeat_in_background
from tuneloop.extensions.gateway import messages, wire
from tuneloop.extensions.gateway.session import Session
from tuneloop.inference.refusals import Refused, create_app
from tuneloop.inference.server import (
    UVICORN,
    add_address_flags,
    bind_address,
    serve_until_signalled,
)
from tuneloop.sharing.lease_storage import open_lease_group

if TYPE_CHECKING:
    from tuneloop.sharing.leases import HeldLease, LeaseGroup

KEY = "TUNELOOP_SESSION_KEY"
"""Variable of the worker: the key of its session. `jobs.py` reads it back from the Job."""
HEADER = "X-Session-Key"
"""Header of a request: the key."""
SESSION = "X-Session"
"""Header of every answer: the session whose worker answers."""
TOKENS = "X-Tokens"
"""Header of a request: the tokens that the session may use today; of an answer: the tokens that it
has used."""
VERSION = "X-Weight-Version"
"""Header of an answer with samples: the version of the weights that made them."""
HEALTH = "/health"
"""Answered without the key: `session.yaml` (readiness) and `processes.py: _is_ready` ask it."""
POLL_S = 30.0
"""Seconds that `retrieve_future` waits; the client library waits 45."""
LINGER_S = 0.5
"""Seconds without a request after which the lease is released."""
SHARE_S = 10.0
"""Seconds after which the lease is released despite further requests, if another run waits for
it."""

FETCH_S = 15.0
"""Seconds to wait at the end until results are fetched; a live client polls all the time. With
`MARGIN_S` it is the least grace period, `sessions.py: WorkerPod.grace`."""
MARGIN_S = 5.0
"""Seconds of the grace period that are kept for the exit itself."""
LOOK_S = 0.05
"""Seconds between two looks at the requests that are left at the end."""

log = logging.getLogger("tuneloop.session")


class Worker:
    """The requests of a `Session`, over HTTP.

    Attributes:
        heard: when the last request came, by `time.monotonic`.
        stopping: is set once nothing more is to be computed.
        failed: whether the models on the device are lost.
        thread: computes, and owns the models.
    """

    def __init__(self, session: Session, key: str, lease_group: "LeaseGroup | None" = None) -> None:
        """Serve `session` to those who send `key`; with a `lease_group`, compute only under its
        lease.
        """
        self.session = session
        self.key = key
        self.lease_group = lease_group
        self.heard = time.monotonic()
        self.stopping = threading.Event()
        self.failed = False
        self.thread = threading.Thread(target=self._compute, name="compute", daemon=True)

    def app(self) -> Any:
        """Build the ASGI application.

        A route that is added is unreachable until the gateway passes it on (`app.py: PROXIED`).
        """
        session = self.session
        posts: dict[str, Callable[..., Any]] = {
            "create_model": self._queued(messages.CreateModel, session.create_model),
            "load_weights": self._queued(messages.LoadWeights, session.load_weights),
            "forward_backward": self.forward_backward,
            "optim_step": self._queued(messages.OptimStep, session.optim_step),
            "save_weights": self._queued(messages.SaveWeights, session.save_weights),
            "save_weights_for_sampler": self._queued(
                messages.SaveWeights, session.save_weights_for_sampler
            ),
            "asample": self._queued(messages.Sample, session.sample),
            "create_sampling_session": self.create_sampling,
            "retrieve_future": self.retrieve,
            "get_info": self.info,
            "session_heartbeat": self.heartbeat,
        }
        app = create_app(422)
        for name, answer in posts.items():
            app.add_api_route(f"/api/v1/{name}", answer, methods=["POST"], response_model=None)
        app.add_api_route("/api/v1/samplers/{sampling}", session.sampler)
        app.add_api_route(HEALTH, self.health)
        return self._guarded(app)

    async def health(self) -> dict[str, str]:
        """Answer that the worker is ready."""
        return {"status": "ok"}

    async def heartbeat(self) -> dict[str, str]:
        """Record that the client is alive."""
        return {"type": "session_heartbeat"}

    async def forward_backward(self, request: Request) -> dict[str, str]:
        """Queue a request in protobuf, or the same as JSON."""
        # The body itself identifies the request, so it is not parsed by FastAPI.
        body = await request.body()
        proto = request.headers.get("content-type", "").startswith(wire.PROTOBUF)
        with self._numbered(body, proto) as ids:
            if proto:
                message = wire.read_forward_backward(body)
            else:
                message = messages.JsonForwardBackward.model_validate_json(body).read()
            ids.append(self.session.forward_backward(body, message))
        return {"request_id": ids[0], "model_id": ids[0].rpartition(":")[0]}

    def create_sampling(self, body: messages.CreateSampling) -> dict[str, str]:
        """Open a sampling session of a checkpoint, which is looked up first."""
        return {
            "type": "create_sampling_session",
            "sampling_session_id": self.session.create_sampling(body),
        }

    async def retrieve(
        self,
        request: Request,
        request_id: Annotated[str, Body(embed=True)] = "",
    ) -> Response:
        """Answer with the result, or with 408 if there is none yet."""
        ledger = self.session.ledger
        try:
            future = ledger.future(request_id)
        except Refused as refused:
            # The client takes 404 for an error of the address.
            raise Refused(410, str(refused)) from refused
        done = asyncio.wrap_future(future)
        # Without a callback asyncio warns of an error that nobody has read.
        done.add_done_callback(lambda finished: finished.exception())
        await asyncio.wait([done], timeout=POLL_S)
        if not future.done():
            status = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(status, 408)
        # From now on the result counts as fetched.
        ledger.future(request_id)
        error = future.exception()
        if error:
            return _describe_failure(request_id, error)
        return _result(future.result(), wire.PROTOBUF in request.headers.get("accept", ""))

    async def info(self, model_id: Annotated[str, Body(embed=True)] = "") -> JsonObject:
        """Describe a model."""
        return self.session.info(model_id)

    def drain(self, grace_s: float) -> None:
        """Accept no new requests, execute the accepted ones in half of `grace_s`, save the models
        in the other half, and wait until results are fetched.

        A request that waits for an earlier one is dropped.
        """
        ledger = self.session.ledger
        start = time.monotonic()
        usable_s = grace_s - MARGIN_S
        compute_deadline = start + usable_s / 2
        deadline = start + usable_s
        ledger.close()
        count = ledger.count_open().undone
        log.info("is ending: accepts no new requests, and has %d left to execute", count)
        while ledger.count_open().undone and self.thread.is_alive():
            if time.monotonic() >= compute_deadline:
                break
            time.sleep(LOOK_S)
        try:
            self.session.save_models().result(max(0.0, deadline - time.monotonic()))
        except Exception as error:
            log.error("models could not be saved (%s: %s)", type(error).__name__, error)
        deadline = min(deadline, time.monotonic() + FETCH_S)
        while ledger.count_open().unfetched and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        counts = ledger.count_open()
        if any(counts):
            log.error(
                "ends with %d requests not done, %d that wait for an earlier one, "
                "%d results not fetched",
                counts.undone,
                counts.blocked,
                counts.unfetched,
            )

    def _queued(self, kind: type[BaseModel], submit: Callable[[Any], str]) -> Callable[..., Any]:
        """Return a route that parses a body as `kind`, and answers with what `submit` returns."""

        async def answer(request: Request) -> JsonObject:
            body = await request.body()
            samples = 0
            with self._numbered(body) as ids:
                message = kind.model_validate_json(body)
                ids.append(submit(message))
                samples = message.num_samples if isinstance(message, messages.Sample) else 0
            response: JsonObject = {"request_id": ids[0]}
            if samples:
                response["sample_sequence_ids"] = [f"{ids[0]}:{i}" for i in range(samples)]
            return response

        return answer

    @contextlib.contextmanager
    def _numbered(self, body: bytes, proto: bool = False) -> Iterator[list[str]]:
        """Collect a request's id.

        A request to a model that fails inside gets an id, too, whose result is the error: the model
        would wait for its number.
        """
        ids: list[str] = []
        try:
            yield ids
        except Refused:
            raise
        except Exception as error:
            model, number = wire.read_address(body) if proto else _address(body)
            if not model or number is None:
                raise
            if isinstance(error, ValidationError):
                error = convert_validation_error(error)
            ids.append(self.session.refuse(body, model, number, error))

    def _guarded(self, app: Any) -> Any:
        """Return `app` behind the key; all answers, also errors, have the headers `SESSION` and
        `TOKENS`.
        """

        async def guarded(scope: Any, receive: Any, send: Any) -> None:
            async def send_marked(message: Any) -> None:
                if message["type"] == "http.response.start":
                    tokens = str(self.session.meter.count(""))
                    headers = MutableHeaders(raw=message["headers"])
                    headers.update({SESSION: self.session.id, TOKENS: tokens})
                await send(message)

            if scope["type"] == "http" and scope["path"] != HEALTH:
                headers = Headers(scope=scope)
                if not hmac.compare_digest(headers.get(HEADER, "").encode(), self.key.encode()):
                    refusal = JSONResponse({"error": f"{HEADER}: is not this session's"}, 401)
                    return await refusal(scope, receive, send_marked)
                # `TimedProtocol` closes the connections of strangers.
                scope.setdefault("state", {})["caller"] = self.session.id
                self.session.token_limit = float(headers.get(TOKENS, "inf"))
                # A heartbeat comes as long as a notebook is open, used or not.
                if not scope["path"].endswith("/session_heartbeat"):
                    self.heard = time.monotonic()
            await app(scope, receive, send_marked)

        return guarded

    def _compute(self) -> None:
        """Compute on the thread that owns the models."""
        ledger = self.session.ledger
        while not self.stopping.is_set():
            entries = ledger.take(1.0)
            if not entries:
                continue
            try:
                with self._hold_lease() as lease:
                    shared_until = time.monotonic() + SHARE_S
                    while entries:
                        if lease:
                            lease.check()
                        self.session.do(entries)
                        entries = []
                        if self.lease_group and time.monotonic() > shared_until:
                            if self.lease_group.read().waiting:
                                break
                            shared_until = time.monotonic() + SHARE_S
                        entries = ledger.take(LINGER_S)
            except Retryable as lost:
                # The requests were not begun.
                log.warning("%s; requests the lease again", lost)
                ledger.put_first(entries)
            except UserError as error:
                # The lease is refused, as the group has another policy.
                ledger.fail(entries, error)
            except Exception as error:
                # Sleep or wake failed, so the state of the device is unknown.
                log.exception("the session is lost")
                ledger.fail(entries, error)
                self.failed = True
                self.stopping.set()

    @contextlib.contextmanager
    def _hold_lease(self) -> "Iterator[HeldLease | None]":
        if self.lease_group is None:
            yield None
            return
        path = os.environ.get(fencing.VARIABLE)
        file = Path(path) if path else None
        with (
            self.lease_group.acquire(stop=self.stopping, file=file) as lease,
            _watch_lease(lease),
        ):
            # Another run may have used the device since.
            self.session.wake()
            try:
                yield lease
            finally:
                self.session.sleep()


@report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    options = _parse(sys.argv[1:] if argv is None else argv)
    key = os.environ.get(KEY)
    if not key:
        raise UserError(KEY, None, "is required: set it to a secret, which callers must send")
    lease_group = None
    if options.lease:
        # Where this process reads its own lease before it commits.
        directory = tempfile.mkdtemp(prefix="tuneloop-")
        os.environ[fencing.VARIABLE] = os.path.join(directory, "lease.json")
        lease_group = open_lease_group(
            options.lease,
            who=options.session,
            policy=options.policy,
            patience=options.patience,
        )
    open_ranks = functools.partial(_ranks, options.device)
    session = Session(options.session, options.artifacts, open_ranks, options.sampler)
    return _serve(Worker(session, key, lease_group), options)


def _watch_lease(lease: "HeldLease") -> contextlib.AbstractContextManager[None]:
    """End this process as soon as the lease is lost, as another run may get the device then."""

    def check() -> None:
        try:
            lease.check()
        except Retryable as lost:
            os._exit(report_error(lost))

    return repeat_in_background(check, 0.2)


def _ranks(device: str) -> Any:
    from tuneloop.training.fsdp.ranks import Ranks

    ranks = Ranks(device, 1)  # type: ignore[arg-type]
    if device == "auto" and ranks.device.type == "cpu":
        log.warning("no CUDA device here: training on the CPU")
    return ranks


def _serve(worker: Worker, options: argparse.Namespace) -> int:
    """Serve until it is told to end, is idle, or fails; return the exit code."""
    import uvicorn

    # The gateway on this machine binds the port, so that it knows the address at once.
    is_inherited = options.fd is not None
    listener = (
        socket.socket(fileno=options.fd)
        if is_inherited
        else bind_address(options.host, options.port)
    )
    server = uvicorn.Server(uvicorn.Config(worker.app(), timeout_graceful_shutdown=2, **UVICORN))

    def watch() -> None:
        pause_s = min(1.0, options.idle / 4)
        while time.monotonic() - worker.heard < options.idle:
            if worker.stopping.wait(pause_s):
                server.should_exit = True
                return
            # The gateway was killed, and its sessions end with it.
            if options.parent and os.getppid() != options.parent:
                os._exit(0)
        log.info("no request in %g s: ending", options.idle)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True).start()
    worker.thread.start()
    address = f"http://{options.host}:{listener.getsockname()[1]}"
    print_diagnostic(f"session {options.session}: {address}", 0)
    serve_until_signalled(server, listener, functools.partial(worker.drain, options.grace))
    worker.stopping.set()
    worker.thread.join(2)
    return int(worker.failed)


def _address(body: bytes) -> tuple[str, int | None]:
    """Read model and number of a request in JSON, if it has them."""
    with contextlib.suppress(ValueError):
        value = json.loads(body)
        number = value.get("seq_id") if isinstance(value, dict) else None
        if isinstance(number, int) and 0 <= number < 2**31:
            model = str(value.get("model_id") or "")
            # Half of a surrogate pair is valid JSON, and no name of a model: it raises ValueError.
            model.encode()
            return model, number
    return "", None


def _describe_failure(request_id: str, error: BaseException) -> Response:
    """Answer with an error: a mistake of the user's, or one of this worker, which is logged."""
    if isinstance(error, UserError | Refused):
        category = "user"
        message = str(error)
    else:
        category = "server"
        message = f"{type(error).__name__}: {error}"
        log.error("%s failed", request_id, exc_info=error)
    # It may quote half of a surrogate pair, which no JSON in UTF-8 has.
    text = message.encode(errors="replace").decode()
    return JSONResponse({"error": text, "category": category})


def _result(result: Any, proto: bool) -> Response:
    if isinstance(result, dict):
        return JSONResponse(result)
    headers = {VERSION: str(result.version)} if isinstance(result, messages.Samples) else {}
    if proto:
        return Response(result.proto(), media_type=wire.PROTOBUF, headers=headers)
    return JSONResponse(result.json(), headers=headers)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags, which `jobs.py: Jobs._job`, `processes.py: Processes._start` and
    `sessions.py: SessionRequest.flags` write."""
    parser = Parser("python -m tuneloop.extensions.gateway.worker", __doc__)
    parser.add_argument("--session", required=True, help="<namespace>.<name>")
    parser.add_argument(
        "--artifacts",
        required=True,
        metavar="URL",
        help="the folder of the session's artifacts",
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument(
        "--sampler",
        default="",
        metavar="URL",
        help="the server to sample from (default: the worker samples itself)",
    )
    parser.add_argument(
        "--idle",
        type=float,
        default=3600.0,
        help="seconds without a request until it ends",
    )
    text = "seconds for accepted requests after SIGTERM; after SIGINT it ends at once"
    parser.add_argument("--grace", type=float, default=120.0, help=text)
    parser.add_argument(
        "--lease",
        metavar="URL",
        help="lease://namespace/group, or a place in the store",
    )
    parser.add_argument(
        "--policy",
        default="fifo",
        choices=["fifo", "lrs"],
        help="of the group's lease",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=30.0,
        help="of the group's lease, in seconds",
    )
    add_address_flags(parser)
    parser.add_argument("--fd", type=int, help="an inherited listening socket, in place of a port")
    parser.add_argument(
        "--parent",
        type=int,
        metavar="PID",
        help="end as soon as this process is no longer its parent",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stderr.flush()
    # The thread that computes may be in a step.
    os._exit(code)
