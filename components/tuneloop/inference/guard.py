"""Check every request before the application sees it: its token, size, and the time of its headers.

The rollout server and the sandbox server put `TokenGuard` before their applications. The gateway
has a guard of its own (`extensions/gateway/access.py`), as it knows callers by name.
`TimedProtocol` serves them all (`UVICORN` in `inference/server.py`).
"""

import asyncio
import hmac
import resource
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from fastapi import HTTPException
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from tuneloop.core.server_token import VARIABLE, read_tokens
from tuneloop.inference import refusals

HEADERS_S = 20.0
"""Seconds within which a new connection must send a request with a token.

Whoever checks tokens marks a request that has one by the key ``caller`` of its ASGI state, which
`TimedProtocol` reads: `TokenGuard` here, `extensions/gateway/app.py` and
`extensions/gateway/worker.py` there.
"""
STRANGERS = 1024
"""The maximum number of open connections without a token.

It is half the limit of file descriptors, if that is lower.
"""


class TokenGuard:
    """Lets requests pass that have a token of the run's file (`tuneloop.core.server_token`).

    Where there is no such file, all pass.

    Args:
        app: the ASGI application behind it.
        open_paths: paths that need no token.
        max_bytes: called with the path; returns the maximum bytes of a body. It holds for open
            paths, too.
    """

    def __init__(
        self,
        app: Any,
        open_paths: Sequence[str],
        max_bytes: Callable[[str], int],
    ) -> None:
        self.app = app
        self.open_paths = open_paths
        self.max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer 401 to a request without a token, and 413 to a body that is too long."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        limit = self.max_bytes(scope["path"])
        size = 0

        async def receive_part() -> Any:
            # Counted as it arrives: a client may state no length, or a wrong one.
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > limit:
                problem = f"the body has more than {limit} bytes; send less at a time"
                raise HTTPException(413, problem)
            return message

        if scope["path"] not in self.open_paths:
            if not _has_token(Headers(scope=scope)):
                response = await refusals.refuse_stranger(
                    "no token of this run: send Authorization: Bearer TOKEN, "
                    f"from the file that {VARIABLE} names"
                )
                return await response(scope, receive, send)
            scope.setdefault("state", {})["caller"] = "of the run"
        await self.app(scope, receive_part, send)


def _has_token(headers: Headers) -> bool:
    """Whether a request has a token of the run, or needs none."""
    tokens = read_tokens()
    authorization = headers.get("authorization", "").encode()
    accepted = [f"Bearer {token}".encode() for token in tokens]
    # Compared in constant time, so that the time of an answer says nothing of a token.
    return not tokens or any(hmac.compare_digest(authorization, value) for value in accepted)


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP, which closes connections without a token.

    Each is closed after `HEADERS_S`, and the oldest of more than `STRANGERS`, as clients with a
    token send it at once. Addresses tell nothing: behind a proxy all peers have one.

    Attributes:
        strangers: connections without a token so far, the oldest first, with their timers; of all
            servers of the process.
        had_token: whether the last request that was answered had a token; the next one may not have
            been checked yet.
    """

    strangers: ClassVar[OrderedDict["TimedProtocol", asyncio.TimerHandle]] = OrderedDict()
    had_token = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.strangers[self] = self.loop.call_later(HEADERS_S, self._judge)
        descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        while len(self.strangers) > min(STRANGERS, descriptors // 2):
            next(iter(self.strangers))._judge()

    def connection_lost(self, exc: Exception | None) -> None:
        timer = self.strangers.pop(self, None)
        if timer:
            timer.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.had_token = "caller" in self.scope["state"]
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP; the connection's first as late as with 401."""

        def answer() -> None:
            if not self.transport.is_closing():
                H11Protocol.send_400_response(self, msg)

        if self.cycle is None:
            self.transport.pause_reading()
            self.loop.call_later(refusals.REFUSAL_S, answer)
        else:
            answer()

    def _judge(self) -> None:
        """Close the connection, unless a token has arrived."""
        self.strangers.pop(self).cancel()
        has_token = self.scope is not None and "caller" in self.scope["state"]
        if not self.had_token and not has_token:
            # close() would wait until the peer has read everything.
            self.transport.abort()
