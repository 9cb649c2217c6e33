"""Chromium as tests drive it: over its DevTools protocol, on a clean profile."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from websockets.sync.client import ClientConnection, connect

from tests.waiting import LIMIT_S, until
from tuneloop.ui.app import build_app

LINE = (
    *(
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--remote-debugging-port=0",
    ),
    "--disable-features=IsolateSandboxedIframes",  # a frame in a process of its own is a target of its own
)
PATIENT: Any = {"max_size": None, "open_timeout": LIMIT_S, "ping_interval": None}
needs_chromium = pytest.mark.skipif(
    not shutil.which("chromium"), reason="Chromium opens pages: apt-get install chromium"
)


class Page:
    """A page of the browser; `errors` are what its scripts threw and its policy refused."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket, self.last, self.errors = socket, 0, list[str]()
        for domain in ("Page", "Runtime", "Log"):
            self.ask(f"{domain}.enable")

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol, and return its result."""
        self.last += 1
        self.socket.send(json.dumps({"id": self.last, "method": method, "params": params}))
        while True:
            said = json.loads(self.socket.recv(timeout=LIMIT_S))
            if said.get("id") == self.last:
                assert "error" not in said, said
                return dict(said["result"])
            if said.get("method") == "Runtime.exceptionThrown":
                self.errors.append(json.dumps(said["params"]["exceptionDetails"]))
            if (
                said.get("method") == "Log.entryAdded"
                and said["params"]["entry"]["level"] == "error"
            ):
                entry = said["params"]["entry"]
                self.errors.append(f"{entry['text']} {entry.get('url', '')}".rstrip())

    def evaluate(self, script: str, **where: Any) -> Any:
        """Return what a script, or the promise that it is, comes to; in the page unless `where` has a contextId."""
        found = self.ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True, **where
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def open(self, url: str, shown: str) -> None:
        """Open a page, and wait until `shown`, a regular expression, is in its text."""
        self.ask("Page.navigate", url=url)
        self.wait(shown)

    def wait(self, shown: str) -> str:
        """Wait until `shown`, a regular expression, is in the page's text, which is returned."""

        def look() -> list[str]:
            try:
                text = str(self.evaluate("document.body?.innerText ?? ''"))
            except AssertionError as error:
                if re.search("context was destroyed|navigated", str(error)):
                    return []  # between two pages
                raise
            return [text] if re.search(shown, text) else []

        return until(look, LIMIT_S, pause=0.05)[0]

    def enter_frame(self) -> dict[str, Any]:
        """Return where `evaluate` finds the document of the page's one frame."""
        (child,) = self.ask("Page.getFrameTree")["frameTree"]["childFrames"]
        return {
            "contextId": self.ask("Page.createIsolatedWorld", frameId=child["frame"]["id"])[
                "executionContextId"
            ]
        }

    def press(self, key: str) -> None:
        """Press a key where the keyboard is."""
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            self.ask("Input.dispatchKeyEvent", type=kind, key=key, **text)

    def take_picture(
        self, path: Path, width: int = 1280, height: int = 900, dark: bool = False
    ) -> None:
        """Write a PNG of the whole page as wide as given."""
        self.resize(width, height, dark)
        shot = self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def resize(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Make the window as large as given, in CSS pixels, and the colours light or dark."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[scheme])


@contextmanager
def open_browser() -> Iterator[Page]:
    """Start a browser with one page; ended with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        line = ["chromium", *LINE, f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = Path(profile) / "DevToolsActivePort"
            until(lambda: port.is_file() and len(port.read_text().split()) == 2, LIMIT_S, process)
            number, path = port.read_text().split()
            with connect(f"ws://127.0.0.1:{number}{path}", **PATIENT) as whole:

                def find_page() -> str:
                    whole.send(json.dumps({"id": 1, "method": "Target.getTargets"}))
                    found = json.loads(whole.recv(timeout=LIMIT_S))["result"]["targetInfos"]
                    return next((each["targetId"] for each in found if each["type"] == "page"), "")

                target = until(find_page, LIMIT_S, process)  # it listens before it has opened one
            with connect(f"ws://127.0.0.1:{number}/devtools/page/{target}", **PATIENT) as socket:
                yield Page(socket)
        finally:
            process.terminate()
            process.wait()


@contextmanager
def serve(store: Path) -> Iterator[str]:
    """Serve the page over a store; yields its address."""
    server = uvicorn.Server(uvicorn.Config(build_app(str(store)), port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started, LIMIT_S)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
