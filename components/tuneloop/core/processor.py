"""Check that this processor's AMX works as advertised, before the first matrix product on a CPU.

Some hypervisors advertise AMX while CPUID says that its tiles have no size (leaf 0x1D is empty).
oneDNN, which torch multiplies with, and vLLM then set up tiles of size 0, and the first bfloat16
product ends the process by an illegal instruction (SIGILL, exit code 132). Both must be kept from
using AMX: oneDNN by its variable ``ONEDNN_MAX_CPU_ISA``, vLLM and torch's compiler by the answers
of `torch.cpu`. To limit only one of them does not prevent the crash.

Call `check_processor` before computing on a CPU. Where AMX is advertised, a child process tries a
small product; if a signal ends it, both are limited, one line says so, and the manifest's
provenance records it under ``processor``. ``TUNELOOP_PROCESSOR_CHECK`` is ``auto``; ``good`` and
``bad`` are the result without a check.
"""

import contextlib
import ctypes
import functools
import os
import signal
import sys
from pathlib import Path
from typing import Literal, NoReturn

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
"""oneDNN's variable and its old name. It reads them once, at the first primitive: after torch is
imported is early enough."""
PATIENCE_S = 60
"""Seconds for the trial computation in a child process, which SIGALRM ends then."""
# Of x86-64: the number of the system call, and its arguments (asm/prctl.h, asm/fpu/types.h).
ARCH_PRCTL = 158
REQUEST_PERMISSION = 0x1023
TILE_DATA = 18

LIMITED: dict[str, str] = {}
"""For the provenance: what is limited in this process, and why; empty if nothing is.
`runs/summary.py` shows its ``why`` among the devices of a run."""


def check_processor() -> None:
    """Keep oneDNN and vLLM from using AMX if it does not work. Raises as `find_answer`."""
    answer, reason = find_answer()
    if answer == "bad" and not LIMITED:
        limit_libraries(reason)
        if int(os.environ.get("RANK", "0")) == 0:
            line = f"processor: AMX is not used ({reason}); oneDNN and vLLM are held to {LIMIT}"
            print(line, file=sys.stderr, flush=True)
    if answer == "good" and advertises_amx():
        request_tile_permission()


def limit_workers() -> None:
    """Limit a process of vLLM if a limited process of tuneloop started it.

    Any other one asks for the permission to use AMX. vLLM calls this in each of its processes, by
    the entry point ``tuneloop-processor`` of pyproject.toml in the group ``vllm.general_plugins``.
    """
    if os.environ.get(VARIABLE) == "bad":
        limit_libraries(f"{VARIABLE}=bad")
    elif advertises_amx():
        request_tile_permission()


def request_tile_permission() -> bool:
    """Ask Linux for the permission to use AMX's tiles in this process; return whether it is given.

    A process that uses them without it is ended by SIGILL (Linux,
    Documentation/arch/x86/xstate.rst). oneDNN asks at its first product with tiles. vLLM's
    attention relies on that, and a small model may compute attention before any such product.
    """
    library = ctypes.CDLL(None, use_errno=True)
    return library.syscall(ARCH_PRCTL, REQUEST_PERMISSION, TILE_DATA) == 0


def find_answer() -> tuple[Answer, str]:
    """Return whether AMX works or is not advertised, and the reason.

    Raises UserError if `VARIABLE` is not auto, good or bad.
    """
    setting = os.environ.get(VARIABLE, "auto")
    reason = f"{VARIABLE}={setting}"
    match setting:
        case "good":
            return "good", reason
        case "bad":
            return "bad", reason
        case "auto":
            return _find_here()
    raise UserError(VARIABLE, setting, "must be auto, good or bad")


@functools.cache
def _find_here() -> tuple[Answer, str]:
    """Try a product on this processor, once a process; the answer and its reason."""
    if not advertises_amx():
        return "good", "no AMX is advertised"
    number = try_product()
    if number:
        name = signal.Signals(number).name
        return "bad", f"it is advertised, but {name} ended a bfloat16 product"
    return "good", "a bfloat16 product succeeded"


def advertises_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the kernel lists AMX among the processor's flags."""
    with contextlib.suppress(OSError), cpuinfo.open() as lines:
        return any("amx_tile" in line.split() for line in lines if line.startswith("flags"))
    return False


def try_product() -> int:
    """Multiply in a forked child, with oneDNN unlimited.

    A fork takes milliseconds where torch is imported, and needs no thread.

    Returns:
        The number of the signal that ended the child, or 0.

    Raises RuntimeError if the product failed without a signal.
    """
    # Imported before the fork: this process needs it next, and the child has it at once.
    import torch  # noqa: F401

    child = os.fork()
    if child == 0:
        _multiply()
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code > 0:
        problem = "a bfloat16 product failed, and not by a signal"
        raise RuntimeError(f"{problem}; {VARIABLE}=good or bad answers without it")
    return -code


def _multiply() -> NoReturn:
    """Multiply in the child, and end it, without output and without a core file."""
    import resource

    import torch

    code = 1
    try:
        # The handlers of the parent are not for the child, whose end by a signal is the answer.
        for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGILL):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.alarm(PATIENCE_S)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        for name in ONEDNN:
            os.environ.pop(name, None)
        # A fork has none of the threads that torch may have started.
        torch.set_num_threads(1)
        ones = torch.ones(64, 64, dtype=torch.bfloat16)
        torch.nn.functional.linear(ones, ones)
        code = 0
    finally:
        os._exit(code)


def limit_libraries(reason: str) -> None:
    """Keep AMX from oneDNN, vLLM and torch's compiler, here and in what this process starts."""
    import torch

    lower_limits = [name for name in ONEDNN if os.environ.get(name, "").upper() in BELOW]
    name = lower_limits[0] if lower_limits else ONEDNN[0]
    if not lower_limits:
        os.environ[name] = LIMIT
    os.environ[VARIABLE] = "bad"
    # Private functions of torch by which vLLM and torch's compiler learn whether there is AMX.
    for question in ("_is_amx_tile_supported", "_is_amx_fp16_supported", "_init_amx"):
        setattr(torch.cpu, question, lambda: False)
    LIMITED.update({"amx": "not used", "why": reason, name: os.environ[name]})
