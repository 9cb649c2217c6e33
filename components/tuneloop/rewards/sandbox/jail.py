"""Shut this process in, then run a program that nobody trusts: the child's side of the sandbox, standard library only.

    python -I -S -B jail.py '{"source": 3, "notes": 4, "seconds": 2, "memory": 268435456, "readable": [...]}'

Needs no privilege and no namespace, so it works in a pod of the restricted profile, which forbids both:

- resource limits: processor time, address space, no file written, no core;
- Landlock: what is not below `readable` cannot be opened, and nothing can be written, made or removed;
- seccomp: system calls outside of `ALLOWED` kill the process with SIGSYS (network, processes, signals to others,
  tracing, mounts); those that only newer kernels know do not exist; neither can be taken back.

An audit hook says which door was tried (kernels do not), and turns an attempt to read elsewhere, which Landlock alone
would answer with an error that a program can hide, into the same death. It protects nothing: the kernel does.
"""

import ctypes
import json
import os
import resource
import struct
import sys
from typing import Any

ESCAPE_CALL = 101  # ptrace: not in ALLOWED
MEMORY, FAILED = 3, 1
IOCTL, CLONE, KILL, FCNTL, TGKILL, PRLIMIT, SECCOMP = 16, 56, 62, 72, 234, 302, 317
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
CLONE_THREAD = 0x10000
NEWER = 424
"""System calls from here on have one number on all architectures; C libraries do without them."""
QUIET = (53, 141, 144, 160, 203)  # socketpair, setpriority, sched_setscheduler, setrlimit, sched_setaffinity: EPERM
ALLOWED = (
    *(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 17, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28),
    # read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask
    # rt_sigreturn pread64 readv writev access pipe select sched_yield mremap msync mincore madvise
    *(32, 33, 34, 35, 36, 37, 38, 39, 60, 63, 78, 79, 80, 89, 95, 96, 97, 98, 99, 100, 102, 104, 107, 108),
    # dup dup2 pause nanosleep getitimer alarm setitimer getpid exit uname getdents getcwd chdir readlink umask
    # gettimeofday getrlimit getrusage sysinfo times getuid getgid geteuid getegid
    *(110, 111, 115, 131, 137, 138, 157, 158, 186, 201, 202, 204, 217, 218, 219, 221, 228, 229, 230, 231),
    # getppid getpgrp getgroups sigaltstack statfs fstatfs prctl arch_prctl gettid time futex sched_getaffinity
    # getdents64 set_tid_address restart_syscall fadvise64 clock_gettime clock_getres clock_nanosleep exit_group
    *(232, 233, 257, 262, 267, 269, 270, 271, 273, 274, 281, 290, 291, 292, 293, 309, 318, 324, 332, 334),
    # epoll_wait epoll_ctl openat newfstatat readlinkat faccessat pselect6 ppoll set_robust_list get_robust_list
    # epoll_pwait eventfd2 epoll_create1 dup3 pipe2 getcpu getrandom membarrier statx rseq
)
"""By their numbers on x86_64. Nothing here reaches beyond the process, but through what Landlock guards."""
WATCHED = ("socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.system", "os.kill", "os.putenv")

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long


def limit_resources(seconds: int, memory: int) -> None:
    """Limit resources: `seconds` of processor time, `memory` in bytes of address space."""
    for what, most in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, 64),
    ):
        resource.setrlimit(what, (most, most))


def restrict_paths(readable: list[str]) -> None:
    """Allow reading below `readable` and nothing else of the file system (linux/landlock.h).

    Raises:
        OSError: the kernel has none, or refuses.
    """
    abi = _call(CREATE_RULESET, None, 0, 1)
    rights = (1 << (13, 14, 15, 15, 16)[min(abi, 5) - 1]) - 1  # what this kernel can forbid
    attributes = struct.pack("Q", rights)
    rules = _call(CREATE_RULESET, attributes, len(attributes), 0)
    for path in readable:
        place = os.open(path, os.O_PATH)
        reading = 4 | 8 if os.path.isdir(path) else 4  # READ_FILE, READ_DIR
        _call(ADD_RULE, rules, 1, struct.pack("=Qi", reading, place), 0)
        os.close(place)
    _call(RESTRICT_SELF, rules, 0)
    os.close(rules)


def restrict_calls() -> None:
    """Install the filter (linux/seccomp.h, linux/filter.h): `ALLOWED`, and some calls by what they ask for."""
    kill, deny, absent, allow = 0x80000000, 0x00050001, 0x00050026, 0x7FFF0000
    load, equal, greater, some, give = 0x20, 0x15, 0x35, 0x45, 0x06
    # offsets in struct seccomp_data; low halves of arguments
    number, architecture, first, second, third = 0, 4, 16, 24, 32
    program = [(load, 0, 0, architecture), (equal, 1, 0, 0xC000003E), (give, 0, 0, kill), (load, 0, 0, number)]
    program += [(greater, 0, 1, NEWER), (give, 0, 0, absent)]  # the calls of x32 among them
    for call in ALLOWED:
        program += [(equal, 0, 1, call), (give, 0, 0, allow)]
    for call in QUIET:
        program += [(equal, 0, 1, call), (give, 0, 0, deny)]
    program += [(equal, 0, 4, CLONE), (load, 0, 0, first), (some, 0, 1, CLONE_THREAD), (give, 0, 0, allow)]
    program += [(give, 0, 0, kill)]
    for call, place, values in (
        (KILL, first, [os.getpid()]),
        (TGKILL, first, [os.getpid()]),
        (FCNTL, second, [0, 1, 2, 3, 4, 1030]),  # F_SETOWN and F_SETSIG would send any signal to anybody
        (IOCTL, second, [0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451]),  # asks for a terminal, and on descriptors
    ):
        known = [step for value in values for step in ((equal, 0, 1, value), (give, 0, 0, allow))]
        program += [(equal, 0, len(known) + 2, call), (load, 0, 0, place), *known, (give, 0, 0, kill)]
    program += [(equal, 0, 6, PRLIMIT), (load, 0, 0, third), (equal, 0, 3, 0), (load, 0, 0, third + 4)]
    program += [(equal, 0, 1, 0), (give, 0, 0, allow), (give, 0, 0, deny)]  # to ask is allowed, to set is not
    program += [(give, 0, 0, kill)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    _call(SECCOMP, 1, 1, struct.pack("HxxxxxxP", len(program), ctypes.addressof(code)))  # for all threads: there is one


def watch_audit(notes: int, readable: list[str]) -> None:
    """Write what the program tries at the doors, and end it where it opens what is not its own."""
    die, realpath, write, descriptor = libc.syscall, os.path.realpath, os.write, int

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            path = arguments[0]
            if path is None or isinstance(path, descriptor):
                return
            real = realpath(os.fsdecode(path))  # type: ignore[arg-type]
            if not any(real == root or real.startswith(root + "/") for root in readable):
                write(notes, f"\nescape {event} {real}"[:300].encode(errors="replace"))
                die(ESCAPE_CALL)
        elif event.startswith("ctypes."):  # past the interpreter nothing would tell which file is opened
            write(notes, f"\nescape {event}".encode())
            die(ESCAPE_CALL)
        elif event.startswith(WATCHED):
            write(notes, f"\nescape {event} {arguments}"[:300].encode(errors="replace"))

    sys.addaudithook(hook)


def _call(number: int, *arguments: object) -> int:
    given = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *given))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"system call {number}: {os.strerror(code)}")
    return result


def shut_in(options: dict[str, Any]) -> None:
    """Restrict this process in every way; what fails is written to the notes, and the program is not run."""
    notes, readable = options["notes"], options["readable"]
    try:
        libc.prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG: dies with who judges it
        libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
        limit_resources(options["seconds"], options["memory"])
        restrict_paths(readable)
        restrict_calls()
        watch_audit(notes, readable)  # last: what comes before uses ctypes, which the program may not
    except (OSError, ValueError, MemoryError) as error:
        os.write(notes, f"refused: {error!r}".encode())
        os._exit(FAILED)
    os.write(notes, b"ready\n")  # a line of its own, before the program: nothing that follows can take it back


def execute_program(program: str, call: str | None, notes: int) -> int:
    """Run the program, then the call, whose value goes to the notes; the exit code."""
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
        os.write(notes, b"\nraised " + " ".join(f"{type(error).__name__}: {error}".split())[:300].encode())
        return FAILED
    return 0


if __name__ == "__main__":
    about = json.loads(sys.argv[1])
    with os.fdopen(about["source"]) as given:
        source = json.load(given)
    shut_in(about)
    os._exit(execute_program(source["program"], source["call"], about["notes"]))
