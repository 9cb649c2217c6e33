"""Checks of every request before the application sees it: its token, the size of its body, the time of its headers."""

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
"""Seconds within which a new connection must send a request with a token."""
STRANGERS = 1024
"""The maximum number of open connections without a token, or half the limit of file descriptors if that is lower."""


class TokenGuard:
    """Lets requests pass that have a token of the run's file, if there is one (`tuneloop.core.server_token`)."""

    def __init__(
        self, app: Any, open_paths: Sequence[str], max_bytes: Callable[[str], int]
    ) -> None:
        self.app = app
        self.open_paths = open_paths
        self.max_bytes = max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer 401 to a request without a token; read at most `max_bytes` of a body for its path, else answer 413."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        left = most = self.max_bytes(scope["path"])
        sent = Headers(scope=scope).get("authorization", "").encode()

        async def receive_part() -> Any:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(
                    413, f"the body has more than {most} bytes; send less at a time"
                )
            return message

        if scope["path"] not in self.open_paths:
            tokens = read_tokens()
            if tokens and not any(
                hmac.compare_digest(sent, f"Bearer {token}".encode()) for token in tokens
            ):
                told = f"no token of this run: send Authorization: Bearer TOKEN, from the file that {VARIABLE} names"
                return await (await refusals.refuse_stranger(told))(scope, receive, send)
            scope.setdefault("state", {})["caller"] = "of the run"
        await self.app(scope, receive_part, send)


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP, which closes connections without a token: each after `HEADERS_S`, and the oldest of more than
    `STRANGERS` (clients with a token send it at once). Addresses tell nothing: behind a proxy all peers have one."""

    strangers: ClassVar[OrderedDict["TimedProtocol", asyncio.TimerHandle]] = OrderedDict()
    known = False  # whether the last answered request had a token: the next one may not have been checked yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.strangers[self] = self.loop.call_later(HEADERS_S, self._judge)
        while len(self.strangers) > min(
            STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2
        ):
            next(iter(self.strangers))._judge()

    def connection_lost(self, exc: Exception | None) -> None:
        if clock := self.strangers.pop(self, None):
            clock.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self.known = "caller" in self.scope["state"]
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that is not HTTP; if it is the connection's first, as late as with a 401."""

        def answer() -> None:
            if not self.transport.is_closing():
                H11Protocol.send_400_response(self, msg)

        if self.cycle is None:
            self.transport.pause_reading()
            self.loop.call_later(refusals.REFUSAL_S, answer)
        else:
            answer()

    def _judge(self) -> None:
        self.strangers.pop(self).cancel()
        if not self.known and (self.scope is None or "caller" not in self.scope["state"]):
            self.transport.abort()  # close() would wait until the peer has read everything
