"""Sessions as child processes of the gateway, on one machine. They end with it.

This is ``tuneloop gateway --local``. The methods are those of `jobs.py: Jobs`. Of the settings of a
session's pod only ``idle`` and ``grace`` have an effect here. Its tests are in
`tests/extensions/gateway/test_drain.py` and `tests/local/test_gateway.py`.
"""

import contextlib
import datetime
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from tuneloop.core.http import Unanswered, send_request
from tuneloop.core.server_token import VARIABLE, create_token_file
from tuneloop.extensions.gateway.sessions import Session, SessionRequest, Settings
from tuneloop.extensions.gateway.worker import KEY
from tuneloop.inference.refusals import Refused
from tuneloop.local import spawn
from tuneloop.local.processes import Process, ProcessServer, base_environment, end_process

GRACE_S = 10.0
"""Seconds from the signal to end until a process is killed."""
LISTED_S = 3600.0
"""Seconds for which an ended session is still listed."""


@dataclass
class Child:
    """A worker process and its state.

    Attributes:
        log: the file of its output.
        ending: whether it was told to end.
        ended: when it was first seen to have ended, by `time.monotonic`.
    """

    session: Session
    process: subprocess.Popen[bytes]
    log: Path
    ending: bool = False
    ended: float = math.inf


class Processes:
    """Sessions on this machine."""

    def __init__(self, logs: Path, settings: Settings, device: str = "auto") -> None:
        """Start sessions that compute on `device` and write to the directory `logs`."""
        self.logs = logs
        self.settings = settings
        self.device = device
        self.children: dict[str, Child] = {}
        self.closing = False
        logs.mkdir(parents=True, exist_ok=True)
        self.token = logs / "sampler-token"
        self.sampler: Process | None = None
        if settings.sampler:
            create_token_file(self.token)
            # Bound while this process lives, so that no other process gets the port.
            self.address = socket.socket()
            self.address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.address.bind(("127.0.0.1", 0))
            self.port = self.address.getsockname()[1]
            command = [sys.executable, "-S", "-E", spawn.__file__]
            self.starter = ProcessServer(command, os.environ, ready=True)

    def create(self, name: str, request: SessionRequest, creator: str, artifacts: str) -> None:
        """Begin a session. Raises Refused (503) while the gateway or the same session is ending."""
        if self.closing:
            raise Refused(503, "the gateway is ending; try again")
        child = self.children.get(name)
        if child and child.ending and child.process.poll() is None:
            remedy = "try again, or use another key"
            raise Refused(503, f"{name} is ending after its accepted requests; {remedy}")
        session = Session(
            name=name,
            request=request,
            creator=creator,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            phase="starting",
            artifacts=artifacts,
            secret=secrets.token_urlsafe(32),
        )
        log = self.logs / f"{name}.log"
        with socket.socket() as listener, log.open("wb") as output:
            listener.bind(("127.0.0.1", 0))
            listener.listen(128)
            process = self._start(session, listener.fileno(), output)
            address = "127.0.0.1:%d" % listener.getsockname()[1]
        self.children[name] = Child(replace(session, address=address), process, log)

    def _start(self, session: Session, listener: int, output: BinaryIO) -> subprocess.Popen[bytes]:
        """Start a worker that serves on the inherited socket `listener`.

        The command line is parsed by `worker.py: _parse`; `jobs.py: Jobs._job` writes one with the
        same flags.
        """
        settings = self.settings.worker
        command = [
            sys.executable,
            "-m",
            "tuneloop.extensions.gateway.worker",
            "--session",
            session.id,
            "--artifacts",
            session.artifacts,
            "--device",
            self.device,
            "--fd",
            str(listener),
            # The worker cannot ask for its parent: that may be gone already.
            "--parent",
            str(os.getpid()),
            "--idle",
            str(settings.idle),
            "--grace",
            str(settings.grace),
        ]
        # The groups are those of `tuneloop run` with the same store.
        command += session.request.flags(session.artifacts.rpartition("/sessions/")[0])
        environment = {KEY: session.secret}
        if self.settings.sampler:
            command += ["--sampler", f"http://127.0.0.1:{self.port}"]
            environment[VARIABLE] = str(self.token)
        return subprocess.Popen(
            command,
            env=os.environ | environment,
            pass_fds=[listener],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # A signal to the worker's group reaches what it has started, and no terminal's Ctrl-C does.
            start_new_session=True,
        )

    def get(self, namespace: str, name: str) -> Session | None:
        """Return a session, or None, also where it is ending."""
        child = self.children.get(name)
        if child is None or child.ending or child.session.request.namespace != namespace:
            return None
        return self._look(child)

    def sessions(self, namespace: str) -> list[Session]:
        """Return the sessions of a namespace, oldest first, and those that are ending."""
        sessions: list[Session] = []
        for name, child in list(self.children.items()):
            is_gone = child.ending and child.process.poll() is not None
            if is_gone or time.monotonic() - child.ended > LISTED_S:
                self.children.pop(name, None)
            elif child.session.request.namespace == namespace:
                sessions.append(self._look(child))
        return sorted(sessions, key=lambda session: session.created)

    def end(self, namespace: str, name: str) -> None:
        """End a session, if it exists, after its accepted requests, within its grace period."""
        child = self.children.get(name)
        if child is None or child.ending:
            return
        child.ending = True
        _signal(child.process, signal.SIGTERM)
        # The caller does not wait for it.
        bounds = (child.process, float(self.settings.worker.grace))
        threading.Thread(target=_wait_or_kill, args=bounds, daemon=True).start()

    def scale_sampler(self, namespace: str, replicas: int) -> None:
        """Start or end the server that all sessions share."""
        runs = self.sampler is not None and not self.sampler.ended.is_set()
        if self.sampler and runs and not replicas:
            end_process(self.sampler, GRACE_S)
        elif replicas and not runs and self.settings.sampler and not self.closing:
            command = [
                sys.executable,
                "-m",
                "tuneloop.inference.server",
                "--port",
                str(self.port),
                "--engine-args",
                json.dumps(self.settings.sampler.engine_args),
            ]
            environment = base_environment({VARIABLE: str(self.token)})
            log = self.logs / "sampler.log"
            self.sampler = self.starter.start(command, environment, self.logs, log, log)

    def close(self, number: int = signal.SIGINT, grace_s: float = GRACE_S) -> None:
        """End all sessions, and accept no new one."""
        self.closing = True
        processes = [child.process for child in list(self.children.values())]
        # All end at the same time, and are waited for one after the other.
        for process in processes:
            _signal(process, number)
        deadline = time.monotonic() + grace_s
        for process in processes:
            _wait_or_kill(process, max(0.0, deadline - time.monotonic()))
        # Until then sessions may sample.
        if self.settings.sampler:
            self.starter.close()

    def drain(self) -> None:
        """End each session after its requests are done and fetched, and its models are saved."""
        self.close(signal.SIGTERM, self.settings.worker.grace)

    def _look(self, child: Child) -> Session:
        """Return a session as its process is now."""
        code = child.process.poll()
        if child.ending:
            return replace(child.session, phase="ending")
        if code is None:
            # Once it has answered it only may be slow to.
            if child.session.phase != "running" and _is_ready(child.session):
                child.session = replace(child.session, phase="running")
            return child.session
        child.ended = min(child.ended, time.monotonic())
        last_line = child.log.read_text(errors="replace").strip().split("\n")[-1]
        return replace(
            child.session,
            phase="failed" if code else "ended",
            address=None,
            reason=f"exit {code}: {last_line[-300:]}",
        )


def _is_ready(session: Session) -> bool:
    with contextlib.suppress(Unanswered):
        url = f"http://{session.address}/health"
        status, _ = send_request("GET", url, timeout_s=0.2)
        return status == 200
    return False


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def _wait_or_kill(process: subprocess.Popen[bytes], grace_s: float) -> None:
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        process.wait()
