"""A fleet behind a name with several addresses, as ``dns://rollout-workers.tuneloop.svc:8000``.

A headless Service has one address for each ready pod. Rollouts in pods use it, as it needs no
token. The address is the worker's id: a pod that takes the address of another in the middle of a
refit is not seen as new. `inference/fleet/service.py` tells such pods apart, by their uids.
"""

import socket
from urllib.parse import urlsplit

from tuneloop.core.errors import Retryable, UserError
from tuneloop.inference.fleet import Fleet, Worker, port_of


class Dns:
    """The workers behind a Service without an address of its own, one for each of its addresses."""

    endpoint = None

    def __init__(self, name: str, port: int) -> None:
        self.name = name
        self.port = port

    def discover(self) -> list[Worker]:
        try:
            addresses = socket.getaddrinfo(self.name, self.port, type=socket.SOCK_STREAM)
        except OSError as error:
            # A Service whose pods are all gone has no address either.
            raise Retryable(f"fleet dns://{self.name}:{self.port}: {error}") from error
        hosts: set[str] = set()
        for family, _, _, _, address in addresses:
            host = str(address[0])
            hosts.add(f"[{host}]" if family == socket.AF_INET6 else host)
        return [Worker(host, f"http://{host}:{self.port}") for host in sorted(hosts)]


def open_fleet(url: str) -> Fleet:
    parts = urlsplit(url)
    port = port_of(url)
    if not parts.hostname or not port or parts.path not in ("", "/"):
        raise UserError("fleet", url, "must be dns://name:port")
    return Dns(parts.hostname, port)
