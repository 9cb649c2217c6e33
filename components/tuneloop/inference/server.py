"""A rollout server that lives as long as a run and changes versions in place.

::

    python -m tuneloop.inference.server --policy REF --host 0.0.0.0 --port 8000 --engine-args '{"max_model_len": 1024}'
    python -m tuneloop.inference.server --weights URL
    python -m tuneloop.inference.server

The engine has a thread of its own, HTTP (`tuneloop.inference.http_api`) the main one. With
``--weights`` a third thread follows the versions that a trainer publishes (docs/weights.md). With
neither option, a client has to load a version.

Exit codes: 0 after SIGTERM, 2 a user's mistake, 70 too many starts without an answer, 75 no store,
or a failed engine.

A request needs a token of the file that ``TUNELOOP_TOKEN_FILE`` names, if it names one. Argo's
graphs start it as a pod (`argo/template.py`), KFP's as a process of the task of iterations
(`kfp/rollout_server.py`), and the gateway for its sessions. Its options are thereby in rendered
workflows: one may be added, with a default.
"""

import argparse
import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from tuneloop.core.artifacts import Artifact
from tuneloop.core.attempts import admit_attempt
from tuneloop.core.errors import Retryable, UserError, print_diagnostic, report_errors
from tuneloop.core.json_types import JsonObject
from tuneloop.core.program import Parser
from tuneloop.core.server_token import VARIABLE, read_tokens
from tuneloop.core.store import Store
from tuneloop.inference.engine_loop import EngineLoop
from tuneloop.inference.follower import Follower
from tuneloop.inference.guard import TimedProtocol
from tuneloop.inference.http_api import HttpApi, change_policy
from tuneloop.inference.refusals import Refused
from tuneloop.inference.served import open_served_engine
from tuneloop.kube.resize import PodResizer
from tuneloop.workflow.plan import VLLM

# Options of every server of ours: this one, `inference/sandbox_server.py`, and the gateway's
# (`extensions/gateway/command.py`, `extensions/gateway/worker.py`).
UVICORN: JsonObject = {
    "http": TimedProtocol,
    "ws": "none",
    "lifespan": "off",
    # Requests without a token must not fill the log.
    "log_level": "error",
    "access_log": False,
    # Longer than clients keep a connection, so that none closes under a request.
    "timeout_keep_alive": 75,
}
GRACE_S = 20
"""Seconds for running answers after SIGTERM. Then they are cut off, and clients retry elsewhere.

It is less than the 30 seconds after which the server is killed: in a Deployment's pod
(``manifests/components/rollout-server``), beside KFP's iterations
(`kfp/rollout_server.py: GRACE_S`), and in a pod of Argo (`grace_s` of the sampler, by default
`workflow/settings.py: GRACE_S`). Only the gateway's sampler on this machine is killed after 10 s
(`extensions/gateway/processes.py: GRACE_S`).
"""


@report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, and return the exit code.

    The tests are `tests/unit/inference/test_serve.py` and `tests/unit/inference/test_resize.py`.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        options = _parse(sys.argv[1:] if argv is None else argv)
        if options.attempts:
            admit_attempt(Store(options.attempts))
        with (
            bind_address(options.host, options.port) as listener,
            tempfile.TemporaryDirectory(prefix="tuneloop-", ignore_cleanup_errors=True) as scratch,
        ):
            _serve(listener, options, Path(options.weights_dir or f"{scratch}/model"))
    except Stopped:
        pass
    except Refused as error:
        raise Retryable(str(error)) from error
    return 0


class Stopped(BaseException):
    """SIGTERM or SIGINT arrived before the server was ready.

    Libraries do not catch this, so the wait ends.
    """


def _stop(*_: Any) -> None:
    raise Stopped


def _serve(listener: socket.socket, options: argparse.Namespace, directory: Path) -> None:
    """Start the engine, its follower and HTTP, and serve until a signal arrives.

    Args:
        listener: bound before the engine starts, as a port that is taken is a user's mistake.
        options: as `_parse` returns them.
        directory: in which pulled versions are assembled.

    Raises:
        Retryable: the engine failed.
    """
    loop = EngineLoop(open_served_engine(options.engine, options.engine_args))
    follower = None
    if options.weights:
        follower = Follower(
            loop,
            options.weights,
            directory,
            options.poll_interval,
            options.pause,
            options.base,
        )
    policy = _open_policy(options.policy) if options.policy else None
    if policy:
        # It is verified before seconds go into starting the engine.
        policy.part("model")
    if options.asleep:
        resizer = PodResizer(options.asleep)
        resizer.start()
        loop.change_phase = resizer.change_phase
    loop.start()
    if policy:
        change_policy(loop, policy).result()
    if follower:
        follower.start()
        if not loop.engine.digest:
            print_diagnostic(f"serve: waits for a version below {follower.store.url}", 0)
        # A server that only follows has to wait for the first published version.
        while loop.trouble:
            if loop.broken:
                raise Retryable(loop.trouble)
            time.sleep(0.05)
    import uvicorn

    app = HttpApi(loop, follower, Store(options.attempts) if options.attempts else None).app()
    host, port = listener.getsockname()[:2]
    if not (read_tokens() or host.startswith("127.")):
        note = f"no token is required, as {VARIABLE} names no existing file"
        print_diagnostic(f"serve: note: {note}", 0)
    served = f"version {loop.engine.version}" if loop.engine.digest else "nothing yet"
    print_diagnostic(f"serve: {served} at http://{host}:{port}", 0)
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=GRACE_S, **UVICORN))
    # The parent process starts it again.
    loop.failed = lambda: setattr(server, "should_exit", True)
    serve_until_signalled(server, listener)
    if follower:
        follower.stop()
    loop.stop()
    loop.join(2.0)
    if loop.broken:
        raise Retryable(loop.trouble)


def _open_policy(ref: str) -> Artifact:
    """Open the checkpoint to boot with; if it was deleted, the nearest earlier one with its model.

    Any will do, as a client loads the version that it samples from.
    """
    requested = Artifact(ref)
    policy = requested
    previous = policy.manifest.inputs.get("policy")
    # A deletion may be half done: all files have to be there.
    while previous and not _has_model(policy):
        policy = Artifact(previous)
        previous = policy.manifest.inputs.get("policy")
    if policy is not requested:
        print_diagnostic(f"serve: {requested.url} was deleted; it boots with {policy.url}", 0)
    return policy


def _has_model(policy: Artifact) -> bool:
    """Whether the store has all files of a checkpoint's model."""
    root = policy.manifest.root
    names = {f"{root}/{name}" for name in policy.manifest.files if name.startswith("model/")}
    return names <= set(Store(policy.url).keys(f"{root}/model"))


def serve_until_signalled(
    server: Any,
    listener: socket.socket,
    drain: Callable[[], None] = lambda: None,
) -> None:
    """Run a ``uvicorn.Server`` until SIGTERM, then until `drain`, run beside it, has returned.

    SIGINT cuts all requests off. The sandbox server, the gateway and `tuneloop ui` (`cli/ui.py`)
    are run by it, too.
    """
    # The limit of a container is often 1,024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2**16)), hard))
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    draining = threading.Event()

    def drain_and_end() -> None:
        try:
            drain()
        finally:
            server.should_exit = True

    def stop(number: int, _: Any) -> None:
        if number == signal.SIGINT:
            server.should_exit = True
            server.force_exit = True
        elif not draining.is_set():
            draining.set()
            threading.Thread(target=drain_and_end, name="drain", daemon=True).start()

    # uvicorn calls it while it runs; a signal before that counts, too.
    server.handle_exit = stop
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    server.run(sockets=[listener])


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    """Whether a message is of anything but a request that was cut off, which needs no traceback."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, asyncio.CancelledError)


def bind_address(host: str, port: int) -> socket.socket:
    """Bind an address of this machine.

    Raises:
        UserError: the address is another machine's, or the port is taken.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            remedy = "is taken; stop what listens there, or choose another"
            raise UserError("--port", port, remedy) from error
        remedy = f"port {port}: {error.strerror}; choose an address of this machine"
        raise UserError("--host", host, remedy) from error
    return listener


def add_address_flags(parser: Parser) -> None:
    """Add the flags of the address that `bind_address` binds, for any server of ours."""
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        help="0 takes a free one and says which (default: 8000)",
    )


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags.

    Their lines are built in `argo/template.py: server_template`,
    `kfp/rollout_server.py: run_server`, `extensions/gateway/processes.py: scale_sampler` and
    ``manifests/components/rollout-server``, and stand in workflows that are submitted already: a
    flag is added with a default, and none is removed. A setting that Argo passes by a new flag,
    KFP has to pass, too, or to refuse (`config/engines.py: local_settings`).
    `local/warm.py: is_server` takes a line without ``--engine`` for that of a server of vLLM.
    """
    parser = Parser("python -m tuneloop.inference.server", __doc__)
    json_object = TypeAdapter(JsonObject).validate_json
    parser.add_argument("--policy", metavar="REF", help="the checkpoint to start with")
    parser.add_argument(
        "--weights",
        metavar="URL",
        help="follow the versions published below this URL",
    )
    parser.add_argument(
        "--weights-dir",
        metavar="DIR",
        help="assemble them here (default: a temporary directory)",
    )
    parser.add_argument(
        "--base",
        type=Path,
        metavar="DIR",
        help="the model that the versions start on, where version 0 stores none (default: none)",
    )
    parser.add_argument(
        "--poll-interval",
        type=float,
        default=1.0,
        help="seconds between reads of the pointer; a request for a new version reads it at once "
        "(default: 1)",
    )
    parser.add_argument(
        "--pause",
        choices=["wait", "keep"],
        default="wait",
        help="when weights change, running requests finish first, or go on with the new ones "
        "(default: wait)",
    )
    add_address_flags(parser)
    parser.add_argument(
        "--attempts",
        metavar="URL",
        help="URL of the record of earlier starts; the server ends after too many without an "
        "answer (default: none)",
    )
    parser.add_argument(
        "--asleep",
        type=json_object,
        default={},
        help="what its pod requests while it sleeps, a JSON object; no effect outside a pod "
        "(default: no change)",
    )
    parser.add_argument(
        "--engine",
        metavar="KIND",
        default=VLLM,
        help=f"the engine, one that serves (default: {VLLM})",
    )
    parser.add_argument(
        "--engine-args",
        type=json_object,
        default={},
        help="the engine's own options (of vLLM: its EngineArgs), a JSON object",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.stdout.flush()
    code = main()
    sys.stderr.flush()
    # The engine's thread may be in a step, and tearing an engine down takes seconds.
    os._exit(code)
