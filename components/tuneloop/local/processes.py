"""The executor's side of the processes that start pods: the spawner and the warm process.

The gateway starts its sessions by it, too (`extensions/gateway/processes.py`). It has the other end
of the protocol that `local/spawn.py` describes: what it sends is read by `serve_requests` there,
and a message that `ProcessServer._receive` does not know is dropped.
"""

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
    """A pod's main process, which leads a session and a process group.

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
        """Record that it has ended with an exit code."""
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
            self._channel, server_end = socket.socketpair()
            arguments = (list(command), server_end)
            self._thread = threading.Thread(target=self._run, args=arguments, daemon=True)
        self._thread.start()

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        stdout: Path,
        stderr: Path,
    ) -> Process:
        """Start a process; output is appended to the two files."""
        process = Process(self._send, next(self._ids))
        with self._lock:
            self._processes[process._name] = process
        request = {
            "start": process._name,
            "argv": list(argv),
            "env": dict(env),
            "cwd": str(cwd),
            "stdout": str(stdout),
            "stderr": str(stderr),
        }
        self._send(request)
        # The server may have ended before this process was among those that its end ends.
        if self.failure is not None:
            process.end(137)
        return process

    def close(self) -> None:
        """End the server and everything it started."""
        # While it imports, it would not notice a closed channel.
        if not self.settled.is_set() and self._server:
            self._server.kill()
        with contextlib.suppress(OSError):
            # The server closes its side once all processes that it started have ended.
            self._channel.shutdown(socket.SHUT_WR if self.settled.is_set() else socket.SHUT_RDWR)
        self._thread.join()

    def _send(self, message: JsonMapping) -> None:
        """Send a message; that the server has ended is noticed by `_listen`."""
        line = json.dumps(message).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            self._channel.sendall(line)

    def _run(self, command: list[str], server_end: socket.socket) -> None:
        """Start the server, and listen to it until it ends."""
        with server_end:
            descriptor = server_end.fileno()
            # It is told who its parent is: by the time that it looks, it may have another.
            command += [str(descriptor), str(os.getpid())]
            self._server = subprocess.Popen(
                command,
                env=self.env,
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._listen()

    def _listen(self) -> None:
        """Read the server's messages until it ends; its processes have ended then, too."""
        with self._channel.makefile() as lines, contextlib.suppress(OSError):
            for line in lines:
                self._receive(json.loads(line))
        code = f" with exit code {self._server.wait()}" if self._server else ""
        self.failure = self.failure or f"it ended{code}"
        self.settled.set()
        with self._lock:
            orphans = list(self._processes.values())
        for process in orphans:
            process.end(137)

    def _receive(self, message: JsonMapping) -> None:
        if "ended" in message:
            with self._lock:
                process = self._processes.pop(message["ended"])
            process.end(message["code"])
        elif "ready" in message:
            # Only a server for many runs says what it was started with.
            self.failure = self._find_difference(message)
            self.settled.set()
        elif "failed" in message:
            self.failure = message["failed"]

    def _find_difference(self, message: JsonMapping) -> str | None:
        """Return why forks of a server would not be what fresh processes are; None: they would.

        `local/warm.py: main` computes the same list `code` before its imports.
        """
        if not is_compatible(message.get("env", self.env), self.env):
            return (
                f"the process of {WARM} was started with other variables that take effect at import"
            )
        if "code" in message:
            code = [sys.executable, code_digest(), list_packages()]
            if message["code"] != code:
                return f"the process of {WARM} has other code, or another Python; start it again"
        return None


class Launcher:
    """Starts pods, as forks of a warm process where that is possible, else as fresh ones.

    Args:
        env: the environment of the warm processes; `WARM` in it names one that runs already.
        warm: the kinds of programs that get a warm process.
    """

    def __init__(self, env: Mapping[str, str], warm: Collection[Kind]) -> None:
        self._servers_by_kind: dict[Kind, ProcessServer] = {}
        for kind in warm:
            command = [sys.executable, "-m", "tuneloop.local.warm", kind]
            server = ProcessServer(env.get(WARM) or command, env, ready=False)
            self._servers_by_kind[kind] = server
        self._spawner = ProcessServer([sys.executable, "-S", "-E", spawn.__file__], env, ready=True)
        self._has_warned = False

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        stdout: Path,
        stderr: Path,
        patient: bool,
    ) -> Process:
        """Start `argv`, with this interpreter where it is a Python program.

        Args:
            patient: it would import the heavy libraries itself, so waiting for the warm process
                pays.

        Raises RuntimeError if the process that starts pods has ended.
        """
        argv = list(argv)
        server = self._spawner
        warm = self._find_warm_server(argv)
        if warm and is_compatible(warm.env, env) and self._is_ready(warm, patient):
            server = warm
        if server is self._spawner and server.failure is not None:
            raise RuntimeError(
                f"the process that starts pods has ended ({server.failure}); run `tuneloop resume`"
            )
        if Path(argv[0]).name in ("python", "python3"):
            argv[0] = sys.executable
        return server.start(argv, env, cwd, stdout, stderr)

    def close(self) -> None:
        """End all processes that it has started."""
        for server in self._servers_by_kind.values():
            server.close()
        self._spawner.close()

    def _find_warm_server(self, argv: Sequence[str]) -> ProcessServer | None:
        """Return the warm process that has imported what `argv` needs, if there is one."""
        if is_stage(argv):
            return self._servers_by_kind.get("stages")
        if is_server(argv):
            return self._servers_by_kind.get("server")
        return None

    def _is_ready(self, warm: ProcessServer, patient: bool) -> bool:
        """Return whether a warm process can fork now; warn once if it never will."""
        if patient:
            warm.settled.wait()
        if warm.failure and not self._has_warned:
            self._has_warned = True
            log.warning(
                "stages start slowly, each imports torch afresh: no warm process: %s",
                warm.failure,
            )
        return warm.settled.is_set() and warm.failure is None


def _connect(path: str) -> socket.socket:
    """Connect to a warm process for many runs. Raises UserError if there is none of this user."""
    channel = socket.socket(socket.AF_UNIX)
    try:
        # It gets the environment of every stage, keys included.
        if os.stat(path).st_uid != os.getuid():
            raise UserError(
                WARM,
                path,
                "belongs to another user; choose a path in a directory of your own",
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

    The gateway's sessions and the warm process of the tests (`tests/warm.py`) have it, too: a fork
    needs the same variables as the process that it is forked from (`local/warm.py: is_compatible`).
    """
    environment = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
    environment.update(os.environ)
    programs = str(Path(sys.executable).parent)
    environment["PATH"] = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    environment.update(extra)
    return environment
