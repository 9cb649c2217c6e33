"""Workers of another make, and a frontend that knows them: standard library alone, it knows nothing of tuneloop.

    python crew.py worker 8081                        # administration, and GET /version
    python crew.py frontend 8000 8001 WORKERS 8081    # answers anything on 8000, lists the workers of a name on 8001

`Crew` is the same in one process, with things that go wrong.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ROUTES = [
    *(
        "get_weight_version",
        "pause_generation",
        "update_weights_from_disk",
        "flush_cache",
        "resume_generation",
    ),
    "liveness_probe",
]


class Member:
    """One worker; `fault` names a route that fails."""

    def __init__(self, name: str, fault: str = "") -> None:
        self.name, self.fault, self.version, self.paused = name, fault, "", False
        self.calls: list[str] = []
        self.on_update = lambda: None

    def answer(self, route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        self.calls.append(route)
        if route == self.fault:
            return 200, {"status": "error", "message": f"{route} failed"}
        if route == "pause_generation":
            self.paused = True
        elif route == "resume_generation":
            self.paused = False
        elif route == "update_weights_from_disk":
            if not self.paused:
                return 409, {"status": "error", "message": "not paused"}
            self.on_update()
            self.version = body["weight_version"] if self.fault != "forgets" else self.version
        elif route not in ROUTES:
            return 404, {"status": "error", "message": "no such route"}
        return 200, {"status": "ok", "version": self.version}


class Handler(BaseHTTPRequestHandler):
    member: Member

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        self.reply(*self.member.answer(self.path.removeprefix("/engine/"), body))

    def do_GET(self) -> None:
        self.reply(200, {"name": self.member.name, "version": self.member.version})

    def reply(self, status: int, said: dict[str, Any]) -> None:
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None: ...


class Crew:
    """Workers in this process, each on a port of its own."""

    def __init__(self) -> None:
        self.members: dict[str, Member] = {}
        self.servers: dict[str, ThreadingHTTPServer] = {}

    def hire(self, name: str, fault: str = "") -> Member:
        member = Member(name, fault)
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Own", (Handler,), {"member": member}))
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        self.members[name], self.servers[name] = member, server
        return member

    def lose(self, name: str) -> None:
        """It stays listed."""
        self.servers[name].server_close()
        self.servers[name].shutdown()

    def fire(self, name: str) -> None:
        """It is gone from the list, too."""
        self.lose(name)
        del self.servers[name], self.members[name]

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.servers[name].server_address[1]}"

    def listed(self) -> dict[str, Any]:
        """As ``GET /v1/rl/workers`` of the frontend; each instance twice, for it has two endpoints."""
        rows = [listing(name, self.url(name)) for name in self.servers]
        return {"protocol_version": 1, "namespace": "dynamo", "workers": rows + rows}


def listing(name: str, url: str) -> dict[str, Any]:
    return {
        "component": "backend",
        "endpoint": "rl",
        "instance_id": name,
        "system_url": url,
        "routes": ROUTES,
    }


class Frontend(Handler):
    """What the frontend of a graph answers."""

    name, port = "", 0

    def do_GET(self) -> None:
        if self.path != "/v1/rl/workers":
            self.reply(404, {"error": "nothing here"})  # an HTTP server is up
            return
        found = socket.getaddrinfo(self.name, self.port, type=socket.SOCK_STREAM)
        rows = [
            listing(place, f"http://{place}:{self.port}")
            for place in sorted({str(a[0]) for *_, a in found})
        ]
        self.reply(200, {"protocol_version": 1, "namespace": "dynamo", "workers": rows})


def main(role: str, *words: str) -> None:
    if role == "worker":
        Handler.member = Member(os.environ.get("HOSTNAME", "worker"))
        ThreadingHTTPServer(("", int(words[0])), Handler).serve_forever()
    Frontend.name, Frontend.port = words[2], int(words[3])
    threading.Thread(
        target=ThreadingHTTPServer(("", int(words[0])), Frontend).serve_forever, daemon=True
    ).start()
    ThreadingHTTPServer(("", int(words[1])), Frontend).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
