"""A fleet whose workers are listed: ``http://a:8000,http://b:8000``.

`discover` leaves out those that are down. A worker's URL is its id: one that is restarted in the
middle of a refit is not seen as new.
"""

import contextlib
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from tuneloop.core.errors import UserError
from tuneloop.inference.fleet import Fleet, Worker, port_of

CONNECT_S = 5.0
"""Seconds to connect: a worker that does not accept by then counts as gone."""


class Urls:
    """Workers by their URLs; those that accept no connection are left out."""

    endpoint = None

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls

    def discover(self) -> list[Worker]:
        workers: list[Worker] = []
        # A URL that is listed twice is one worker.
        for url in dict.fromkeys(self.urls):
            parts = urlsplit(url)
            port = parts.port or (80 if parts.scheme == "http" else 443)
            with contextlib.suppress(OSError):
                socket.create_connection((parts.hostname or "", port), CONNECT_S).close()
                workers.append(Worker(url, url))
        return workers


def open_fleet(url: str) -> Fleet:
    """Open the fleet of the URLs in `url`, which commas separate.

    Raises:
        UserError: one is not an absolute URL.
    """
    workers = [text.strip().rstrip("/") for text in url.split(",")]
    for worker in workers:
        parts = urlsplit(worker)
        if parts.scheme not in ("http", "https") or not parts.hostname or port_of(worker) == 0:
            raise UserError("fleet", url, f"{worker!r} must be an absolute URL: http://host:port")
    return Urls(workers)
