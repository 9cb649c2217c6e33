"""Make HTTP requests, through no proxy, each over a connection of its own: an idle one may lead to a lost server."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2


class Unanswered(Exception):
    """Nobody answers, or the answer breaks off; the message says how."""


def request(
    method: str, url: str, *, timeout_s: float, body: Any = None, headers: Mapping[str, str] | None = None
) -> httpx2.Response:
    """Return the whole answer, whatever its status; raise as `open_response`."""
    with open_response(method, url, timeout_s=timeout_s, body=body, headers=headers) as response:
        response.read()
        return response


@contextmanager
def open_response(
    method: str, url: str, *, timeout_s: float, body: Any = None, headers: Mapping[str, str] | None = None
) -> Iterator[httpx2.Response]:
    """Send `body` as JSON, and give the answer once its status is there; leaving the block hangs up.

    Raises:
        Unanswered: nobody answers, breaks off, or is silent for `timeout_s` seconds.
    """
    import httpx2

    try:
        with _client().stream(method, url, json=body, headers=headers, timeout=timeout_s) as response:
            yield response
    except httpx2.HTTPError as error:
        raise Unanswered(f"{type(error).__name__}: {error}") from error


@functools.cache
def _client() -> httpx2.Client:
    import httpx2

    return httpx2.Client(trust_env=False, limits=httpx2.Limits(max_keepalive_connections=0))
