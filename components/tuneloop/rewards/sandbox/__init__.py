"""Run a program that nobody trusts, and say what became of it; `jail` is the side that is shut in.

The program gets an interpreter of its own with an empty environment and no file open but its input, so nothing of the
caller is in its memory. It sees the standard library and an empty directory.

`TUNELOOP_SANDBOX`, which ``cluster.sandbox`` sets, says where: ``process``, or the URL of a
`tuneloop.inference.sandbox_server`; ``URL#gvisor`` is of one that proves to be in gVisor: a weaker one runs nothing."""

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
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from tuneloop.core.errors import UserError
from tuneloop.core.http import CONNECT_S, Unanswered, is_transient, send_request
from tuneloop.core.server_token import build_token_headers
from tuneloop.rewards.sandbox.jail import ARCHITECTURES
from tuneloop.workflow.settings import PROCESS, SANDBOX_PLACE, SANDBOX_TOKEN, SANDBOX_VARIABLE

Kind = Literal["done", "error", "timeout", "memory", "output", "escape"]
JAIL = Path(__file__).with_name("jail.py")
SYSTEM = (
    *("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo"),
    *("/etc/localtime", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"),
)
MEMORY = 3
"""The exit code that `jail` gives for it."""
NOTES = 1 << 16
"""Most bytes of a call's result."""
HINDERED = 10  # times its seconds that a program may take by the clock, where it or its judge waits for a processor


@dataclass(frozen=True)
class Limits:
    """What a program may use: `seconds` of processor time, rounded up, and of the clock less what it waited for a
    processor; `memory`, bytes of address space (a 64th, at least 4 MiB, a thread); `output`, bytes on its stdout."""

    seconds: float
    memory: int
    output: int

    def __post_init__(self) -> None:
        if min(self.seconds, self.memory, self.output) <= 0:  # to the kernel a negative limit is none
            raise ValueError(f"limits must be positive: {self}")


@dataclass(frozen=True)
class Ending:
    """What became of a program.

    Attributes:
        kind: ``done``: it ended by itself without an error. ``escape``: the kernel ended it at a door.
        stdout: what it wrote, cut at the limit.
        result: Python's `repr` of the call's value; None where there was no call, or it did not return.
        door: what it tried, where `kind` is ``escape``.
        error: what it raised, as it says itself, where `kind` is ``error``; empty where it is not known.
        seconds: that it took, of its limit.
    """

    kind: Kind
    stdout: str
    result: str | None = None
    door: str = ""
    error: str = ""
    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0


class _Answer(BaseModel):
    ending: Ending


def check_kernel(field: str, value: str) -> None:
    """Check that programs can be shut in here. Raises UserError, at the `field` and `value` that want it, where it is
    not Linux on x86_64 or aarch64, or kernel or pod have no Landlock. Nothing is ever run outside of it."""
    known, here = [f"linux {machine}" for machine in ARCHITECTURES], f"{sys.platform} {platform.machine()}"
    if here not in known:
        raise UserError(field, value, f"can shut programs in only on {' or '.join(known)}, not on {here}")
    if ctypes.CDLL(None, use_errno=True).syscall(444, None, 0, 1) < 1:
        remedy = "the kernel has no Landlock (Linux 5.13, CONFIG_SECURITY_LANDLOCK), or the pod's seccomp forbids it"
        raise UserError(field, value, f"cannot shut programs in: {remedy}; use another node")


def find_sandbox() -> str:
    """Find where programs run. Raises UserError where the environment names no such place."""
    if not re.fullmatch(SANDBOX_PLACE, where := os.environ.get(SANDBOX_VARIABLE, PROCESS)):
        raise UserError(SANDBOX_VARIABLE, where, "must be process, or a URL as http://host:8000, perhaps with #gvisor")
    return where


def check_sandbox(field: str, value: str) -> None:
    """Check that programs can be run: as `check_kernel`; a service is asked only when there is a program."""
    if find_sandbox() == PROCESS:
        check_kernel(field, value)


def run_in_sandbox(program: str, stdin: str, call: str | None, limits: Limits) -> Ending:
    """Run a program as `run_program` does, where `find_sandbox` says; a service that is lost is asked again. Raises
    OSError: it cannot be shut in, no service takes it or its token, or an answer is malformed; UserError: a service is
    weaker than asked, or refuses the request."""
    if (where := find_sandbox()) == PROCESS:
        return run_program(program, stdin, call, limits)
    url, _, isolation = where.partition("#")
    asked = {"program": program, "stdin": stdin, "call": call, **asdict(limits), "isolation": isolation or PROCESS}
    try:
        program.encode()
    except UnicodeEncodeError as error:  # as Python's compiler says of it
        return Ending("error", "", error=f"UnicodeEncodeError: {error}"[:300])
    end = time.monotonic() + (most := 8 * HINDERED * limits.seconds + CONNECT_S)  # four may run before it, one by one
    while True:
        headers = build_token_headers(SANDBOX_TOKEN)
        try:
            status, answer = send_request("POST", f"{url}/run", timeout_s=most, body=asked, headers=headers)
        except Unanswered as error:
            status, answer = 503, str(error).encode()
        told = f"the sandbox answers {status}: {answer[:300].decode(errors='replace')}"
        if status == 200:
            try:
                return _Answer.model_validate_json(answer, strict=True).ending
            except ValidationError as error:
                raise OSError(f"{url}: not an ending of a program: {told}") from error
        if status == 413:
            return Ending("memory", "")
        if not is_transient(status) and not (status == 401 and headers):  # a new token comes to two pods at two times
            raise UserError(SANDBOX_VARIABLE, where, told)
        if time.monotonic() > end:
            raise OSError(f"{url}: {told}")
        time.sleep(0.5)


def run_program(program: str, stdin: str, call: str | None, limits: Limits) -> Ending:
    """Run `program`, source of Python, shut in: it reads `stdin`, and after it the expression `call` is evaluated.
    Raises OSError where it could not be shut in; it was not run then."""
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as open_:
        source = open_.enter_context(_in_memory(json.dumps({"program": program, "call": call})))
        given = open_.enter_context(_in_memory(stdin))
        reader, writer = os.pipe()
        open_.callback(os.close, reader)
        command = [sys.executable, "-I", "-S", "-B", "-X", "utf8", str(JAIL), _about(source, writer, home, limits)]
        streams: Any = {"stdin": given, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        process = subprocess.Popen(command, **streams, env={}, cwd=home, pass_fds=(source, writer))
        os.close(writer)
        assert process.stdout is not None
        open_.enter_context(process.stdout)
        try:
            out, notes, over, seconds = _collect(process, reader, limits)
        finally:
            process.kill()
            process.wait()
    ending = _judge(process.returncode, out.decode(errors="replace"), notes.decode(errors="replace"), over)
    return replace(ending, seconds=seconds)


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[int]:
    """Open a file that nobody else sees and no write can block on, to be read from its start."""
    number = os.memfd_create("given")
    try:
        with open(number, "w", encoding="utf-8", closefd=False) as file:
            file.write(text)
        os.lseek(number, 0, os.SEEK_SET)
        yield number
    finally:
        os.close(number)


def _about(source: int, notes: int, home: str, limits: Limits) -> str:
    library = str(Path(os.__file__).parent)
    places = (home, library, str(JAIL), str(Path(sys.base_prefix, "lib")), *SYSTEM)
    readable = sorted({os.path.realpath(place) for place in places if os.path.exists(place)})
    seconds = max(math.ceil(limits.seconds), 1)
    about = {"source": source, "notes": notes, "seconds": seconds, "memory": limits.memory, "readable": readable}
    return json.dumps(about)


def _collect(process: subprocess.Popen[bytes], reader: int, limits: Limits) -> tuple[bytes, bytes, Kind | None, float]:
    """Return what it writes to standard output and notes until it ends, the limit that it overran, and its seconds."""
    assert process.stdout is not None
    begun, own = time.monotonic(), _read_wait("thread-self")

    def took() -> float:
        clock = time.monotonic() - begun
        return max(clock - _read_wait(str(process.pid)) - _read_wait("thread-self") + own, clock / HINDERED)

    over, end = None, begun + limits.seconds
    most = {process.stdout.fileno(): limits.output, reader: NOTES}
    received = dict.fromkeys(most, b"")
    ended = os.pidfd_open(process.pid)  # for it may close both, and go on
    with selectors.DefaultSelector() as waiting, os.fdopen(ended):
        for number in (*most, ended):
            waiting.register(number, selectors.EVENT_READ)
        while waiting.get_map() and not over:
            if not (ready := waiting.select(max(end - time.monotonic(), 0))):
                left = limits.seconds - took()
                over, end = (None if left > 0 else "timeout"), time.monotonic() + max(left, 0.01)
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16) if key.fd != ended else b""
                if not data:
                    waiting.unregister(key.fd)
                    continue
                received[key.fd] = (received[key.fd] + data)[: most[key.fd] + 1]
                over = "output" if len(received[key.fd]) > most[key.fd] else over
        return *received.values(), over, took()  # type: ignore[return-value]


def _read_wait(process: str) -> float:
    """Read the seconds that a process, or its first thread, was ready and had no processor: the second number of its
    schedstat (proc(5)); 0 where the kernel does not count them."""
    file = Path(f"/proc/{process}/schedstat")
    return int(file.read_text().split()[1]) / 1e9 if file.exists() else 0.0


def _judge(code: int, out: str, notes: str, over: Kind | None) -> Ending:
    state, *lines = notes.split("\n")
    if over == "timeout" and not state:  # its time was shorter than the interpreter's start
        return Ending("timeout", out)
    if state != "ready":
        raise OSError(f"the program could not be shut in and was not run: {state or 'the interpreter did not start'}")
    if code == -signal.SIGSYS:
        doors = [line.removeprefix("escape ") for line in lines if line.startswith("escape ")]
        return Ending("escape", out, door=doors[-1] if doors else "a forbidden system call")
    if over:
        return Ending(over, out)
    result = lines[-1].removeprefix("result ") if lines and lines[-1].startswith("result ") else None
    kinds: dict[int, Kind] = {0: "done", MEMORY: "memory", -signal.SIGKILL: "timeout", -signal.SIGXCPU: "timeout"}
    raised = lines[-1].removeprefix("raised ") if lines and lines[-1].startswith("raised ") else ""
    return Ending(kinds.get(code, "error"), out, result, error=raised)
