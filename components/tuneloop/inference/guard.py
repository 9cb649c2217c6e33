"""What a server asks of every request before the application sees it: a token, a body that ends, headers in time."""

import asyncio
import hmac
from collections.abc import Sequence
from typing import Any

import h11
from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from uvicorn.protocols.http.h11_impl import H11Protocol

from tuneloop.core.server_token import VARIABLE, read_tokens

HEADERS_S = 20.0
"""Seconds within which the headers of a request are to be there, from the opening of its connection or from the first
byte that follows another request."""


class TokenGuard:
    """An application for who sends a token of the run's file, if there is one (`tuneloop.core.server_token`)."""

    def __init__(self, app: Any, open_paths: Sequence[str], max_bytes: int) -> None:
        self.app, self.open_paths, self.max_bytes = app, open_paths, max_bytes

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer 401 to who has no token; read no more than `max_bytes` of a body, then answer 413."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        left, sent = self.max_bytes, Headers(scope=scope).get("authorization", "").encode()

        async def receive_part() -> Any:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"the body has more than {self.max_bytes} bytes; send less at a time")
            return message

        tokens = () if scope["path"] in self.open_paths else read_tokens()
        if tokens and not any(hmac.compare_digest(sent, f"Bearer {token}".encode()) for token in tokens):
            told = f"no token of this run: send Authorization: Bearer TOKEN, from the file that {VARIABLE} names"
            return await JSONResponse({"error": told}, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
        await self.app(scope, receive_part, send)


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP, closing a connection whose request has not all its headers after `HEADERS_S`."""

    _closing: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._closing = self.loop.call_later(HEADERS_S, transport.close)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # the headers are there
            self._stop_clock()
        elif self._closing is None:
            self._closing = self.loop.call_later(HEADERS_S, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def _stop_clock(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
