"""Suspend a process while another one uses its devices, by NVIDIA's ``cuda-checkpoint``.

It needs NVIDIA's driver 570 or newer. A suspended process keeps what it had on its devices in the
host's memory, and its calls of CUDA wait. A resumed process has all of it back at the same
addresses. Nothing is written to disk: only that would need CRIU.

The engine vLLM suspends its own process by it (``engine.snapshot``, `inference/engines/vllm.py`);
after a failure that process can serve no more (`SnapshotFailed`, which `inference/engine_loop.py`
looks for). The tests, `tests/unit/sharing/test_snapshot.py`, have a program in place of
``cuda-checkpoint``.
"""

import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from tuneloop.core.errors import Retryable, UserError

PROGRAM = "cuda-checkpoint"
VERSION = Path("/proc/driver/nvidia/version")
"""The file by which NVIDIA's driver states its version."""
_DRIVER = 570
_DRIVER_OF_SHARED_MEMORY = 610
"""The oldest versions of NVIDIA's driver that suspend one process, and several that share memory of a
device."""
_LOCK_TIMEOUT_MS = "10000"
"""Milliseconds, as the program takes them, for what the process still does on its devices."""


class SnapshotFailed(Retryable):
    """A process was not suspended, or not resumed.

    It has to end: the driver leaves it in any state.
    """


def check_snapshots(field: str, several: bool) -> None:
    """Check that this node can suspend a process, or `several` that share memory (IPC).

    Raises:
        UserError: it cannot; the error names the setting `field`.
    """
    driver = None
    if VERSION.exists():
        driver = re.search(r"\b(\d{3})\.\d", VERSION.read_text())
    required = _DRIVER_OF_SHARED_MEMORY if several else _DRIVER
    remedy = ""
    if driver is None:
        remedy = f"needs NVIDIA's driver, there is no {VERSION}: take another node, or unset it"
    elif int(driver[1]) < required:
        remedy = (
            f"needs NVIDIA's driver {required}, not {driver[1]}: take another node, or unset it"
        )
    elif shutil.which(PROGRAM) is None:
        remedy = f"needs NVIDIA's {PROGRAM} on PATH: add it to the image, or unset it"
    if remedy:
        raise UserError(field, True, remedy)


def suspend_process(pid: int) -> list[int]:
    """Free the devices of a process and its descendants, and list the processes that had any.

    Raises:
        SnapshotFailed: none of them had any, or one was not suspended.
    """
    states = {process: _run_program(process, "--get-state") for process in _list_tree(pid)}
    # For a process without CUDA the program prints an error in place of a state.
    running = [process for process, state in states.items() if state == "running"]
    if not running:
        raise SnapshotFailed(f"{PROGRAM}: process {pid} has nothing to suspend: {states[pid]}")
    _change_state(
        running,
        "checkpointed",
        ("lock", "--timeout", _LOCK_TIMEOUT_MS),
        ("checkpoint",),
    )
    return running


def _list_tree(pid: int) -> list[int]:
    """Return a process and all its descendants, parents first."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        # A process may end between the listing and this.
        with suppress(OSError):
            # The name of the program, in parentheses, may have any characters.
            fields = file.read_text().rpartition(")")[2].split()
            parents[int(file.parent.name)] = int(fields[1])
    tree = [pid]
    # The list grows while the loop walks it.
    for process in tree:
        tree += [child for child, parent in parents.items() if parent == process]
    return tree


def resume_processes(pids: list[int]) -> None:
    """Undo `suspend_process`, which listed `pids`.

    Raises:
        SnapshotFailed: one was not resumed, for example as others have the device's memory.
    """
    _change_state(pids, "running", ("restore",), ("unlock",))


def _change_state(pids: list[int], state: str, *actions: tuple[str, ...]) -> None:
    """Do one action after the other, each with all of `pids`, which then have to be in `state`."""
    outputs: list[str] = []
    for action in actions:
        # All are locked before the first is saved, as they may share memory.
        for pid in pids:
            outputs.append(_run_program(pid, "--action", *action))
    if any(_run_program(pid, "--get-state") != state for pid in pids):
        processes = ", ".join(map(str, pids))
        reasons = "; ".join(filter(None, outputs))
        raise SnapshotFailed(f"{PROGRAM}: {processes} not {state}: {reasons}")


def _run_program(pid: int, *arguments: str) -> str:
    """Return all that the program prints about a process, in one line."""
    command = [PROGRAM]
    command += arguments
    command += ["--pid", str(pid)]
    try:
        completed = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=600,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SnapshotFailed(f"{PROGRAM}: {error}") from error
    output = completed.stdout + completed.stderr
    return " ".join(output.split())
