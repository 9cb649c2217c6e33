"""The executor's side of the processes that start pods: the spawner and the warm process."""

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.provenance import code_digest, list_packages
from tuneloop.local import spawn
from tuneloop.local.warm import Kind, is_compatible, is_server, is_stage

log = logging.getLogger("tuneloop.local")
WARM = "TUNELOOP_WARM"
"""Names the socket of a warm process that serves other runs too (`tuneloop.local.warm`)."""


class Process:
    """A pod's main process, which leads a session and process group of its own.

    Attributes:
        ended: is set once it has ended.
        code: its exit code then; 128 + n when signal n ended it.
    """

    def __init__(self, send: Callable[[JsonMapping], None], name: int) -> None:
        self._send = send
        self._name = name
        self.ended = threading.Event()
        self.code = -1

    def signal(self, number: int) -> None:
        """Send a signal to the whole group; nothing happens if it has ended."""
        self._send({"signal": self._name, "number": number})

    def end(self, code: int) -> None:
        self.code = code
        self.ended.set()


def end_process(process: Process, grace: float) -> None:
    """End a process group: SIGTERM, and SIGKILL after `grace` seconds."""
    process.signal(signal.SIGTERM)
    if not process.ended.wait(grace):
        process.signal(signal.SIGKILL)
        process.ended.wait()


class ProcessServer:
    """One of the two programs that start processes: `tuneloop.local.spawn` or
    `tuneloop.local.warm`.

    Attributes:
        settled: is set once it is ready or has failed.
        failure: why the server could not start, or has ended; None while it runs.
    """

    def __init__(self, command: Sequence[str] | str, env: Mapping[str, str], ready: bool) -> None:
        """Start the server by `command`; a path is the socket of one that serves others too."""
        self.env = dict(env)
        self.settled = threading.Event()
        self.failure: str | None = None
        self._ids = itertools.count()
        self._processes: dict[int, Process] = {}
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        if ready:
            self.settled.set()
        # The thread that starts the server must live as long as it: the kernel's parent-death
        # signal is a thread's.
        if isinstance(command, str):
            self._channel = _connect(command)
            self._thread = threading.Thread(target=self._listen, daemon=True)
        else:
            self._channel, theirs = socket.socketpair()
            self._thread = threading.Thread(
                target=self._run, args=(list(command), theirs), daemon=True
            )
        self._thread.start()

    def start(
        self, argv: Sequence[str], env: Mapping[str, str], cwd: Path, stdout: Path, stderr: Path
    ) -> Process:
        """Start a process; output is appended to the two files."""
        process = Process(self._send, next(self._ids))
        with self._lock:
            self._processes[process._name] = process
        paths = {"cwd": str(cwd), "stdout": str(stdout), "stderr": str(stderr)}
        self._send({"start": process._name, "argv": list(argv), "env": dict(env), **paths})
        if self.failure is not None:
            process.end(137)
        return process

    def close(self) -> None:
        """End the server and everything it started."""
        if (
            not self.settled.is_set() and self._server
        ):  # still importing, it would not notice a closed channel
            self._server.kill()
        with contextlib.suppress(OSError):
            # The server closes its side once all processes that it started have ended.
            self._channel.shutdown(socket.SHUT_WR if self.settled.is_set() else socket.SHUT_RDWR)
        self._thread.join()

    def _send(self, message: JsonMapping) -> None:
        with self._lock:
            with contextlib.suppress(OSError):  # it is gone: _run says so
                self._channel.sendall(json.dumps(message).encode() + b"\n")

    def _run(self, command: list[str], theirs: socket.socket) -> None:
        with theirs:
            descriptor = theirs.fileno()
            # Its own parent, as it would find it, may be another by the time that it looks.
            self._server = subprocess.Popen(
                [*command, str(descriptor), str(os.getpid())],
                env=self.env,
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._listen()

    def _listen(self) -> None:
        """Hear what the server says until it ends."""
        with self._channel.makefile() as lines, contextlib.suppress(OSError):
            for line in lines:
                self._hear(json.loads(line))
        code = f" with exit code {self._server.wait()}" if self._server else ""
        self.failure = self.failure or f"it ended{code}"
        self.settled.set()
        with self._lock:
            orphans = list(self._processes.values())
        for process in orphans:
            process.end(137)

    def _hear(self, message: JsonMapping) -> None:
        if "ended" in message:
            with self._lock:
                process = self._processes.pop(message["ended"])
            process.end(message["code"])
        elif "ready" in message:
            if not is_compatible(message.get("env", self.env), self.env):
                self.failure = f"the process of {WARM} was started with other variables that take effect at import"
            elif "code" in message and message["code"] != [
                sys.executable,
                code_digest(),
                list_packages(),
            ]:
                self.failure = (
                    f"the process of {WARM} has other code, or another Python; start it again"
                )
            self.settled.set()
        elif "failed" in message:
            self.failure = message["failed"]


class Launcher:
    """Starts pods, as forks of a warm process where that is possible, else as fresh ones.

    Args:
        env: the environment of the warm processes; `WARM` in it names one that runs already.
        warm: the kinds of programs that get a warm process.
    """

    def __init__(self, env: Mapping[str, str], warm: Collection[Kind]) -> None:
        command = [sys.executable, "-m", "tuneloop.local.warm"]
        self._warm = {
            kind: ProcessServer(env.get(WARM) or [*command, kind], env, ready=False)
            for kind in warm
        }
        self._spawner = ProcessServer([sys.executable, "-S", "-E", spawn.__file__], env, ready=True)
        self._told = False

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        stdout: Path,
        stderr: Path,
        patient: bool,
    ) -> Process:
        """Start `argv`.

        Args:
            patient: it would import the heavy libraries itself, so waiting for the warm process
                pays.
        """
        server = self._spawner
        warm = (
            self._warm.get("stages")
            if is_stage(argv)
            else self._warm.get("server")
            if is_server(argv)
            else None
        )
        if warm and is_compatible(warm.env, env) and self._ready(warm, patient):
            server = warm
        if server is self._spawner and server.failure is not None:
            raise RuntimeError(
                f"the process that starts pods has ended ({server.failure}); run `tuneloop resume`"
            )
        if Path(argv[0]).name in ("python", "python3"):
            argv = [sys.executable, *argv[1:]]
        return server.start(argv, env, cwd, stdout, stderr)

    def close(self) -> None:
        for server in (*self._warm.values(), self._spawner):
            server.close()

    def _ready(self, warm: ProcessServer, patient: bool) -> bool:
        if patient:
            warm.settled.wait()
        if warm.failure and not self._told:
            self._told = True
            log.warning(
                "stages start slowly, each imports torch afresh: no warm process: %s", warm.failure
            )
        return warm.settled.is_set() and warm.failure is None


def _connect(path: str) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX)
    try:
        if (
            os.stat(path).st_uid != os.getuid()
        ):  # it gets the environment of every stage, keys included
            raise UserError(
                WARM, path, "belongs to another user; choose a path in a directory of your own"
            )
        channel.connect(path)
    except OSError as error:
        remedy = (
            f"no warm process listens there ({error}); "
            f"start `python -m tuneloop.local.warm stages {path}`, or unset it"
        )
        raise UserError(WARM, path, remedy) from error
    return channel


def base_environment(extra: Mapping[str, str]) -> dict[str, str]:
    """Return what every pod inherits: ours, `extra`, and this interpreter first on PATH.

    numpy's pool of threads and that of Arrow's allocator start when they are imported, and would
    keep the warm process from forking: both are off, for every pod alike. OMP_NUM_THREADS limits
    torch's threads; these wait without spinning, because a server and a stage share the cores (SFT
    beside two busy processes was seen to gain tenfold).
    """
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    quiet = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
    return {**quiet, **os.environ, "PATH": path, **extra}
