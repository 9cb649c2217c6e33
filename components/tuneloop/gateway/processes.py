"""Sessions as child processes of the gateway, on one machine. They end with it."""

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

from tuneloop.core.http import Unanswered, send_request
from tuneloop.core.server_token import VARIABLE, create_token_file
from tuneloop.gateway.sessions import Session, Settings, Wanted
from tuneloop.gateway.worker import KEY
from tuneloop.inference.refusals import Refused
from tuneloop.local import spawn
from tuneloop.local.processes import Process, ProcessServer, base_environment, end_process

GRACE = 10.0
KEPT = 3600.0
"""Seconds for which an ended session is still listed."""


@dataclass
class Child:
    """A worker process and its state."""

    session: Session
    process: subprocess.Popen[bytes]
    log: Path
    ending: bool = False
    ended: float = math.inf


class Processes:
    """Sessions on this machine."""

    def __init__(self, logs: Path, settings: Settings, device: str = "auto") -> None:
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
            self.address = (
                socket.socket()
            )  # bound while this process lives, so that no other process gets the port
            self.address.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.address.bind(("127.0.0.1", 0))
            self.port = self.address.getsockname()[1]
            self.starter = ProcessServer(
                [sys.executable, "-S", "-E", spawn.__file__], os.environ, ready=True
            )

    def create(self, name: str, wanted: Wanted, creator: str, artifacts: str) -> None:
        if self.closing:
            raise Refused(503, "the gateway is ending; try again")
        if (before := self.children.get(name)) and before.ending and before.process.poll() is None:
            raise Refused(
                503, f"{name} is ending after its accepted requests; try again, or use another key"
            )
        key = secrets.token_urlsafe(32)
        created = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        session = Session(name, wanted, creator, created, "starting", artifacts, key)
        log = self.logs / f"{name}.log"
        with socket.socket() as listener, log.open("wb") as out:
            listener.bind(("127.0.0.1", 0))
            listener.listen(128)
            command = [sys.executable, "-m", "tuneloop.gateway.worker", "--session", session.id]
            command += [
                "--artifacts",
                artifacts,
                "--device",
                self.device,
                "--fd",
                str(listener.fileno()),
            ]
            command += [
                "--parent",
                str(os.getpid()),
            ]  # the parent may be killed before the worker can look it up
            command += [
                "--idle",
                str(self.settings.worker.idle),
                "--grace",
                str(self.settings.worker.grace),
            ]
            command += wanted.flags(
                artifacts.rpartition("/sessions/")[0]
            )  # the place that `tuneloop run` uses, too
            command += (
                ["--sampler", f"http://127.0.0.1:{self.port}"] if self.settings.sampler else []
            )
            process = subprocess.Popen(
                command,
                env={
                    **os.environ,
                    KEY: key,
                    **({VARIABLE: str(self.token)} if self.settings.sampler else {}),
                },
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            address = "127.0.0.1:%d" % listener.getsockname()[1]
        self.children[name] = Child(replace(session, address=address), process, log)

    def get(self, namespace: str, name: str) -> Session | None:
        child = self.children.get(name)
        if child is None or child.ending or child.session.wanted.namespace != namespace:
            return None
        return self._look(child)

    def sessions(self, namespace: str) -> list[Session]:
        for name, child in list(self.children.items()):
            if time.monotonic() - child.ended > KEPT or (
                child.ending and child.process.poll() is not None
            ):
                self.children.pop(name, None)
        children = [
            child
            for child in list(self.children.values())
            if child.session.wanted.namespace == namespace
        ]
        return sorted(map(self._look, children), key=lambda session: session.created)

    def end(self, namespace: str, name: str) -> None:
        if (child := self.children.get(name)) is None or child.ending:
            return
        child.ending = True
        _signal(child.process, signal.SIGTERM)
        bounded = (child.process, float(self.settings.worker.grace))
        threading.Thread(target=_wait_or_kill, args=bounded, daemon=True).start()

    def scale_sampler(self, namespace: str, replicas: int) -> None:
        """Start or end the server that all sessions share."""
        runs = self.sampler is not None and not self.sampler.ended.is_set()
        if self.sampler and runs and not replicas:
            end_process(self.sampler, GRACE)
        elif replicas and not runs and self.settings.sampler and not self.closing:
            command = [
                sys.executable,
                "-m",
                "tuneloop.inference.server",
                "--port",
                str(self.port),
                "--engine-args",
            ]
            command.append(json.dumps(self.settings.sampler.engine_args))
            env = base_environment({VARIABLE: str(self.token)})
            log = self.logs / "sampler.log"
            self.sampler = self.starter.start(command, env, self.logs, log, log)

    def close(self, number: int = signal.SIGINT, grace_s: float = GRACE) -> None:
        """End all sessions, and accept no new one."""
        self.closing, processes = True, [child.process for child in list(self.children.values())]
        for process in processes:
            _signal(process, number)  # all at once, then one after the other
        deadline = time.monotonic() + grace_s
        for process in processes:
            _wait_or_kill(process, max(0.0, deadline - time.monotonic()))
        if self.settings.sampler:  # until then sessions may sample
            self.starter.close()

    def drain(self) -> None:
        """End each session once its accepted requests are done and fetched, and its models are saved."""
        self.close(signal.SIGTERM, self.settings.worker.grace)

    def _look(self, child: Child) -> Session:
        code = child.process.poll()
        if child.ending:
            return replace(child.session, phase="ending")
        if code is None:
            ready = child.session.phase == "running"
            with contextlib.suppress(Unanswered):
                ready = (
                    ready
                    or send_request("GET", f"http://{child.session.address}/health", timeout_s=0.2)[
                        0
                    ]
                    == 200
                )
            child.session = replace(child.session, phase="running" if ready else "starting")
            return child.session
        child.ended = min(child.ended, time.monotonic())
        words = child.log.read_text(errors="replace").strip().split("\n")[-1][-300:]
        return replace(
            child.session,
            phase="failed" if code else "ended",
            address=None,
            reason=f"exit {code}: {words}",
        )


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def _wait_or_kill(process: subprocess.Popen[bytes], grace_s: float) -> None:
    try:
        process.wait(grace_s)
    except subprocess.TimeoutExpired:
        _signal(process, signal.SIGKILL)
        process.wait()
