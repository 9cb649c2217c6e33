"""Objects over HTTP, as S3 serves them: what a store makes of answers that files never give, and of how many."""

import bisect
import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest


@contextmanager
def served(
    objects: dict[str, bytes], patch: pytest.MonkeyPatch, missing: tuple[int, str] = (404, "")
) -> Iterator[None]:
    """Serve `objects` (``bucket/key`` → bytes) at AWS_ENDPOINT_URL; of others the status and the body `missing`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = objects.get(self.path.partition("?")[0].lstrip("/"))
            status, body = missing if found is None else (200, "")
            data = body.encode() if found is None else found
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_HEAD = do_PUT = do_GET

        def log_message(self, *_: object) -> None: ...

    with _listening(Handler, patch):
        yield


@contextmanager
def serve_bucket(
    objects: dict[str, bytes],
    patch: pytest.MonkeyPatch,
    latency_s: float = 0.0,
    refuse: Callable[[str], bool] = lambda _: False,
) -> Iterator[Counter[str]]:
    """Serve `objects` (key → bytes) as ``s3://bucket``, to be read, listed and written; count the requests by kind.

    Args:
        latency_s: that each request takes at least.
        refuse: says by its key, or a list's prefix, whether a request is answered with 503.
    """
    asked: Counter[str] = Counter()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            key, query = unquote(url.path).removeprefix("/bucket").lstrip("/"), parse_qs(url.query)
            kind = "LIST" if not key and self.command == "GET" else self.command
            asked[kind] += 1
            if refuse(key or query.get("prefix", [""])[0]):
                self.answer(503, b"")
            elif kind == "LIST":
                self.answer(
                    200, list_page(objects, **{name: values[0] for name, values in query.items()})
                )
            elif kind == "PUT":
                objects[key] = self.rfile.read(int(self.headers["Content-Length"]))
                self.answer(200, b"", objects[key])
            else:
                self.answer(
                    200 if key in objects else 404, objects.get(key, b""), objects.get(key, b"")
                )

        do_HEAD = do_PUT = do_GET

        def answer(self, status: int, data: bytes, tagged: bytes = b"") -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", tag(tagged))
            self.send_header("Last-Modified", "Thu, 01 Jan 2026 00:00:00 GMT")
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def log_message(self, *_: object) -> None: ...

    with _listening(Handler, patch):
        yield asked


def tag(data: bytes) -> str:
    return f'"{hashlib.md5(data).hexdigest()}"'


def list_page(objects: dict[str, bytes], **query: str) -> bytes:
    """Answer ListObjectsV2: at most 1,000 keys and common prefixes."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after, names = query.get("continuation-token", ""), sorted(objects)
    contents, prefixes, at = [], list[str](), bisect.bisect_right(names, max(after, prefix[:-1]))
    while at < len(names) and len(contents) + len(prefixes) < 1000:
        name = names[at]
        if not name.startswith(prefix):
            if name > prefix:
                break
            at += 1
        elif delimiter and (cut := name.find(delimiter, len(prefix))) >= 0:
            prefixes.append(name[: cut + 1])
            at = bisect.bisect_left(names, name[:cut] + chr(ord(delimiter) + 1))
        else:
            contents.append(name)
            at += 1
    more = at < len(names) and names[at].startswith(prefix)
    body = [f"<IsTruncated>{str(more).lower()}</IsTruncated>"]
    body += (
        [f"<NextContinuationToken>{escape(names[at - 1])}</NextContinuationToken>"] if more else []
    )
    for name in contents:
        about = f"<ETag>{escape(tag(objects[name]))}</ETag><Size>{len(objects[name])}</Size>"
        when = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
        body.append(f"<Contents><Key>{escape(name)}</Key>{when}{about}</Contents>")
    body += [
        f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>" for each in prefixes
    ]
    return f'<?xml version="1.0"?><ListBucketResult>{"".join(body)}</ListBucketResult>'.encode()


@contextmanager
def _listening(handler: type[BaseHTTPRequestHandler], patch: pytest.MonkeyPatch) -> Iterator[None]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "a")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        try:
            yield
        finally:
            server.shutdown()
