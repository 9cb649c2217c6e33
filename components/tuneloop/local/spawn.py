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
speaks the same, but runs a module where this one calls exec.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
PAUSE_S = 0.05
"""Seconds without an event after which a child is forked for the next request: right after a start,
the fork was seen to slow down the process that has just started (8 ms)."""
_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def serve_requests(channel: socket.socket) -> dict[str, Any] | None:
    """Start and watch processes until `channel` closes.

    Returns:
        In each forked child, set up as its request says: the request, with a socket as
        ``"report"``. A child that sends its exit code there counts as ended, and its process group
        is killed. In the server: None, when the channel closed.
    """
    wake, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
    ):  # a terminal's Ctrl-C is the executor's to handle
        signal.signal(number, signal.SIG_IGN)
    pids: dict[int, int] = {}  # id → pid
    reports: dict[socket.socket, int] = {}  # where a child sends its exit code → id
    requests: list[dict[str, Any]] = []
    buffer = b""
    spare, quiet = None, True
    while True:
        if requests and "signal" in requests[0]:
            request = requests.pop(0)
            if request["signal"] in pids:
                _quietly(os.killpg, pids[request["signal"]], request["number"])
            continue
        if not spare and (quiet or requests):
            spare = _fork([channel, *reports], (wake, woken))
        if isinstance(spare, dict):
            return spare
        if spare and requests:
            (pid, report), spare = spare, None
            try:
                report.sendall(json.dumps(request := requests[0]).encode() + b"\n")
            except OSError:  # it was killed while it waited
                continue
            pids[request["start"]], reports[report] = pid, request["start"]
            _send(channel, {"started": request["start"], "pid": pid})
            del requests[0]
            continue
        watched: list[Any] = [channel, wake, *reports]
        ready = select.select(watched, [], [], None if spare else PAUSE_S)[0]
        quiet = not ready
        for report in reports.keys() & ready:
            name, code = reports.pop(report), _receive(report)
            if code and name in pids:
                _end(channel, pids, name, int(code))
            report.close()
        if wake in ready:
            os.read(wake, 4096)
            if (reaped := _reap(channel, pids)) and spare and spare[0] in reaped:
                spare = None
        if channel in ready:
            data = _receive(channel)
            if not data:
                return None
            *lines, buffer = (buffer + data).split(b"\n")
            requests += map(json.loads, lines)


def end_all() -> None:
    """Send SIGKILL to everything that descends from this process."""
    while True:
        for pid in _descendants(os.getpid()):
            _quietly(os.kill, pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, 0)[0]:
                pass
        except ChildProcessError:
            return


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent ends (Linux)."""
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
    try:
        return channel.recv(1 << 16)
    except ConnectionResetError:
        return b""


def _fork(
    channels: Iterable[socket.socket], pipes: tuple[int, int]
) -> tuple[int, socket.socket] | dict[str, Any] | None:
    """Fork a child that waits for its request.

    Returns:
        In the child the request; in this process the child's pid and channel, or None.
    """
    parent = os.getpid()
    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
    except OSError:  # too many processes, or too little memory: the caller retries
        return None
    if pid:
        theirs.close()
        return pid, ours
    os.setsid()
    die_with_parent(parent)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for channel in (ours, *channels):
        channel.close()
    for descriptor in pipes:
        os.close(descriptor)
    line = theirs.makefile("rb").readline()
    if not line.endswith(b"\n"):
        os._exit(0)  # the server has ended
    request = {**json.loads(line), "report": theirs}
    try:
        for target, path in ((0, os.devnull), (1, request["stdout"]), (2, request["stderr"])):
            flags = os.O_RDONLY if target == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
            opened = os.open(path, flags, 0o644)
            os.dup2(opened, target)
            os.close(opened)
    except (FileNotFoundError, PermissionError, ProcessLookupError) as error:
        if not str(error.filename).startswith("/proc/"):
            raise
        os._exit(128 + signal.SIGKILL)  # the process whose output it shares has ended
    return request


def _reap(channel: socket.socket, pids: dict[int, int]) -> set[int]:
    """Take note of every child that has ended; return their pids."""
    reaped: set[int] = set()
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            pid, code = found[0], os.waitstatus_to_exitcode(found[1])
            reaped.add(pid)
            for name in [
                name for name, known in pids.items() if known == pid
            ]:  # others are adopted orphans
                _end(channel, pids, name, code if code >= 0 else 128 - code)
    return reaped


def _end(channel: socket.socket, pids: dict[int, int], name: int, code: int) -> None:
    """End a pod with its first process, whose exit code is known, and tell it."""
    _quietly(os.killpg, pids.pop(name), signal.SIGKILL)
    _send(channel, {"ended": name, "code": code})


def _send(channel: socket.socket, message: dict[str, Any]) -> None:
    _quietly(channel.sendall, json.dumps(message).encode() + b"\n")


def _quietly(call: Any, *arguments: Any) -> None:
    """Call a function, and ignore that the receiver of its signal or message has ended."""
    with contextlib.suppress(
        ProcessLookupError, PermissionError, BrokenPipeError, ConnectionResetError
    ):
        call(*arguments)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        children.setdefault(int(fields[1]), []).append(int(entry.parent.name))
    found, queue = [], [root]
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def main() -> None:
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
