"""The server as a process: how it ends."""

import subprocess
import sys

import pytest

from tuneloop.serve import _parse

SERVE = """
from tuneloop import serve
code = serve.main(["--host", "127.0.0.1", "--port", "0"])
"""
GATEWAY = """
import socket
from tuneloop.gateway.worker import UVICORN, until_told
async def app(scope, receive, send): ...
listener = socket.create_server(("127.0.0.1", 0))
until_told(uvicorn.Server(uvicorn.Config(app, **UVICORN)), listener)
code = 0
"""
EARLY = """
import os, signal, sys, uvicorn
run = uvicorn.Server.run
def told_before(self, **about):
    signal.raise_signal(signal.SIGTERM)
    run(self, **about)
uvicorn.Server.run = told_before
"""


@pytest.mark.parametrize("program", [SERVE, GATEWAY], ids=["serve", "gateway"])
def test_a_server_that_is_told_to_end_right_before_it_serves_ends(program: str) -> None:
    """Else nobody hears the signal, and the pod's grace period has to run out."""
    done = subprocess.run([sys.executable, "-c", f"{EARLY}{program}os._exit(code)"], timeout=120)
    assert done.returncode == 0


def test_a_server_that_is_not_told_where_listens_for_this_machine_alone() -> None:
    assert _parse([]).host == "127.0.0.1"
