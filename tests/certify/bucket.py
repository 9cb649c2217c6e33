"""A bucket as S3 serves it, in a process of its own, whose n-th request can be made to go wrong.

It knows what tuneloop's stores ask for: objects with conditional writes (``If-None-Match: *``, ``If-Match``), in parts
or whole, ranges, listings, deletes of one and of many. It answers one request at a time, over a connection each, so
that requests have numbers.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import struct
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from tests.objects import list_page, tag
from tuneloop.local.spawn import die_with_parent

NAME = "bucket"
FAULTS = (
    "error before",
    "error after",
    "throttled",
    "slow down",
    "torn answer",
    "torn upload",
    "dead",
    "conflict 409",
    "conflict 412",
    "stale read",
    "stale list",
)
_ATTEMPT = re.compile(r"data-[0-9a-f]{12,16}")


@dataclass
class Plan:
    """What goes wrong: `fault` at request `at`, of those that begin with `on`, and at the `length` - 1 after it."""

    fault: str = ""
    at: int = 0
    length: int = 1
    on: str = ""


@dataclass
class Bucket:
    """Objects, what each was before its last write, and the requests so far.

    Attributes:
        met: the request that the plan's fault was done to.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    before: dict[str, bytes | None] = field(default_factory=dict)
    uploads: list[dict[int, bytes]] = field(default_factory=list)
    newest: str = ""
    asked: list[str] = field(default_factory=list)
    plan: Plan = field(default_factory=Plan)
    met: str = ""
    again: int = 0

    def write(self, key: str, data: bytes | None) -> None:
        self.before[key], self.newest = self.objects.get(key), key
        if data is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = data


class Broken(Exception):
    """The connection ends here."""


class Handler(BaseHTTPRequestHandler):
    bucket: Bucket

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        key, query = (
            unquote(url.path).removeprefix(f"/{NAME}").lstrip("/"),
            parse_qs(url.query, True),
        )
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if url.path.startswith("/-/"):
            return self.answer(200, json.dumps(self.control(url.path, body)).encode())
        kind = (
            "LIST"
            if not key and self.command == "GET"
            else "DELETE many"
            if "delete" in query
            else self.command
        )
        conditional = bool(self.headers.get("If-None-Match") or self.headers.get("If-Match"))
        fault = self.meet(
            f"{kind}{' if' if conditional else ''} {_ATTEMPT.sub('*', key)}", conditional
        )
        try:
            self.serve(kind, key, {name: values[0] for name, values in query.items()}, body, fault)
        except Broken:
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.close_connection = True

    do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

    def meet(self, request: str, conditional: bool) -> str:
        """Number a request, and return what is to go wrong with it."""
        bucket, plan = self.bucket, self.bucket.plan
        number = sum(each.startswith(plan.on) for each in bucket.asked)
        bucket.asked.append(request)
        if not request.startswith(plan.on):
            return ""
        if not plan.fault or not plan.at <= number < plan.at + plan.length:
            return ""
        wanted = {
            "conflict": conditional,
            "torn upload": request.startswith("PUT"),
            "stale list": "LIST" in request,
        }
        if plan.fault == "stale read" and not request.startswith("GET"):
            return ""
        if not all(fits for name, fits in wanted.items() if plan.fault.startswith(name)):
            return ""
        bucket.met = bucket.met or request
        return plan.fault

    def serve(self, kind: str, key: str, query: dict[str, str], body: bytes, fault: str) -> None:
        if fault in ("dead", "torn upload"):
            raise Broken
        if fault == "error before":
            return self.refuse(500, "InternalError")
        if fault == "throttled":
            return self.refuse(429, "TooManyRequests")
        if fault == "slow down":
            return self.refuse(503, "SlowDown")
        if fault == "conflict 409":
            return self.refuse(409, "ConditionalRequestConflict")
        if fault == "conflict 412":
            return self.refuse(412, "PreconditionFailed")
        status, data, tagged = self.carry_out(kind, key, query, body, fault.startswith("stale"))
        if fault == "error after":
            return self.refuse(500, "InternalError")
        self.answer(status, data, tagged, torn=fault == "torn answer")

    def carry_out(
        self, kind: str, key: str, query: dict[str, str], body: bytes, stale: bool
    ) -> tuple[int, bytes, bytes]:
        """Do what a request asks for; return status, body and what its ETag is of."""
        bucket = self.bucket
        if kind == "LIST":
            left_out = bucket.newest if stale else ""
            return (
                200,
                list_page({k: v for k, v in bucket.objects.items() if k != left_out}, **query),
                b"",
            )
        if kind == "DELETE many":
            keys = [unquote(each.decode()) for each in re.findall(rb"<Key>([^<]*)</Key>", body)]
            for each in keys:
                bucket.write(each, None)
            return (
                200,
                _xml(
                    "DeleteResult",
                    "".join(f"<Deleted><Key>{each}</Key></Deleted>" for each in keys),
                ),
                b"",
            )
        if "uploads" in query:
            bucket.uploads.append({})
            return (
                200,
                _xml(
                    "InitiateMultipartUploadResult",
                    f"<UploadId>{len(bucket.uploads) - 1}</UploadId>",
                ),
                b"",
            )
        if "partNumber" in query:
            bucket.uploads[int(query["uploadId"])][int(query["partNumber"])] = body
            return 200, b"", body
        if kind == "POST":  # its parts stay, and the same answer is given to the same request
            parts = bucket.uploads[int(query["uploadId"])]
            body = b"".join(parts[number] for number in sorted(parts))
        if kind == "DELETE":
            if "uploadId" not in query:
                bucket.write(key, None)
            return 204, b"", b""
        held = bucket.before.get(key, bucket.objects.get(key)) if stale else bucket.objects.get(key)
        if kind in ("PUT", "POST"):
            wanted = self.headers.get("If-Match")
            if (held is not None and self.headers.get("If-None-Match")) or (
                wanted and wanted != tag(held or b"")
            ):
                return 412, _error("PreconditionFailed"), b""
            bucket.write(key, body)
            return (
                200,
                _xml("CompleteMultipartUploadResult", f"<ETag>{tag(body)}</ETag>")
                * (kind == "POST"),
                body,
            )
        if held is None:
            return 404, _error("NoSuchKey"), b""
        if ranged := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or ""):
            self.ranged = f"bytes {ranged[1]}-{min(int(ranged[2]), len(held) - 1)}/{len(held)}"
            return 206, held[int(ranged[1]) : int(ranged[2]) + 1], held
        return 200, held, held

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, _error(code))

    def answer(self, status: int, data: bytes, tagged: bytes = b"", torn: bool = False) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data) + torn))
        self.send_header("ETag", tag(tagged))
        self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
        if status == 206:
            self.send_header("Content-Range", self.ranged)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if torn else data)
        if torn:
            raise Broken

    def control(self, path: str, body: bytes) -> Any:
        bucket = self.bucket
        if path == "/-/begin":
            bucket.__init__(plan=Plan(**json.loads(body)))  # type: ignore[misc]
        elif path == "/-/over":
            bucket.plan = Plan()
        return {"asked": bucket.asked, "met": bucket.met, "keys": sorted(bucket.objects)}

    def log_message(self, *_: object) -> None: ...


def _error(code: str) -> bytes:
    return _xml("Error", f"<Code>{code}</Code><Message>{code}</Message>")


def _xml(name: str, inner: str) -> bytes:
    return f'<?xml version="1.0"?><{name}>{inner}</{name}>'.encode()


@dataclass
class Served:
    """A bucket that is served: how to tell it what goes wrong, and to ask what it has seen."""

    port: int

    def begin(self, plan: Plan) -> None:
        """Empty the bucket, and let `plan` happen."""
        self._ask("begin", plan.__dict__)

    def end_plan(self) -> dict[str, Any]:
        """Let nothing go wrong any more; return what was asked so far."""
        return self._ask("over", {})

    def _ask(self, what: str, told: object) -> dict[str, Any]:
        data = json.dumps(told).encode()
        with socket.create_connection(("127.0.0.1", self.port)) as channel:
            head = f"PUT /-/{what} HTTP/1.0\r\nContent-Length: {len(data)}\r\n\r\n"
            channel.sendall(head.encode() + data)
            answer = b"".join(iter(lambda: channel.recv(1 << 16), b""))
        return dict(json.loads(answer.partition(b"\r\n\r\n")[2]))


@contextmanager
def serve() -> Iterator[Served]:
    """Serve a bucket from a process of its own, and name it in the environment as tuneloop and S3 clients read it."""
    server = HTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"bucket": Bucket()}))
    server.socket.listen(128)
    parent, pid = os.getpid(), os.fork()
    if not pid:
        try:
            die_with_parent(parent)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            server.serve_forever()
        except BaseException:
            traceback.print_exc()
        finally:  # never the parent's exit functions
            os._exit(1)
    port = server.server_port
    server.socket.close()
    before = dict(os.environ)
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1"}
    os.environ.update(keys, AWS_ENDPOINT_URL=f"http://127.0.0.1:{port}")
    try:
        yield Served(port)
    finally:
        os.environ.clear()
        os.environ.update(before)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


__all__ = ["FAULTS", "NAME", "Bucket", "Plan", "Served", "serve"]
