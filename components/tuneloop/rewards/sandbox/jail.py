"""Confine this process, then run an untrusted program: the child's side of the sandbox.

It needs the standard library only, and is run by its path::

    python -I -S -B jail.py '{"source": 3, "notes": 4, "seconds": 2, "memory": 268435456,
                              "readable": ["/usr/lib"], "home": "/tmp/x", "parent": 17}'

It needs no privilege and no namespace, so it works in a pod of the restricted profile, which forbids
both:

- resource limits: processor time, address space, no file written, no core, and `TASKS` tasks. The
  kernel counts these by user, so the process takes a user id, or a user namespace, of its own where
  it may;
- Landlock: what is not below `readable` cannot be opened, and nothing can be written, made or
  removed;
- seccomp: all but harmless system calls kill the process with SIGSYS (network, processes, signals
  to others, tracing, mounts); those that only newer kernels know do not exist; neither can be taken
  back.

An audit hook reports which forbidden call was tried (kernels do not), and also ends a program that
tries to read elsewhere: Landlock alone returns an error, which a program can hide. The hook protects
nothing; the kernel does.

`rewards/sandbox/__init__.py` starts it: `_build_options` there has the options, and `_judge` reads
the notes and the exit code. `tests/unit/rewards/test_jail.py` compares the filter with the recorded
one in ``seccomp_x86_64.txt`` and ``seccomp_aarch64.txt``, so every change of `build_filter` or
``calls.json`` shows there; ``system_calls.json`` beside them has all calls by name.
"""

import _thread
import ctypes
import json
import os
import resource
import struct
import sys
from collections.abc import Iterable
from typing import Any

# Exit codes. A program that ran out of memory has its own
# (`rewards/sandbox/__init__.py: KINDS_BY_CODE`); others fail as Python's do.
MEMORY = 3
FAILED = 1
# System calls of Landlock, on all architectures.
CREATE_RULESET = 444
ADD_RULE = 445
RESTRICT_SELF = 446
# Rights of linux/landlock.h.
READ_FILE = 4
READ_DIR = 8
RIGHTS_BY_VERSION = (13, 14, 15, 15, 16)
"""How many rights Landlock can forbid in its version 1, 2, 3, …; the last number holds for later
versions, too."""
CLONE_THREAD = 0x10000
CLONE_NEWUSER = 0x10000000
MAP_STACK = 0x20000
# Options of prctl(2).
PR_SET_PDEATHSIG = 1
PR_SET_KEEPCAPS = 8
PR_SET_NO_NEW_PRIVS = 38
CAP_DAC_OVERRIDE = 1
CAP_DAC_READ_SEARCH = 2
CAPABILITY_HEADER = struct.pack("=Ii", 0x20080522, 0)
"""Version 3 of struct __user_cap_header_struct (linux/capability.h), for this process."""
TASKS = 64
"""The maximum number of threads, as each stack takes a part of the memory."""
LEAST_STACK = 4 << 20
"""The minimum bytes of a thread's stack."""
OTHERS = 1024
"""How many tasks a user may have more than it has now, where the process cannot have a limit of its
own (`limit_tasks`)."""
FIRST_USER = 1 << 30
"""User ids from here on, up to twice as many, belong to nobody."""
NEWER = 424
"""System calls from here on have one number on all architectures, and return ENOSYS: C libraries do
without them. The check comes first, so that an entry of `calls.json` from here on has no effect."""
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""Machine → AUDIT_ARCH of linux/audit.h. `check_kernel` of the parent refuses all others.

`calls.json` has the numbers of system calls in this order. Nothing ``allowed`` reaches beyond the
process, but through Landlock. ``quiet`` calls return EPERM, and do not end the program. Those
``asked`` have rules of their own, most by their arguments; ptrace and seccomp are there only for
their numbers.
"""
WATCHED = (
    "socket.",
    "subprocess.",
    "os.fork",
    "os.exec",
    "os.posix_spawn",
    "os.system",
    "os.kill",
    "os.putenv",
)
"""The beginnings of audit events that the hook writes to the notes. If the kernel then ends the
process, the last of them is the `door` of its `Ending`, for people to read."""

MACHINE = os.uname().machine
with open(os.path.join(os.path.dirname(__file__), "calls.json")) as _file:
    CALLS = json.load(_file)
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def limit_resources(seconds: int, memory: int) -> None:
    """Limit resources: `seconds` of processor time, `memory` in bytes of address space."""
    limits = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_NOFILE: 64,
    }
    for kind, limit in limits.items():
        resource.setrlimit(kind, (limit, limit))


def limit_tasks(home: str) -> None:
    """Limit the tasks of this process and of all that its user has to `TASKS`, itself among them.

    The kernel counts tasks by user and user namespace, and does not count those of its root. So the
    process becomes a user of its own where it is root, which gets the directory `home`; else it
    makes a user namespace. Where neither is allowed, its user may have `OTHERS` tasks more than it
    has on this node, so that no right program lacks a thread.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    # No kernel has more tasks than PID_MAX_LIMIT.
    highest = 1 << 22 if hard == resource.RLIM_INFINITY else hard
    limit = min(TASKS, highest)
    has_own_count = _become_own_user(home) or _make_own_namespace()
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, hard))
    if not has_own_count or not _can_fork():
        # The user has other tasks, on this node perhaps: find about how many.
        while limit < highest and not _can_fork():
            limit = min(2 * limit, highest)
            resource.setrlimit(resource.RLIMIT_NPROC, (limit, hard))
        limit = min(limit + OTHERS, highest)
    resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))


def _can_fork() -> bool:
    """Return whether this process may have one more task."""
    try:
        child = os.fork()
    except BlockingIOError:
        return False
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    return True


def _become_own_user(home: str) -> bool:
    """Become a user that has no other process, if this one is root.

    Of root's capabilities it keeps one to read files of others, as the interpreter's own may lie
    below ``/root``. Landlock decides which of them.
    """
    if os.geteuid() != 0:
        return False
    user = FIRST_USER + int.from_bytes(os.urandom(4), "little") % FIRST_USER
    try:
        os.chown(home, user, user)
        os.setgroups([])
        os.setresgid(user, user, user)
        libc.prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0)
        os.setresuid(user, user, user)
    except OSError:
        return False
    permitted = _read_capabilities()
    # The narrower of the two, which a container may not have.
    readers = [1 << CAP_DAC_READ_SEARCH, 1 << CAP_DAC_OVERRIDE]
    _set_capabilities(next((bit for bit in readers if permitted & bit), 0))
    return True


def _make_own_namespace() -> bool:
    """Make a user namespace, and drop the capabilities that this process has there."""
    if os.geteuid() == 0 or libc.unshare(CLONE_NEWUSER) != 0:
        return False
    _set_capabilities(0)
    return True


def _read_capabilities() -> int:
    """Read the permitted capabilities of this process, those below 32, as bits."""
    sets = ctypes.create_string_buffer(24)
    libc.capget(CAPABILITY_HEADER, sets)
    return int(struct.unpack("=6I", sets.raw)[1])


def _set_capabilities(bits: int) -> None:
    """Set the effective and permitted capabilities of this process, and no others.

    Raises:
        OSError: it may not.
    """
    if libc.capset(CAPABILITY_HEADER, struct.pack("=6I", bits, bits, 0, 0, 0, 0)) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"capabilities cannot be dropped: {os.strerror(code)}")


def restrict_paths(readable: list[str]) -> None:
    """Allow reading below `readable` alone (linux/landlock.h).

    Raises:
        OSError: there is no Landlock, or the kernel refuses.
    """
    version = _call(CREATE_RULESET, None, 0, 1)
    # A kernel refuses rights that it does not know.
    rights = (1 << RIGHTS_BY_VERSION[min(version, len(RIGHTS_BY_VERSION)) - 1]) - 1
    attributes = struct.pack("Q", rights)
    rules = _call(CREATE_RULESET, attributes, len(attributes), 0)
    for path in readable:
        descriptor = os.open(path, os.O_PATH)
        reading = READ_FILE | READ_DIR if os.path.isdir(path) else READ_FILE
        _call(ADD_RULE, rules, 1, struct.pack("=Qi", reading, descriptor), 0)
        os.close(descriptor)
    _call(RESTRICT_SELF, rules, 0)
    os.close(rules)


def list_calls(kind: str, machine: str) -> dict[str, int]:
    """List the system calls of a kind by their numbers on `machine`."""
    column = list(ARCHITECTURES).index(machine)
    return {
        name: numbers[column]
        for name, numbers in CALLS[kind].items()
        # Each architecture lacks some calls of the other.
        if numbers[column] is not None
    }


# Actions of a filter (linux/seccomp.h). SECCOMP_RET_ERRNO has the error in its low half.
KILL_PROCESS = 0x80000000
ALLOW = 0x7FFF0000
NOT_PERMITTED = 0x00050001
NO_SUCH_CALL = 0x00050026
NO_MEMORY = 0x0005000C
# Operations of classic BPF (linux/bpf_common.h): load a word, compare it with a constant, return.
LOAD = 0x20
EQUAL = 0x15
AT_LEAST = 0x35
HAS_BITS = 0x45
RETURN = 0x06
# Offsets in struct seccomp_data: the call's number, the architecture, the low halves of arguments.
CALL = 0
ARCHITECTURE = 4
FIRST = 16
SECOND = 24
THIRD = 32
FOURTH = 40
HIGH_HALF = 4
"""From the low half of an argument to its high half."""
# F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL and F_DUPFD_CLOEXEC (fcntl.h). Of the others F_SETOWN
# and F_SETSIG would send any signal to anybody.
HARMLESS_FCNTL = (0, 1, 2, 3, 4, 1030)
# TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX and FIOCLEX (asm/ioctls.h): whether a descriptor
# is a terminal, and requests that change no more than the descriptor.
HARMLESS_IOCTL = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)


class Filter:
    """Assembles a seccomp filter.

    Jumps name labels, which may be marked later; a jump without one goes on at the next step. A jump
    reaches forward by at most 255 steps.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[int, str, str, int]] = []
        self.labels: dict[str, int] = {}

    def load(self, offset: int) -> None:
        """Load the word at an offset of struct seccomp_data."""
        self.steps.append((LOAD, "", "", offset))

    def jump(self, operation: int, value: int, to: str = "", otherwise: str = "") -> None:
        """Compare the loaded word with `value`, and jump."""
        self.steps.append((operation, to, otherwise, value))

    def end(self, action: int) -> None:
        """End the filter with an action."""
        self.steps.append((RETURN, "", "", action))

    def mark(self, label: str) -> None:
        """Let jumps to `label` lead to the next step."""
        self.labels[label] = len(self.steps)

    def end_if(self, operation: int, value: int, action: int) -> None:
        """End the filter with an action if the comparison holds."""
        after = f"after {len(self.steps)}"
        self.jump(operation, value, otherwise=after)
        self.end(action)
        self.mark(after)

    def assemble(self) -> list[tuple[int, int, int, int]]:
        """Return the steps as (operation, steps to skip if it holds, if it does not, value)."""
        return [
            (operation, self._distance(at, to), self._distance(at, otherwise), value)
            for at, (operation, to, otherwise, value) in enumerate(self.steps)
        ]

    def _distance(self, at: int, label: str) -> int:
        return self.labels[label] - at - 1 if label else 0


def build_filter(machine: str, pid: int, stack: int) -> list[tuple[int, int, int, int]]:
    """Build the filter (linux/seccomp.h, linux/filter.h).

    Args:
        machine: one of `ARCHITECTURES`.
        pid: the only process that may get signals.
        stack: the fewest bytes of a thread's stack; glibc marks what it maps for one. Smaller stacks
            would let a program have thousands of threads.

    Returns:
        The steps: operation, steps to skip if it holds, if it does not, value.
    """
    by_arguments = list_calls("asked", machine)
    program = Filter()
    program.load(ARCHITECTURE)
    program.jump(EQUAL, ARCHITECTURES[machine], to="right architecture")
    program.end(KILL_PROCESS)
    program.mark("right architecture")
    program.load(CALL)
    # The calls of x32 are among them.
    program.end_if(AT_LEAST, NEWER, NO_SUCH_CALL)
    for call in list_calls("allowed", machine).values():
        program.end_if(EQUAL, call, ALLOW)
    for call in list_calls("quiet", machine).values():
        program.end_if(EQUAL, call, NOT_PERMITTED)

    program.jump(EQUAL, by_arguments["mmap"], otherwise="not mmap")
    program.load(FOURTH)
    program.jump(HAS_BITS, MAP_STACK, otherwise="mmap is allowed")
    # A length of 4 GiB or more is above every minimum.
    program.load(SECOND + HIGH_HALF)
    program.jump(EQUAL, 0, otherwise="mmap is allowed")
    program.load(SECOND)
    program.jump(AT_LEAST, stack, otherwise="stack is too small")
    program.mark("mmap is allowed")
    program.end(ALLOW)
    program.mark("stack is too small")
    program.end(NO_MEMORY)
    program.mark("not mmap")

    program.jump(EQUAL, by_arguments["clone"], otherwise="not clone")
    program.load(FIRST)
    program.end_if(HAS_BITS, CLONE_THREAD, ALLOW)
    program.end(KILL_PROCESS)
    program.mark("not clone")

    allow_values(program, by_arguments["kill"], FIRST, [pid])
    allow_values(program, by_arguments["tgkill"], FIRST, [pid])
    allow_values(program, by_arguments["fcntl"], SECOND, HARMLESS_FCNTL)
    allow_values(program, by_arguments["ioctl"], SECOND, HARMLESS_IOCTL)

    # To ask for a limit is allowed, to set one is not.
    program.jump(EQUAL, by_arguments["prlimit64"], otherwise="not prlimit64")
    program.load(THIRD)
    program.jump(EQUAL, 0, otherwise="limit is set")
    program.load(THIRD + HIGH_HALF)
    program.jump(EQUAL, 0, otherwise="limit is set")
    program.end(ALLOW)
    program.mark("limit is set")
    program.end(NOT_PERMITTED)
    program.mark("not prlimit64")
    program.end(KILL_PROCESS)
    return program.assemble()


def allow_values(program: Filter, call: int, argument: int, values: Iterable[int]) -> None:
    """Allow a call with one of some values of an argument, and kill the process at any other."""
    program.jump(EQUAL, call, otherwise=f"not call {call}")
    program.load(argument)
    for value in values:
        program.end_if(EQUAL, value, ALLOW)
    program.end(KILL_PROCESS)
    program.mark(f"not call {call}")


def restrict_calls(memory: int) -> None:
    """Install the filter, and give threads stacks of which `memory` bytes hold `TASKS`."""
    # In whole pages.
    stack = max(memory // TASKS & -4096, LEAST_STACK)
    _thread.stack_size(stack)
    steps = build_filter(MACHINE, os.getpid(), stack)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    # struct sock_fprog. Mode 1 is SECCOMP_SET_MODE_FILTER; flag 1 is for all threads: there is one.
    program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
    _call(list_calls("asked", MACHINE)["seccomp"], 1, 1, program)


def watch_audit(notes: int, readable: list[str]) -> None:
    """Record the forbidden calls that the program tries.

    A program that opens a file which is not below `readable` is ended.
    """
    # The program may replace the names in modules, but not those of a closure.
    number = int
    syscall = libc.syscall
    realpath = os.path.realpath
    write = os.write
    # A call that the filter does not allow.
    ptrace = list_calls("asked", MACHINE)["ptrace"]

    def report(attempt: str) -> None:
        write(notes, f"\nescape {attempt}"[:300].encode(errors="replace"))

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            path = arguments[0]
            # None is the directory of the program, and a number was opened before.
            if path is None or isinstance(path, number):
                return
            real = realpath(os.fsdecode(path))  # type: ignore[arg-type]
            if not any(real == root or real.startswith(root + "/") for root in readable):
                report(f"{event} {real}")
                syscall(ptrace)
        elif event.startswith("ctypes."):
            # Past the interpreter nothing would tell which file is opened.
            report(event)
            syscall(ptrace)
        elif event.startswith(WATCHED):
            report(f"{event} {arguments}")

    sys.addaudithook(hook)


def _call(number: int, *arguments: object) -> int:
    """Make a system call. Raises OSError: it failed."""
    words = [ctypes.c_long(value) if isinstance(value, int) else value for value in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *words))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result


def confine_process(options: dict[str, Any]) -> None:
    """Restrict this process in every way.

    The order counts: the limits of tasks need calls that the filter forbids, and the audit hook
    forbids ctypes, which all else uses. A failure is written to the notes, and ends the process
    before the program is run.
    """
    notes = options["notes"]
    readable = options["readable"]
    try:
        limit_tasks(options["home"])
        # The process dies with its judge, which may have ended by now. A change of the user undoes
        # this, so it comes after.
        libc.prctl(PR_SET_PDEATHSIG, 9, 0, 0, 0)
        if os.getppid() != options["parent"]:
            os._exit(FAILED)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        limit_resources(options["seconds"], options["memory"])
        restrict_paths(readable)
        restrict_calls(options["memory"])
        # Last: what comes before uses ctypes, which the program may not.
        watch_audit(notes, readable)
    except (OSError, ValueError, MemoryError) as error:
        os.write(notes, f"refused: {error!r}".encode())
        os._exit(FAILED)
    # This is a line of its own before the program, so nothing that follows can take it back.
    os.write(notes, b"ready\n")


def execute_program(program: str, call: str | None, notes: int) -> int:
    """Run the program, then the call, whose value goes to the notes; return the exit code."""
    try:
        space = {"__name__": "__main__"}
        exec(compile(program, "<program>", "exec"), space)
        if call is not None:
            os.write(notes, b"\nresult " + repr(eval(call, space)).encode())
        sys.stdout.flush()
    except MemoryError:
        return MEMORY
    except SystemExit as error:
        sys.stdout.flush()
        return FAILED if error.code else 0
    except BaseException as error:
        sys.stdout.flush()
        # On one line, as lines separate notes.
        message = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        os.write(notes, f"\nraised {message}".encode())
        return FAILED
    return 0


if __name__ == "__main__":
    options = json.loads(sys.argv[1])
    with os.fdopen(options["source"]) as file:
        task = json.load(file)
    confine_process(options)
    os._exit(execute_program(task["program"], task["call"], options["notes"]))
