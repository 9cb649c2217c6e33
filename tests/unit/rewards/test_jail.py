"""The filter of system calls, decided as the kernel would, on both architectures; how long a program is given."""

import ctypes
import errno
import json
import os
import struct
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from tuneloop.rewards import sandbox
from tuneloop.rewards.sandbox import jail

CALLS = json.loads(Path(__file__).with_name("system_calls.json").read_text())
"""Name → number on x86_64 and on aarch64: asm/unistd_64.h and asm-generic/unistd.h of Linux 6.1."""
KILL, ALLOW, EPERM, ENOSYS, ENOMEM = 0x80000000, 0x7FFF0000, 0x50001, 0x50026, 0x5000C
OWN, STACK = 4711, 4 << 20
ONLY_X86 = {
    *(
        "open",
        "stat",
        "lstat",
        "poll",
        "access",
        "pipe",
        "select",
        "dup2",
        "pause",
        "alarm",
        "getdents",
        "readlink",
    ),
    *("getpgrp", "arch_prctl", "time", "epoll_wait"),
}


def decide(machine: str, call: int, *arguments: int, architecture: int = 0) -> int:
    """What the filter says to a call: classic BPF over struct seccomp_data, as far as the filter uses it."""
    data = {0: call, 4: architecture or jail.ARCHITECTURES[machine]}
    for place, value in enumerate((*arguments, 0, 0, 0, 0, 0, 0)[:6]):
        data |= {16 + 8 * place: value & 0xFFFFFFFF, 20 + 8 * place: value >> 32}
    steps, at, loaded = jail.build_filter(machine, OWN, STACK), 0, 0
    while True:
        code, yes, no, value = steps[at]
        if code == 0x06:
            return value
        if code == 0x20:
            loaded, yes, no, holds = data[value], 0, 0, True
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
        at += 1 + (yes if holds else no)


def test_a_call_is_decided_by_its_name_on_both_architectures() -> None:
    """So the filter of aarch64 is that of x86_64, on which the attacks are run."""
    alone: dict[str, set[str]] = {"x86_64": set(), "aarch64": set()}
    for name, numbers in CALLS.items():
        said = [
            decide(machine, number) for machine, number in zip(alone, numbers) if number is not None
        ]
        if None not in numbers:
            assert said[0] == said[1], name
        elif said[0] == ALLOW:
            alone["x86_64" if numbers[1] is None else "aarch64"].add(name)
    assert alone == {"x86_64": ONLY_X86, "aarch64": set()}
    forbidden = (
        "ptrace",
        "socket",
        "connect",
        "execve",
        "unlinkat",
        "mount",
        "bpf",
        "process_vm_readv",
        "seccomp",
    )
    assert {decide("aarch64", CALLS[name][1]) for name in forbidden} == {KILL}


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_is_the_recorded_one_byte_for_byte(machine: str) -> None:
    """A line of the file is struct sock_filter in hexadecimal. The bytes were recorded when jumps were counted by hand:
    a change of the filter shows here."""
    steps = jail.build_filter(machine, pid=4321, stack=8 << 20)
    recorded = Path(__file__).with_name(f"seccomp_{machine}.txt").read_text().splitlines()
    assert [struct.pack("=HBBI", *step).hex() for step in steps] == recorded


def test_a_jump_leads_to_its_label() -> None:
    program = jail.Filter()
    program.jump(jail.EQUAL, 7, to="yes", otherwise="no")
    program.end_if(jail.HAS_BITS, 1, jail.ALLOW)
    program.mark("no")
    program.end(jail.KILL_PROCESS)
    program.mark("yes")
    program.end(jail.ALLOW)
    assert program.assemble() == [
        (jail.EQUAL, 3, 2, 7),
        (jail.HAS_BITS, 0, 1, 1),
        (jail.RETURN, 0, 0, jail.ALLOW),
        (jail.RETURN, 0, 0, jail.KILL_PROCESS),
        (jail.RETURN, 0, 0, jail.ALLOW),
    ]


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_calls_are_decided_by_what_they_ask_for(machine: str) -> None:
    column = list(jail.ARCHITECTURES).index(machine)

    def ask(name: str, *arguments: int) -> int:
        return decide(machine, CALLS[name][column], *arguments)

    assert decide(machine, CALLS["read"][column], architecture=0x40000003) == KILL, (
        "calls of another architecture"
    )
    assert {decide(machine, number) for number in (424, 435, 444, 1 << 30)} == {ENOSYS}
    assert (ask("clone", 0x3D0F00), ask("clone", 0x1200011), ask("clone", 1 << 40)) == (
        ALLOW,
        KILL,
        KILL,
    )
    for name in ("kill", "tgkill"):
        assert (ask(name, OWN), ask(name, 1), ask(name, 0xFFFFFFFF)) == (ALLOW, KILL, KILL)
    assert (ask("fcntl", 1, 3), ask("fcntl", 1, 8)) == (ALLOW, KILL)
    assert (ask("ioctl", 1, 0x5401), ask("ioctl", 1, 0x5412)) == (ALLOW, KILL)
    assert [ask("prlimit64", 0, 7, new) for new in (0, 1, 1 << 32)] == [ALLOW, EPERM, EPERM]
    assert [ask("mmap", 0, size, 0, 0x20022) for size in (STACK, 1 << 33, STACK - 1, 0)] == [
        ALLOW,
        ALLOW,
        *2 * [ENOMEM],
    ]
    assert ask("mmap", 0, 4096, 3, 0x22) == ALLOW


THREADS = """
import _thread, threading
if SIZE: threading.stack_size(SIZE)
held, started = _thread.allocate_lock(), 0
held.acquire()
try:
    while started < 5000:
        _thread.start_new_thread(held.acquire, ())
        started += 1
except RuntimeError: pass
print(started)
"""


@pytest.mark.parametrize(
    ("size", "memory", "least"), [(0, 256, 4), (32768, 256, 0), (0, 4096, 4), (32768, 4096, 0)]
)
def test_a_program_has_as_many_threads_as_its_memory_has_stacks(
    size: int, memory: int, least: int
) -> None:
    """Small stacks would let it have thousands."""
    limits = sandbox.Limits(8, memory << 20, 1 << 16)
    ending = sandbox.run_program(THREADS.replace("SIZE", str(size)), "", None, limits)
    assert ending.kind == "done" and least <= int(ending.stdout) <= jail.TASKS


def test_a_program_that_waits_for_a_processor_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six that compute for half a second, on one processor: by the clock the last has three, of its two."""
    monkeypatch.setattr(sandbox, "HINDERED", 1000)
    busy = "import time\nwhile time.process_time() < 0.5: pass\nprint(7)"
    endings: list[sandbox.Ending] = []

    def run() -> None:
        endings.append(sandbox.run_program(busy, "", None, sandbox.Limits(2, 256 << 20, 1 << 16)))

    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        threads = [threading.Thread(target=run) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        os.sched_setaffinity(0, allowed)
    assert [(ending.kind, ending.stdout) for ending in endings] == [("done", "7\n")] * 6


@pytest.mark.parametrize(
    "program", ["import time; time.sleep(60)", "while True: print(1, flush=True)"]
)
def test_a_program_that_does_not_wait_for_a_processor_is_late(program: str) -> None:
    ending = sandbox.run_program(program, "", None, sandbox.Limits(1, 256 << 20, 1 << 30))
    assert ending.kind == "timeout"


def test_a_program_whose_judge_has_ended_already_is_not_run(tmp_path: Path) -> None:
    """The kernel ends it with its judge only if that ends later."""
    source = tmp_path / "source"
    source.write_text(json.dumps({"program": "print('ran')", "call": None}))
    notes, written = os.pipe()
    with source.open() as opened:
        about = sandbox._build_options(opened.fileno(), written, str(tmp_path), LIMITS)
        about["parent"] = 1
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(sandbox.JAIL), json.dumps(about)],
            pass_fds=[opened.fileno(), written],
            capture_output=True,
        )
    os.close(written)
    with os.fdopen(notes, "rb") as read:
        assert (done.returncode, done.stdout, read.read()) == (jail.FAILED, b"", b"")


LIMITS = sandbox.Limits(2, 256 << 20, 1000)
NATIVE = """
import ctypes, importlib.util, json, mmap, os, sys
spec = importlib.util.spec_from_file_location("jail", sys.argv[1])
jail = importlib.util.module_from_spec(spec)
spec.loader.exec_module(jail)
libc = ctypes.CDLL(None, use_errno=True)
if int(sys.argv[2]):
    os.setgroups([])
    os.setresgid(*3 * [int(sys.argv[2])])
    os.setresuid(*3 * [int(sys.argv[2])])
stacks = mmap.mmap(-1, 4096 * 6000)
first = ctypes.addressof(ctypes.c_char.from_buffer(stacks))
jail.limit_tasks(os.getcwd())
print(jail._can_fork(), flush=True)
jail.libc.prctl(38, 1, 0, 0, 0)
jail.restrict_calls(1 << 28)
started = 0
# CLONE_VM, FS, FILES, SIGHAND, THREAD and SYSVSEM, on stacks that nobody has mapped as such.
while started < 5999 and libc.clone(libc.pause, ctypes.c_void_p(first + 4096 * (started + 1)), 0x50F00, None) > 0:
    started += 1
print(started, os.strerror(ctypes.get_errno()), flush=True)
os._exit(0)
"""


def run_native(home: str, user: int, program: str = NATIVE) -> list[str]:
    """Return what a program says that starts tasks by itself, as user `user`, past the interpreter."""
    # The parent becomes the user: its own interpreter need not be readable for that user.
    command = [sys.executable, "-I", "-S", "-c", program, str(sandbox.JAIL), str(user)]
    done = subprocess.run(command, cwd=home, env={}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(done.stdout.splitlines())


@pytest.mark.parametrize("user", [0, 54_321], ids=["root", "another user"])
def test_native_code_has_no_more_tasks_than_a_program(user: int, tmp_path: Path) -> None:
    """It started 5,000: their stacks need not be what the filter takes for one."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    if user and ctypes.CDLL(None).unshare(0) != 0:
        pytest.skip("no user namespaces here")
    with tempfile.TemporaryDirectory() as home:
        may_fork, outcome = run_native(home, user)
    assert may_fork == "True"
    assert outcome == f"{jail.TASKS - 1} {os.strerror(errno.EAGAIN)}"


def test_without_a_user_of_its_own_a_process_has_room_for_a_program_and_no_end_of_tasks(
    tmp_path: Path,
) -> None:
    """Where neither is allowed, as in a pod of the restricted profile, others of its user count, too."""
    if os.geteuid() != 0:
        pytest.skip("only root can be another user")
    program = NATIVE.replace(
        "jail.limit_tasks(", "jail._make_own_namespace = bool; jail.limit_tasks("
    )
    with tempfile.TemporaryDirectory() as home:
        may_fork, outcome = run_native(home, 54_322, program)
    assert may_fork == "True"
    assert jail.TASKS <= int(outcome.split()[0]) <= jail.TASKS + jail.OTHERS
