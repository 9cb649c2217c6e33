"""The live page in a real browser."""

import asyncio
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from tests.unit import toy
from tests.waiting import LIMIT_S, until
from tuneloop.local.journal import Journal, Workflow, lock_workdir
from tuneloop.runs.records import Record
from tuneloop.runs.run_record import Run
from tuneloop.ui.app import build_app


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="Chromium opens the page: apt-get install chromium")
def test_a_page_shows_what_a_run_commits_while_it_is_open(tmp_path: Path) -> None:
    Run.create(Record(run="live", pipeline="toy", path="toy.py", config={}, store=f"file://{tmp_path}"), "")
    toy.make(f"{tmp_path}/live", 2, whole=False)
    Journal(tmp_path / "live").write(Workflow("toy", started=1.0))
    app, asked, committed = build_app(str(tmp_path)), [], threading.Event()

    async def watched(scope: Any, receive: Any, send: Any) -> None:
        """The second look is answered once more is committed: the browser's clock stands still while it waits."""
        asked.append(scope.get("path"))
        if asked.count("/runs/live/mark") > 1:
            await asyncio.to_thread(committed.wait, LIMIT_S)
        await app(scope, receive, send)

    server = uvicorn.Server(uvicorn.Config(watched, port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    with lock_workdir(tmp_path / "live"):  # as its executor would
        thread.start()
        until(lambda: server.started, LIMIT_S)
        port = server.servers[0].sockets[0].getsockname()[1]
        line = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
        page = subprocess.Popen([*line, f"http://127.0.0.1:{port}/runs/live"], stdout=subprocess.PIPE, text=True)
        until(lambda: "/runs/live/mark" in asked, LIMIT_S)
        toy.make(f"{tmp_path}/live", 3, whole=False)
        committed.set()
        shown = page.communicate(timeout=LIMIT_S)[0]
        server.should_exit = True
        thread.join()
    assert "completions of iteration 3" in shown and "completions of iteration 2" not in shown
