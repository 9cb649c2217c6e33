"""The process that starts the pods of a local run, and ends them when the executor is gone.

Run by path (``python -S -E spawn.py FD``), so that it needs the standard library only and starts in
milliseconds. It has one thread, so forking is safe; it is the parent of every pod, so it sees each
one's end; and it adopts their orphans (Linux: PR_SET_CHILD_SUBREAPER), so that when its socket
closes, because the executor ended or was killed, it can end all that descends from it, whatever
sessions those processes made for themselves. Killed itself, its children get SIGKILL from the
kernel (PR_SET_PDEATHSIG). The fork of a process that holds a GB takes some 20 ms, and its end as
long: so the child for the next request is forked ahead, and one that reports its exit code need not
be waited for.

Protocol, JSON lines over the socket FD: ``{"start": id, "argv": […], "env": {…}, "cwd": path,
"stdout": path, "stderr": path}`` and ``{"signal": id, "number": n}`` in; ``{"started": id, "pid":
n}`` and ``{"ended": id, "code": n}`` (128 + n when signal n ended it) out. `tuneloop.local.warm`
speaks the same, but runs a module where this one calls exec. The other end of the socket is
`local/processes.py: ProcessServer`. Tests: `tests/unit/local/test_processes.py`.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Message = dict[str, Any]
"""A message of the protocol. `tuneloop.core.json_types` cannot be imported here."""

# Numbers of linux/prctl.h.
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PAUSE_S = 0.05
"""Seconds without an event after which a child is forked for the next request: right after a start,
the fork was seen to slow down the process that has just started (8 ms)."""
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


class Spare(NamedTuple):
    """A child that was forked ahead, and waits at `channel` for its request."""

    pid: int
    channel: socket.socket


def serve_requests(channel: socket.socket) -> Message | None:
    """Start and watch processes until `channel` closes.

    Returns:
        In each forked child, set up as its request says: the request, with a socket as
        ``"report"``. A child that sends its exit code there counts as ended, and its process group
        is killed. In the server: None, when the channel closed.
    """
    return _Server(channel).serve()


class _Server:
    """The process that forks: its requests, and the children that run."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._requests: list[Message] = []
        self._partial_line = b""
        self._spare: Spare | None = None
        self._pids_by_id: dict[int, int] = {}
        # A child sends its exit code to the socket whose other end it holds.
        self._ids_by_report: dict[socket.socket, int] = {}
        # A signal writes to this pipe, so that `select` returns when a child ends.
        self._wakeup_reader, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup_writer, False)
        signal.set_wakeup_fd(self._wakeup_writer, warn_on_full_buffer=False)
        # A handler of Python's is needed for the signal to be written to the pipe.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # A terminal's Ctrl-C is the executor's to handle.
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)

    def serve(self) -> Message | None:
        """Serve requests in their order; see `serve_requests`."""
        is_idle = True
        while True:
            if self._requests and "signal" in self._requests[0]:
                self._pass_signal(self._requests.pop(0))
                continue
            if not self._spare and (is_idle or self._requests):
                request = self._fork_spare()
                if request is not None:
                    return request
            if self._spare and self._requests:
                self._hand_over(self._spare)
                continue
            watched: list[socket.socket | int] = [self._channel, self._wakeup_reader]
            watched += self._ids_by_report
            # Without a spare child, one is forked after a pause, also where a fork has failed.
            timeout_s = None if self._spare else PAUSE_S
            ready, _, _ = select.select(watched, [], [], timeout_s)
            is_idle = not ready
            for report in self._ids_by_report.keys() & ready:
                self._read_report(report)
            if self._wakeup_reader in ready:
                os.read(self._wakeup_reader, 4096)
                self._reap_children()
            if self._channel in ready and not self._read_requests():
                return None

    def _read_requests(self) -> bool:
        """Read what the executor has sent; return False if it has closed the channel."""
        data = _receive(self._channel)
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        self._requests += map(json.loads, lines)
        return bool(data)

    def _pass_signal(self, request: Message) -> None:
        """Send a signal to the process group of a child that runs."""
        pid = self._pids_by_id.get(request["signal"])
        if pid is not None:
            _call_quietly(os.killpg, pid, request["number"])

    def _hand_over(self, spare: Spare) -> None:
        """Give the first request to the spare child; the request stays if the child has ended."""
        self._spare = None
        request = self._requests[0]
        try:
            spare.channel.sendall(json.dumps(request).encode() + b"\n")
        except OSError:
            # It was killed while it waited.
            return
        self._pids_by_id[request["start"]] = spare.pid
        self._ids_by_report[spare.channel] = request["start"]
        _send(self._channel, {"started": request["start"], "pid": spare.pid})
        del self._requests[0]

    def _read_report(self, report: socket.socket) -> None:
        """Read a child's exit code, or that it has closed its end without one."""
        process_id = self._ids_by_report.pop(report)
        code = _receive(report)
        if code and process_id in self._pids_by_id:
            self._end(process_id, int(code))
        report.close()

    def _reap_children(self) -> None:
        """Take note of every child that has ended, adopted orphans included."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if self._spare and self._spare.pid == pid:
                    self._spare = None
                code = os.waitstatus_to_exitcode(status)
                # As a shell reports the signal -code.
                if code < 0:
                    code = 128 - code
                # An orphan has no id: only the executor's own requests have.
                ended = [i for i, child in self._pids_by_id.items() if child == pid]
                for process_id in ended:
                    self._end(process_id, code)

    def _end(self, process_id: int, code: int) -> None:
        """End a pod with its first process, whose exit code is known, and report it."""
        _call_quietly(os.killpg, self._pids_by_id.pop(process_id), signal.SIGKILL)
        _send(self._channel, {"ended": process_id, "code": code})

    def _fork_spare(self) -> Message | None:
        """Fork a child that waits for its request.

        Returns:
            In the child, its request. In the server, None: the child is `_spare`, which stays None
            if the fork has failed.
        """
        parent = os.getpid()
        server_end, child_end = socket.socketpair()
        try:
            pid = os.fork()
        except OSError:
            # There are too many processes, or too little memory: the caller tries again.
            return None
        if pid:
            child_end.close()
            self._spare = Spare(pid, server_end)
            return None
        os.setsid()
        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # The server would not see that a channel closes while a child holds it open.
        server_end.close()
        self._channel.close()
        for report in self._ids_by_report:
            report.close()
        os.close(self._wakeup_reader)
        os.close(self._wakeup_writer)
        return _await_request(child_end)


def _await_request(channel: socket.socket) -> Message:
    """Wait in a child for its request, open its output files, and return the request."""
    line = channel.makefile("rb").readline()
    if not line.endswith(b"\n"):
        # The server has ended.
        os._exit(0)
    request: Message = json.loads(line)
    request["report"] = channel
    try:
        _redirect(0, os.devnull, os.O_RDONLY)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        _redirect(1, request["stdout"], flags)
        _redirect(2, request["stderr"], flags)
    except (FileNotFoundError, PermissionError, ProcessLookupError) as error:
        # A path below /proc is the output of another process; here it has ended.
        if not str(error.filename).startswith("/proc/"):
            raise
        os._exit(128 + signal.SIGKILL)
    return request


def _redirect(descriptor: int, path: str, flags: int) -> None:
    """Make `descriptor` of this process a file."""
    file = os.open(path, flags, 0o644)
    os.dup2(file, descriptor)
    os.close(file)


def end_all() -> None:
    """Send SIGKILL to everything that descends from this process."""
    # A process may have forked after it was listed. Its child is adopted here once it is reaped, so
    # they are listed again until none is left.
    while True:
        for pid in _list_descendants(os.getpid()):
            _call_quietly(os.kill, pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return


def adopt_orphans() -> None:
    """Become the parent of all descendants whose parent ends (Linux)."""
    if _libc:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int | None) -> None:
    """Get SIGKILL when `parent`, whose current thread made this process, ends (Linux).

    None: no longer.
    """
    if _libc:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL if parent else 0, 0, 0, 0)
        if parent and os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _receive(channel: socket.socket) -> bytes:
    """Read what has arrived; nothing if the other end has closed."""
    try:
        return channel.recv(1 << 16)
    except ConnectionResetError:
        return b""


def _send(channel: socket.socket, message: Message) -> None:
    _call_quietly(channel.sendall, json.dumps(message).encode() + b"\n")


def _call_quietly(function: Callable[..., object], *arguments: object) -> None:
    """Call a function, and ignore that the receiver of its signal or message has ended."""
    with contextlib.suppress(
        ProcessLookupError,
        PermissionError,
        BrokenPipeError,
        ConnectionResetError,
    ):
        function(*arguments)


def _list_descendants(root: int) -> list[int]:
    """List the ids of all processes below `root` (Linux)."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name in parentheses may have spaces and parentheses itself (proc(5)).
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            # It has ended since.
            continue
        pid = int(entry.parent.name)
        parent = int(fields[1])
        children.setdefault(parent, []).append(pid)
    descendants: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(), [])
        descendants += below
        queue += below
    return descendants


def main() -> None:
    """Run as a program: serve the socket whose number is the first argument, then end."""
    adopt_orphans()
    request = serve_requests(socket.socket(fileno=int(sys.argv[1])))
    if request is None:
        end_all()
        return
    try:
        os.chdir(request["cwd"])
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.execvpe(request["argv"][0], request["argv"], request["env"])
    except OSError as error:
        print(f"{request['argv'][0]}: {error}", file=sys.stderr, flush=True)
    os._exit(127)


if __name__ == "__main__":
    main()
