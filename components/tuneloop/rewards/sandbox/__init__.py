"""Run an untrusted program, and return how it ended; `jail` is the part that runs inside the sandbox.

The program gets an interpreter of its own with an empty environment and no file open but its input, so nothing of the
caller is in its memory. It sees the standard library and an empty directory.

`TUNELOOP_SANDBOX`, which ``cluster.sandbox`` sets, says where: ``process``, or the URL of a
`tuneloop.inference.sandbox_server`. With ``URL#gvisor`` a server must prove that it runs in gVisor to be used."""

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
"""The exit code of `jail` for a program that ran out of memory."""
NOTES = 1 << 16
"""The maximum size of a call's result, in bytes."""
HINDERED = (
    10  # a program that waits for a processor may take this many times its seconds by the clock
)


@dataclass(frozen=True)
class Limits:
    """What a program may use: `seconds` of processor time, rounded up, and of the clock less what it waited for a
    processor; `memory`, bytes of address space (a 64th, at least 4 MiB, a thread); `output`, bytes on its stdout."""

    seconds: float
    memory: int
    output: int

    def __post_init__(self) -> None:
        if (
            min(self.seconds, self.memory, self.output) <= 0
        ):  # to the kernel a negative limit is none
            raise ValueError(f"limits must be positive: {self}")


@dataclass(frozen=True)
class Ending:
    """How a program ended.

    Attributes:
        kind: ``done``: it ended without an error. ``escape``: the kernel ended it at a forbidden system call.
        stdout: what it wrote, cut at the limit.
        result: Python's `repr` of the call's value; None where there was no call, or it did not return.
        door: the forbidden call that it tried, if `kind` is ``escape``.
        error: the error that it reports to have raised, if `kind` is ``error``; empty if it is unknown.
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


def check_kernel(field: str, value: str) -> None:
    """Check that programs can be confined here. Raises UserError, for the `field` and `value` that require it, unless
    this is Linux on x86_64 or aarch64 with Landlock in kernel and pod. No program ever runs unconfined."""
    known, here = (
        [f"linux {machine}" for machine in ARCHITECTURES],
        f"{sys.platform} {platform.machine()}",
    )
    if here not in known:
        raise UserError(
            field, value, f"can shut programs in only on {' or '.join(known)}, not on {here}"
        )
    if ctypes.CDLL(None, use_errno=True).syscall(444, None, 0, 1) < 1:
        remedy = "the kernel has no Landlock (Linux 5.13, CONFIG_SECURITY_LANDLOCK), or the pod's seccomp forbids it"
        raise UserError(field, value, f"cannot shut programs in: {remedy}; use another node")


def find_sandbox() -> str:
    """Find where programs run. Raises UserError where the environment names no such place."""
    if not re.fullmatch(SANDBOX_PLACE, where := os.environ.get(SANDBOX_VARIABLE, PROCESS)):
        raise UserError(
            SANDBOX_VARIABLE,
            where,
            "must be process, or a URL as http://host:8000, perhaps with #gvisor",
        )
    return where


def check_sandbox(field: str, value: str) -> None:
    """Check that programs can be run: as `check_kernel`; a service is asked only when there is a program."""
    if find_sandbox() == PROCESS:
        check_kernel(field, value)


def run_in_sandbox(program: str, stdin: str, call: str | None, limits: Limits) -> Ending:
    """Run a program as `run_program` does, where `find_sandbox` says; an interrupted request is sent again. Raises
    OSError if it cannot be confined, no service accepts it or its token, or a response is malformed; UserError if a
    service is weaker than required, or refuses the request."""
    if (where := find_sandbox()) == PROCESS:
        return run_program(program, stdin, call, limits)
    url, _, isolation = where.partition("#")
    asked = {
        "program": program,
        "stdin": stdin,
        "call": call,
        **asdict(limits),
        "isolation": isolation or PROCESS,
    }
    try:
        program.encode()
    except UnicodeEncodeError as error:  # as Python's compiler says of it
        return Ending("error", "", error=f"UnicodeEncodeError: {error}"[:300])
    end = time.monotonic() + (
        most := 8 * HINDERED * limits.seconds + CONNECT_S
    )  # four may run before it, one by one
    while True:
        headers = build_token_headers(SANDBOX_TOKEN)
        try:
            status, answer = send_request(
                "POST", f"{url}/run", timeout_s=most, body=asked, headers=headers
            )
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
        if not is_transient(status) and not (
            status == 401 and headers
        ):  # a new token comes to two pods at two times
            raise UserError(SANDBOX_VARIABLE, where, told)
        if time.monotonic() > end:
            raise OSError(f"{url}: {told}")
        time.sleep(0.5)


def run_program(program: str, stdin: str, call: str | None, limits: Limits) -> Ending:
    """Run `program`, Python source, in the sandbox: it reads `stdin`, and after it the expression `call` is evaluated.
    Raises OSError if it could not be confined; it has not run then."""
    with tempfile.TemporaryDirectory() as home, contextlib.ExitStack() as open_:
        source = open_.enter_context(_in_memory(json.dumps({"program": program, "call": call})))
        given = open_.enter_context(_in_memory(stdin))
        reader, writer = os.pipe()
        open_.callback(os.close, reader)
        command = [
            sys.executable,
            "-I",
            "-S",
            "-B",
            "-X",
            "utf8",
            str(JAIL),
            _about(source, writer, home, limits),
        ]
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
    ending = _judge(
        process.returncode, out.decode(errors="replace"), notes.decode(errors="replace"), over
    )
    return replace(ending, seconds=seconds)


@contextlib.contextmanager
def _in_memory(text: str) -> Iterator[int]:
    """Write `text` to an anonymous file in memory, open to be read from its start; unlike a pipe it cannot block."""
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
    about = {
        "source": source,
        "notes": notes,
        "seconds": seconds,
        "memory": limits.memory,
        "readable": readable,
        "home": home,
        "parent": os.getpid(),
    }
    return json.dumps(about)


def _collect(
    process: subprocess.Popen[bytes], reader: int, limits: Limits
) -> tuple[bytes, bytes, Kind | None, float]:
    """Return the process's standard output and notes until it ends, the limit that it exceeded, and its seconds."""
    assert process.stdout is not None
    begun, own = time.monotonic(), _read_wait("thread-self")

    def took() -> float:
        clock = time.monotonic() - begun
        return max(
            clock - _read_wait(str(process.pid)) - _read_wait("thread-self") + own, clock / HINDERED
        )

    over, end = None, begun + limits.seconds
    most = {process.stdout.fileno(): limits.output, reader: NOTES}
    received = dict.fromkeys(most, b"")
    ended = os.pidfd_open(process.pid)  # the program may close both, and continue
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
        raise OSError(
            f"the program could not be shut in and was not run: {state or 'the interpreter did not start'}"
        )
    if code == -signal.SIGSYS:
        doors = [line.removeprefix("escape ") for line in lines if line.startswith("escape ")]
        return Ending("escape", out, door=doors[-1] if doors else "a forbidden system call")
    if over:
        return Ending(over, out)
    result = (
        lines[-1].removeprefix("result ") if lines and lines[-1].startswith("result ") else None
    )
    kinds: dict[int, Kind] = {
        0: "done",
        MEMORY: "memory",
        -signal.SIGKILL: "timeout",
        -signal.SIGXCPU: "timeout",
    }
    raised = lines[-1].removeprefix("raised ") if lines and lines[-1].startswith("raised ") else ""
    return Ending(kinds.get(code, "error"), out, result, error=raised)
