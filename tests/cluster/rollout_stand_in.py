"""Stands in for a rollout server, which would want a model and a core of its own: the endpoint's protocol over nothing,
two completions at a time, a fifth of a second each, with the /metrics of vLLM. Standard library alone.

    python rollout_stand_in.py PORT
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

SLOTS, SECONDS = threading.Semaphore(2), 0.2
LOCK = threading.Lock()
COUNTS = {"running": 0, "waiting": 0}


def count(**changes: int) -> None:
    with LOCK:
        for name, change in changes.items():
            COUNTS[name] += change


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.reply(
            "".join(f"vllm:num_requests_{name} {number}\n" for name, number in COUNTS.items())
        )

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        made = [
            self.complete(body["version"]) for request in body["requests"] for _ in request["seeds"]
        ]
        self.reply(json.dumps({"index": 0, "completions": made}) + "\n")

    def complete(self, version: int) -> dict[str, object]:
        count(waiting=1)
        with SLOTS:
            count(waiting=-1, running=1)
            time.sleep(SECONDS)
            count(running=-1)
        about = {"finish_reason": "length", "start_version": version, "end_version": version}
        return {"ids": [5], "logprobs": [-1.0], **about}

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    ThreadingHTTPServer.request_queue_size = 128
    ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
