"""Objects over HTTP, as S3 serves them: what a store makes of answers that files never give."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        patch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        patch.setenv("AWS_ACCESS_KEY_ID", "a")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "b")
        try:
            yield
        finally:
            server.shutdown()
