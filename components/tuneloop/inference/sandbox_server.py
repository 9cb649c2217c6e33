"""Run programs of a policy for remote clients (``cluster.sandbox``).

::

    python -m tuneloop.inference.sandbox_server

``POST /run`` takes a `Program`, runs it confined as `tuneloop.rewards.sandbox` does, and answers
with its ending and the isolation that this server proves, as ``GET /health`` does. A program that
requires more is refused, and not run.

Exit codes: 0 after SIGTERM, when all that was accepted is answered; 2 a mistake, or programs cannot
be shut in.

`rewards/sandbox` is the client, where ``TUNELOOP_SANDBOX`` names a URL.
"""

import asyncio
import ctypes
import json
import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any, Literal

from fastapi import Request
from pydantic import BaseModel, Field

from tuneloop.core.errors import UserError, print_diagnostic, report_errors
from tuneloop.core.json_types import JsonObject
from tuneloop.core.program import Parser
from tuneloop.core.server_token import VARIABLE, read_tokens
from tuneloop.inference.guard import TokenGuard
from tuneloop.inference.refusals import Refused, create_app
from tuneloop.inference.server import (
    UVICORN,
    add_address_flags,
    bind_address,
    serve_until_signalled,
)
from tuneloop.rewards.sandbox import LEAST_MEMORY, Limits, check_kernel, run_program

Isolation = Literal["process", "gvisor"]
MAX_BYTES = 2**24
"""Maximum bytes of a body; the client takes 413 for a program that used up its memory."""
GRACE_S = 60
"""Seconds for running programs after SIGTERM; ``manifests/components/sandbox`` and
``manifests/components/agent-sandbox`` give the pod ten more.
"""
KERNEL_LOG_BYTES = 2**17
"""Bytes of the log that are read, its newest; the whole log of gVisor has a few lines."""
STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
"""A string of JSON; the rest of the text where it does not end."""
FRAME_BYTES = 512
"""Maximum bytes of a body without its strings.

Parsing a body with more takes seconds, and blocks all threads.
"""
WAITING = 4
"""The number of programs that may wait for each that runs; further clients are told to retry.

`rewards/sandbox/__init__.py: run_in_sandbox` waits long enough for four to run before its own.
"""


class Program(BaseModel, extra="forbid"):
    """A program of Python, its input, an expression to evaluate after it, and its `Limits`.

    The client builds it in `rewards/sandbox/__init__.py: run_in_sandbox`, of all fields of
    `Limits`. A server refuses a field that it does not know, so that one that is added needs
    servers that are updated before their clients. The answer is the client's `_Answer`: an
    `Ending`.
    """

    program: str
    stdin: str = ""
    call: str | None = None
    seconds: float = Field(gt=0, le=600)
    memory: int = Field(ge=LEAST_MEMORY, le=2**36, strict=True)
    output: int = Field(gt=0, le=2**24)
    isolation: Isolation = "process"


def build_app(programs: int, isolation: Isolation) -> Any:
    """Build the application: `programs` at a time."""
    app = create_app(400)
    pool = ThreadPoolExecutor(programs)
    free = programs * (1 + WAITING)
    app.add_middleware(TokenGuard, open_paths=("/health",), max_bytes=lambda _: MAX_BYTES)
    app.add_api_route("/health", lambda: {"status": "ok", "isolation": isolation})

    @app.post("/run")
    async def run_in_turn(request: Request) -> JsonObject:
        nonlocal free
        body = _read_program(await request.body())
        if body.isolation not in ("process", isolation):
            remedy = (
                f"this server proves only the isolation {isolation}; "
                "it runs no program that requires more"
            )
            raise UserError("isolation", body.isolation, remedy)
        # A longer queue would only let clients time out while their programs wait.
        if not free:
            raise Refused(503, "the queue of programs is full; try again")
        limits = Limits(body.seconds, body.memory, body.output)
        free -= 1
        try:
            ending = await asyncio.get_running_loop().run_in_executor(
                pool,
                run_program,
                body.program,
                body.stdin,
                body.call,
                limits,
            )
        # JSON may hold half a character of UTF-16, which no pipe takes.
        except UnicodeEncodeError as error:
            raise UserError("stdin", body.stdin, f"is not text: {error.reason}") from error
        except OSError as error:
            raise Refused(503, str(error)) from error
        finally:
            free += 1
        return {"isolation": isolation, "ending": asdict(ending)}

    return app


def _read_program(text: bytes) -> Program:
    """Read the body of a request. Raises UserError: it is no JSON object, or not a program."""
    value = None
    if len(STRING.sub(b"", text, 64)) < FRAME_BYTES:
        # What is not JSON is refused as any other value is.
        with suppress(ValueError):
            value = json.loads(text)
    if not isinstance(value, dict):
        raise UserError("body", text, "must be a JSON object of a program's texts and numbers")
    return Program.model_validate(value)


def read_kernel_log() -> bytes:
    """Read the kernel's log (syslog(2)); empty if this user may not."""
    log = ctypes.create_string_buffer(KERNEL_LOG_BYTES)
    # 3 is SYSLOG_ACTION_READ_ALL; a negative answer means that it is not allowed.
    size = ctypes.CDLL(None).klogctl(3, log, len(log))
    return log.raw[: max(size, 0)]


def read_isolation(log: bytes) -> Isolation:
    """Return what a kernel's log proves: gVisor's begins with its name.

    Nothing proves a virtual machine of Kata's. A further isolation is also one that a setting may
    demand: `workflow/settings.py: SANDBOX_PLACE`.
    """
    return "gvisor" if log.split(b"\n")[0].endswith(b"] Starting gVisor...") else "process"


@report_errors
def main(argv: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM, and return the exit code."""
    parser = Parser("python -m tuneloop.inference.sandbox_server", __doc__)
    add_address_flags(parser)
    parser.add_argument(
        "--programs",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="at a time (default: cores)",
    )
    options = parser.parse_args(argv)
    if options.programs < 1:
        raise UserError("--programs", options.programs, "must be at least 1")
    check_kernel("sandbox", f"{options.host}:{options.port}")
    # It runs whatever it is sent, so that only clients of the run may reach it.
    if not (read_tokens() or options.host.startswith("127.")):
        remedy = "must name a file with a token, or --host be 127.0.0.1"
        raise UserError(VARIABLE, os.environ.get(VARIABLE), remedy)
    import uvicorn

    with bind_address(options.host, options.port) as listener:
        listener.listen(1024)
        isolation = read_isolation(read_kernel_log())
        host, port = listener.getsockname()[:2]
        print_diagnostic(f"sandbox: {isolation} at http://{host}:{port}", 0)
        app = build_app(options.programs, isolation)
        config = uvicorn.Config(app, timeout_graceful_shutdown=GRACE_S, **UVICORN)
        serve_until_signalled(uvicorn.Server(config), listener)
    return 0


if __name__ == "__main__":
    sys.exit(main())
