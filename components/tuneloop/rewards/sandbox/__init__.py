"""Run an untrusted program, and return how it ended; `jail` is the part that runs in the sandbox.

The program gets an interpreter of its own with an empty environment and no file open but its input,
so nothing of the caller is in its memory. It sees the standard library and an empty directory.

`TUNELOOP_SANDBOX`, which ``cluster.sandbox`` sets, names the place: ``process``, or the URL of a
`tuneloop.inference.sandbox_server`. With ``URL#gvisor`` a server must prove that it runs in gVisor.

The rewards use `run_in_sandbox` (`rewards/code.py`, `rewards/programs/checks.py`), as does
`environments/python.py`; the server runs `run_program`. `Limits` and `Ending` are also what client
and server send each other, and these two may be of different releases. Tests are `test_code.py` and
`test_jail.py` of `tests/unit/rewards`, and `tests/unit/inference/test_sandbox_server.py`.
"""

import contextlib
import ctypes
import json
import math
import os
import platform
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, BinaryIO, Literal, NamedTuple

from pydantic import BaseModel, Field, ValidationError

from tuneloop.core.errors import UserError
from tuneloop.core.http import CONNECT_S, Unanswered, is_transient, send_request
from tuneloop.core.json_types import JsonObject
from tuneloop.core.server_token import build_token_headers
from tuneloop.rewards.sandbox.jail import ARCHITECTURES, MEMORY
from tuneloop.workflow.settings import PROCESS, SANDBOX_PLACE, SANDBOX_TOKEN, SANDBOX_VARIABLE

Kind = Literal["done", "error", "timeout", "memory", "output", "escape"]
"""How a program ended. One that is added also gets a share in `rewards/code.py: REASONS`, words for
the policy in `environments/python.py`, and its exit code in `KINDS_BY_CODE`. A client of an earlier
release refuses the answer of a server that has it."""
JAIL = Path(__file__).with_name("jail.py")
LANDLOCK_CREATE_RULESET = 444
"""The system call that also tells the version of Landlock; on all architectures."""
SYSTEM_PATHS = (
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/usr/share/zoneinfo",
    "/etc/localtime",
    "/etc/ld.so.cache",
    "/dev/null",
    "/dev/urandom",
)
"""What a program may read besides the standard library, which `_build_options` adds."""
NOTES = 1 << 16
"""The maximum bytes of all notes of `jail`, and so of a call's result; with more the program ends
with the kind ``output``."""
LEAST_MEMORY = 1 << 26
"""Bytes without which the interpreter that a program runs in may not start; some 16 MiB are its
own. `rewards/code.py` and `inference/sandbox_server.py` refuse less, `environments/python.py` does
not."""
HINDERED = 10
"""How many times its seconds a program may take by the clock, while it waits for a processor."""
READ_BYTES = 1 << 16
"""As much as a pipe of Linux holds."""
KINDS_BY_CODE: dict[int, Kind] = {
    0: "done",
    MEMORY: "memory",
    # The kernel kills a program that is past its limit of processor time.
    -signal.SIGKILL: "timeout",
    -signal.SIGXCPU: "timeout",
}
"""Exit code of `jail`, or the negative number of a signal → kind; ``error`` for all others."""


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    A field that is added is also one of `inference/sandbox_server.py: Program`, which refuses a
    request with a key that it does not know, and bounds each; `run_in_turn` there hands it on.
    `_build_options` gives it to `jail`.

    Attributes:
        seconds: of processor time, rounded up to whole ones; and by the clock, without the time in
            which it waited for a processor.
        memory: bytes of address space. Each thread's stack takes a 64th of them, at least 4 MiB
            (`rewards/sandbox/jail.py: TASKS`).
        output: bytes on its stdout.
    """

    seconds: float
    memory: int
    output: int

    def __post_init__(self) -> None:
        # To the kernel a negative limit is none.
        if min(self.seconds, self.memory, self.output) <= 0:
            raise ValueError(f"limits must be positive: {self}")


@dataclass(frozen=True)
class Ending:
    """How a program ended.

    A field that is added needs a default, as servers of an earlier release do not send it.

    Attributes:
        kind: ``done``: it ended without an error. ``escape``: the kernel ended it at a forbidden
            system call.
        stdout: what it wrote, at most one byte more than the limit, which shows that there was
            more.
        result: Python's `repr` of the call's value; None where there was no call, or it did not
            return.
        door: the forbidden call that it tried, if `kind` is ``escape``.
        error: the error that it reports to have raised, if `kind` is ``error``; empty if it is
            unknown.
        seconds: how much it took of its time limit.
    """

    kind: Kind
    stdout: str
    result: str | None = None
    door: str = ""
    error: str = ""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class _Answer(BaseModel):
    ending: Ending


class _Output(NamedTuple):
    """What a process has written until its end, or until it exceeded a limit."""

    stdout: bytes
    notes: bytes
    exceeded: Kind | None
    seconds: float


def check_kernel(field: str, value: str) -> None:
    """Check that programs can be confined here. No program ever runs unconfined.

    Raises:
        UserError: for the `field` and `value` that require it, unless this is Linux on x86_64 or
            aarch64 with Landlock in kernel and pod.
    """
    supported = [f"linux {machine}" for machine in ARCHITECTURES]
    system = f"{sys.platform} {platform.machine()}"
    if system not in supported:
        remedy = f"can shut programs in only on {' or '.join(supported)}, not on {system}"
        raise UserError(field, value, remedy)
    if ctypes.CDLL(None, use_errno=True).syscall(LANDLOCK_CREATE_RULESET, None, 0, 1) < 1:
        raise UserError(
            field,
            value,
            "cannot shut programs in: the kernel has no Landlock (Linux 5.13, "
            "CONFIG_SECURITY_LANDLOCK), or the pod's seccomp forbids it; use another node",
        )


def find_sandbox() -> str:
    """Find where programs run. Raises UserError where the environment names no such place."""
    sandbox = os.environ.get(SANDBOX_VARIABLE, PROCESS)
    if not re.fullmatch(SANDBOX_PLACE, sandbox):
        remedy = "must be process, or a URL as http://host:8000, perhaps with #gvisor"
        raise UserError(SANDBOX_VARIABLE, sandbox, remedy)
    return sandbox


def check_sandbox(field: str, value: str) -> None:
    """Check that programs can be run, as `check_kernel`.

    A service is not asked before there is a program.
    """
    if find_sandbox() == PROCESS:
        check_kernel(field, value)


def run_in_sandbox(program: str, stdin: str, call: str | None, limits: Limits) -> Ending:
    """Run a program as `run_program` does, where `find_sandbox` says.

    An interrupted request to a service is sent again.

    Raises:
        OSError: the program cannot be confined, no service accepts it or its token, or a response
            is malformed.
        UserError: a service is weaker than required, or refuses the request.
    """
    sandbox = find_sandbox()
    if sandbox == PROCESS:
        return run_program(program, stdin, call, limits)
    try:
        program.encode()
    except UnicodeEncodeError as error:
        # Python's compiler would refuse it in the same words.
        return Ending("error", "", error=f"UnicodeEncodeError: {error}"[:300])
    url, _, isolation = sandbox.partition("#")
    request = asdict(limits) | {
        "program": program,
        "stdin": stdin,
        "call": call,
        "isolation": isolation or PROCESS,
    }
    # Those in the server's queue may run before it, one by one
    # (`inference/sandbox_server.py: WAITING`).
    timeout_s = 8 * HINDERED * limits.seconds + CONNECT_S
    end = time.monotonic() + timeout_s
    while True:
        headers = build_token_headers(SANDBOX_TOKEN)
        try:
            status, body = send_request(
                "POST", f"{url}/run", timeout_s=timeout_s, body=request, headers=headers
            )
        except Unanswered as error:
            status = 503
            body = str(error).encode()
        answer = f"the sandbox answers {status}: {body[:300].decode(errors='replace')}"
        if status == 200:
            try:
                return _Answer.model_validate_json(body, strict=True).ending
            except ValidationError as error:
                raise OSError(f"{url}: not an ending of a program: {answer}") from error
        if status == 413:
            return Ending("memory", "")
        # A new token comes to two pods at two times.
        has_old_token = status == 401 and headers
        if not is_transient(status) and not has_old_token:
            raise UserError(SANDBOX_VARIABLE, sandbox, answer)
        if time.monotonic() > end:
            raise OSError(f"{url}: {answer}")
        time.sleep(0.5)


def run_program(program: str, stdin: str, call: str | None, limits: Limits) -> Ending:
    """Run a program in the sandbox.

    Args:
        program: Python source.
        stdin: what it reads.
        call: an expression that is evaluated after it.
        limits: what both may use together.

    Raises:
        OSError: it could not be confined; it has not run then.
    """
    with contextlib.ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory())
        task = json.dumps({"program": program, "call": call})
        source = stack.enter_context(_open_in_memory(task)).fileno()
        input_file = stack.enter_context(_open_in_memory(stdin))
        notes, notes_end = os.pipe()
        stack.callback(os.close, notes)
        options = json.dumps(_build_options(source, notes_end, home, limits))
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(JAIL), options],
            stdin=input_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd=home,
            pass_fds=(source, notes_end),
        )
        os.close(notes_end)
        assert process.stdout is not None
        stdout = stack.enter_context(process.stdout).fileno()
        try:
            output = _collect(process.pid, stdout, notes, limits)
        finally:
            process.kill()
            process.wait()
    return replace(_judge(process.returncode, output), seconds=output.seconds)


def _open_in_memory(text: str) -> BinaryIO:
    """Open an anonymous file in memory that holds `text`. Unlike a pipe it cannot block."""
    data = text.encode()
    file = os.fdopen(os.memfd_create("text"), "w+b")
    file.write(data)
    file.seek(0)
    return file


def _build_options(source: int, notes: int, home: str, limits: Limits) -> JsonObject:
    """Build the options of `jail`: two descriptors, the directory of the program, its limits. They
    are read by name in `confine_process` there and at the end of its file."""
    library = str(Path(os.__file__).parent)
    paths = [home, library, str(JAIL), str(Path(sys.base_prefix, "lib"))]
    paths += SYSTEM_PATHS
    return {
        "source": source,
        "notes": notes,
        "seconds": max(math.ceil(limits.seconds), 1),
        "memory": limits.memory,
        "readable": sorted({os.path.realpath(path) for path in paths if os.path.exists(path)}),
        "home": home,
        "parent": os.getpid(),
    }


def _collect(pid: int, stdout: int, notes: int, limits: Limits) -> _Output:
    """Collect what a process writes to two descriptors, until it ends or exceeds a limit."""
    meter = _Meter(pid)
    exceeded: Kind | None = None
    end = time.monotonic() + limits.seconds
    sizes = {stdout: limits.output, notes: NOTES}
    received = dict.fromkeys(sizes, b"")
    # The program may close both, and continue.
    ended = os.pidfd_open(pid)
    with selectors.DefaultSelector() as selector, os.fdopen(ended):
        for descriptor in (stdout, notes, ended):
            selector.register(descriptor, selectors.EVENT_READ)
        while selector.get_map() and not exceeded:
            events = selector.select(max(end - time.monotonic(), 0))
            if not events:
                remaining_s = limits.seconds - meter.read()
                if remaining_s <= 0:
                    exceeded = "timeout"
                end = time.monotonic() + max(remaining_s, 0.01)
            for key, _ in events:
                descriptor = key.fd
                data = b"" if descriptor == ended else os.read(descriptor, READ_BYTES)
                if not data:
                    selector.unregister(descriptor)
                    continue
                size = sizes[descriptor]
                received[descriptor] = (received[descriptor] + data)[: size + 1]
                if len(received[descriptor]) > size:
                    exceeded = "output"
        return _Output(received[stdout], received[notes], exceeded, meter.read())


class _Meter:
    """Measures how much of its time a process has taken.

    That is the clock less what it, and this thread, which reads from it, waited for a processor.
    """

    def __init__(self, pid: int) -> None:
        self._pid = str(pid)
        self._began_at = time.monotonic()
        self._own_wait_s = _read_wait("thread-self")

    def read(self) -> float:
        """Return the seconds so far."""
        clock_s = time.monotonic() - self._began_at
        wait_s = _read_wait(self._pid) + _read_wait("thread-self") - self._own_wait_s
        return max(clock_s - wait_s, clock_s / HINDERED)


def _read_wait(process: str) -> float:
    """Read the seconds that a process, or its first thread, was ready and had no processor.

    That is the second number of its schedstat (proc(5)); 0 where the kernel does not count them.
    """
    file = Path(f"/proc/{process}/schedstat")
    return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0


def _judge(code: int, output: _Output) -> Ending:
    """Tell from the exit code and the notes of `jail` how a program ended.

    The first line of the notes is ``ready``; the others begin with ``escape``, ``result`` or
    ``raised``, as `execute_program` and `watch_audit` write them. A program knows the descriptor
    and may write notes too, so nothing but its own result follows from them.

    Raises:
        OSError: it could not be confined, and has not run.
    """
    stdout = output.stdout.decode(errors="replace")
    state, *lines = output.notes.decode(errors="replace").split("\n")
    if output.exceeded == "timeout" and not state:
        # Its time was shorter than the interpreter's start.
        return Ending("timeout", stdout)
    if state != "ready":
        reason = state or "the interpreter did not start"
        raise OSError(f"the program could not be shut in and was not run: {reason}")
    if code == -signal.SIGSYS:
        doors = [line.removeprefix("escape ") for line in lines if line.startswith("escape ")]
        return Ending("escape", stdout, door=doors[-1] if doors else "a forbidden system call")
    if output.exceeded:
        return Ending(output.exceeded, stdout)
    kind = KINDS_BY_CODE.get(code, "error")
    last = lines[-1] if lines else ""
    if last.startswith("result "):
        return Ending(kind, stdout, result=last.removeprefix("result "))
    error = last.removeprefix("raised ") if last.startswith("raised ") else ""
    return Ending(kind, stdout, error=error)
