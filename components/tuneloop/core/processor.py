"""Check that this processor's AMX works as advertised, before the first matrix product on a CPU.

Some hypervisors advertise AMX while CPUID says that its tiles have no size (leaf 0x1D is empty). oneDNN, which torch
multiplies with, and vLLM then set up tiles of size 0, and the first bfloat16 product ends the process by an illegal
instruction (SIGILL, exit code 132). Both must be kept from using AMX: oneDNN by its variable ``ONEDNN_MAX_CPU_ISA``,
vLLM and torch's compiler by the answers of `torch.cpu`. To limit only one of them does not prevent the crash.

Call `check_processor` before computing on a CPU. Where AMX is advertised, a child process tries a small product; if a
signal ends it, both are limited, one line says so, and the manifest's provenance records it under ``processor``.
``TUNELOOP_PROCESSOR_CHECK`` is ``auto``, or answers in its place: ``good`` or ``bad``."""

import contextlib
import ctypes
import functools
import os
import signal
import sys
from pathlib import Path
from typing import Literal

from tuneloop.core.errors import UserError

Answer = Literal["good", "bad"]

VARIABLE = "TUNELOOP_PROCESSOR_CHECK"
LIMIT = "AVX512_CORE_FP16"
"""The highest instruction set that oneDNN may use without AMX."""
BELOW = (
    "SSE41",
    "AVX",
    "AVX2",
    "AVX2_VNNI",
    "AVX2_VNNI_2",
    "AVX512_CORE",
    "AVX512_CORE_VNNI",
    "AVX512_CORE_BF16",
)
"""Values that limit oneDNN even more, and are kept if the user has set one."""
ONEDNN = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
"""oneDNN's variable and its old name; read once, at the first primitive: after torch is imported is early enough."""
PATIENCE_S = 60
# Of x86-64: the number of the system call, and its arguments (asm/prctl.h, asm/fpu/types.h).
ARCH_PRCTL = 158
REQUEST_PERMISSION = 0x1023
TILE_DATA = 18

LIMITED: dict[str, str] = {}
"""For the provenance: what is limited in this process, and why; empty if nothing is."""


def check_processor() -> None:
    """Keep oneDNN and vLLM from using AMX if it does not work. Raises as `find_answer`."""
    answer, why = find_answer()
    if answer == "bad" and not LIMITED:
        limit_libraries(why)
        if int(os.environ.get("RANK", "0")) == 0:
            line = f"processor: AMX is not used ({why}); oneDNN and vLLM are held to {LIMIT}"
            print(line, file=sys.stderr, flush=True)
    if answer == "good" and advertises_amx():
        request_tile_permission()


def limit_workers() -> None:
    """Limit a process of vLLM if a limited process of tuneloop started it; in any other one ask for
    the permission to use AMX. vLLM calls this in each of its processes (entry point in
    ``vllm.general_plugins``)."""
    if os.environ.get(VARIABLE) == "bad":
        limit_libraries(f"{VARIABLE}=bad")
    elif advertises_amx():
        request_tile_permission()


def request_tile_permission() -> bool:
    """Ask Linux for the permission to use AMX's tiles in this process; return whether it is given.

    A process that uses them without it is ended by SIGILL (Linux, Documentation/arch/x86/xstate.rst).
    oneDNN asks at its first product with tiles. vLLM's attention relies on that, and a small model
    may compute attention before any such product.
    """
    library = ctypes.CDLL(None, use_errno=True)
    return library.syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


def find_answer() -> tuple[Answer, str]:
    """Return whether AMX works or is not advertised, and why. Raises UserError: `VARIABLE` is not auto, good or bad."""
    told = os.environ.get(VARIABLE, "auto")
    answers: dict[str, Answer] = {"good": "good", "bad": "bad"}
    if told in answers:
        return answers[told], f"{VARIABLE}={told}"
    if told != "auto":
        raise UserError(VARIABLE, told, "must be auto, good or bad")
    return _find_here()


@functools.cache
def _find_here() -> tuple[Answer, str]:
    if not advertises_amx():
        return "good", "no AMX is advertised"
    if number := try_product():
        return (
            "bad",
            f"it is advertised, but {signal.Signals(number).name} ended a bfloat16 product",
        )
    return "good", "a bfloat16 product succeeded"


def advertises_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Say whether the kernel lists AMX among the processor's flags."""
    with contextlib.suppress(OSError), cpuinfo.open() as lines:
        return any("amx_tile" in line.split() for line in lines if line.startswith("flags"))
    return False


def try_product() -> int:
    """Multiply in a forked child, with oneDNN unlimited; return the number of the signal that ended it, or 0. A fork
    takes milliseconds where torch is imported, and needs no thread. Raises RuntimeError: it failed without a signal."""
    import torch  # noqa: F401 - here, where it stays

    if (child := os.fork()) == 0:
        _multiply()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code > 0:
        raise RuntimeError(
            f"a bfloat16 product failed, and not by a signal; {VARIABLE}=good or bad answers without it"
        )
    return -code


def _multiply() -> None:
    """Multiply in the child, and end it, without output and without a core file."""
    import resource

    import torch

    code = 1
    try:
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGILL):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.alarm(PATIENCE_S)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for name in ONEDNN:
            os.environ.pop(name, None)
        torch.set_num_threads(1)
        ones = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.nn.functional.linear(ones, ones)
        code = 0
    finally:
        os._exit(code)


def limit_libraries(why: str) -> None:
    """Keep AMX from oneDNN, vLLM and torch's compiler, here and in what this process starts."""
    import torch

    name = next((name for name in ONEDNN if os.environ.get(name, "").upper() in BELOW), None)
    if name is None:
        name = ONEDNN[0]
        os.environ[name] = LIMIT
    os.environ[VARIABLE] = "bad"
    for question in ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_init_amx"):
        setattr(torch.cpu, question, lambda: False)
    LIMITED.update({"amx": "not used", "why": why, name: os.environ[name]})
