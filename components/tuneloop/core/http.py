"""Make HTTP requests, each over a connection of its own, because an idle one may lead nowhere.

No proxy is used. Requests run on an event loop in a thread of its own, so that a caller can check
other things meanwhile, or hang up.
"""

import asyncio
import functools
import os
import queue
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tuneloop.core.errors import list_chain

POLL_S = 0.2
"""Seconds between two calls of `check` while a request waits."""
CONNECT_S = 10.0
"""Connection timeout in seconds: an address that does not answer at all, such as a deleted pod's,
counts as lost. The sandbox's client reads it, too (`rewards/sandbox`)."""
END = b""
"""The last `Event` of a response; chunks of a body are never empty."""

Event = int | bytes | Exception
"""The status of a response, a chunk of its body, `END`, or the error that ended it."""


class Unanswered(Exception):
    """The server does not answer, or its answer breaks off; the message says why."""


def is_transient(status: int) -> bool:
    """Return whether a status may pass by itself: a server error, a request timeout, or too many
    requests.

    Some clients add statuses of their own (`inference/engines/_connection.py: LATER`,
    `kube/resize.py`); `kfp/api.py: UNAVAILABLE_STATUSES` lists those that a task waits for.
    """
    return status >= 500 or status in (408, 429)


class Response:
    """A response as it arrives."""

    def __init__(self, receive: Callable[[], Any]) -> None:
        """Wait for the status.

        Args:
            receive: waits for the next `Event` and returns it; raises it, if it is an error.
        """
        self._receive_event = receive
        self._ended = False
        self.status: int = receive()

    def _receive(self) -> Any:
        event = END if self._ended else self._receive_event()
        self._ended = event == END
        return event

    def read(self) -> bytes:
        return b"".join(iter(self._receive, END))

    def lines(self) -> Iterator[bytes]:
        """Yield each line of the body, without its end, as soon as it is complete."""
        incomplete = b""
        for chunk in iter(self._receive, END):
            *lines, incomplete = (incomplete + chunk).split(b"\n")
            yield from lines
        if incomplete:
            yield incomplete


def send_request(method: str, url: str, *, timeout_s: float, **options: Any) -> tuple[int, bytes]:
    """Send a request and return status and body, whatever the status.

    Options and errors are those of `open_response`.
    """
    with open_response(method, url, timeout_s=timeout_s, **options) as response:
        return response.status, response.read()


@contextmanager
def open_response(
    method: str,
    url: str,
    *,
    timeout_s: float,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    check: Callable[[], None] = lambda: None,
    trusted: ssl.SSLContext | None = None,
) -> Iterator[Response]:
    """Send a request, and yield the response once its status is there; leaving the block hangs up.

    Args:
        timeout_s: how long the server may send no byte, in seconds.
        body: is sent as JSON.
        check: is called at least every `POLL_S` seconds while this process waits; what it raises
            hangs up.
        trusted: certificates of the server (default: the system's).

    Raises Unanswered if the server is lost, or silent for too long.
    """
    # Imported here and not on the event loop's thread: a fork meanwhile would inherit a held lock.
    import httpx2  # noqa: F401

    events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def receive() -> Any:
        while True:
            check()
            try:
                event = events.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(event, Exception):
                raise event
            return event

    sending = _send(events, timeout_s, trusted, method=method, url=url, json=body, headers=headers)
    task = asyncio.run_coroutine_threadsafe(sending, _event_loop())
    try:
        yield Response(receive)
    finally:
        task.cancel()


async def _send(
    events: queue.SimpleQueue[Event],
    timeout_s: float,
    trusted: ssl.SSLContext | None,
    **request: Any,
) -> None:
    """Put the status of the response, each chunk of its body and `END` into `events`, or the error
    that ended it.
    """
    import httpx2

    connect_s = min(CONNECT_S, timeout_s)
    try:
        # To load the system's certificates takes longer than a request to a neighbour.
        is_encrypted = request["url"].startswith("https:")
        verify = (trusted or _read_certificates()) if is_encrypted else False
        timeout = httpx2.Timeout(timeout_s, connect=connect_s)
        async with httpx2.AsyncClient(trust_env=False, verify=verify, timeout=timeout) as client:
            response = await client.send(client.build_request(**request), stream=True)
            events.put(response.status_code)
            async for chunk in response.aiter_bytes():
                events.put(chunk)
        events.put(END)
    except httpx2.ConnectTimeout:
        events.put(Unanswered(f"ConnectTimeout: no connection in {connect_s:g} s"))
    except httpx2.TimeoutException as error:
        events.put(Unanswered(f"{type(error).__name__}: not a byte in {timeout_s:g} s"))
    except httpx2.HTTPError as error:
        # httpx's own message often is empty: the system's error is at the end of the chain.
        root = list_chain(error)[-1]
        events.put(Unanswered(f"{type(root).__name__}: {root}"))
    except Exception as error:
        events.put(error)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process, on a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, daemon=True).start()
    return loop


# A forked process inherits the loop, but not its thread.
os.register_at_fork(after_in_child=_event_loop.cache_clear)
_read_certificates = functools.cache(ssl.create_default_context)
