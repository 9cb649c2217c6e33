"""A fleet whose workers are listed: ``http://a:8000,http://b:8000``. `discover` leaves out those that are down."""

import contextlib
import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from tuneloop.core.errors import UserError
from tuneloop.inference.fleet import Fleet, Worker, port_of

CONNECT_S = 5.0


class Urls:
    """See the module."""

    endpoint = None

    def __init__(self, urls: Sequence[str]) -> None:
        self.urls = urls

    def discover(self) -> list[Worker]:
        found = []
        for url in dict.fromkeys(self.urls):
            parts = urlsplit(url)
            with contextlib.suppress(OSError):
                place = parts.hostname or "", parts.port or {"http": 80}.get(parts.scheme, 443)
                socket.create_connection(place, CONNECT_S).close()
                found.append(Worker(url, url))
        return found


def open_fleet(url: str) -> Fleet:
    """Open the fleet of the URLs in `url`, which commas separate."""
    urls = [each.strip().rstrip("/") for each in url.split(",")]
    for each in urls:
        parts = urlsplit(each)
        if parts.scheme not in ("http", "https") or not parts.hostname or port_of(each) == 0:
            raise UserError("fleet", url, f"{each!r} must be an absolute URL: http://host:port")
    return Urls(urls)
