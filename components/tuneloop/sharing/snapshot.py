"""A process that stays while its devices are another's: ``cuda-checkpoint``, with NVIDIA's driver 570 or newer.

Suspended, a process keeps what it had on its devices in the host's memory, and its calls of CUDA wait; resumed, it has
all of it back at the same addresses. Nothing is written to disk: for that alone it would take CRIU."""

import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from tuneloop.core.errors import Retryable, UserError

PROGRAM, VERSION = "cuda-checkpoint", Path("/proc/driver/nvidia/version")


class SnapshotFailed(Retryable):
    """A process was not suspended, or not resumed. It has to end: the driver leaves it in any state."""


def check_snapshots(field: str, several: bool) -> None:
    """Raise UserError with `field` where this node suspends no process, or not `several` that share memory (IPC)."""
    driver = re.search(r"\b(\d{3})\.\d", VERSION.read_text()) if VERSION.exists() else None
    if driver is None:
        raise UserError(
            field,
            True,
            f"needs NVIDIA's driver, there is no {VERSION}: take another node, or unset it",
        )
    if int(driver[1]) < (least := 610 if several else 570):
        raise UserError(
            field,
            True,
            f"needs NVIDIA's driver {least}, not {driver[1]}: take another node, or unset it",
        )
    if shutil.which(PROGRAM) is None:
        raise UserError(
            field, True, f"needs NVIDIA's {PROGRAM} on PATH: add it to the image, or unset it"
        )


def suspend_process(pid: int) -> list[int]:
    """Free the devices of a process and its descendants, and list those that had any. Raises SnapshotFailed."""
    tree, parents = [pid], dict[int, int]()
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            parents[int(file.parent.name)] = int(file.read_text().rpartition(")")[2].split()[1])
    for each in tree:
        tree += [child for child, parent in parents.items() if parent == each]
    states = {
        each: _ask(each, "--get-state") for each in tree
    }  # an error of processes without CUDA
    if not (found := [each for each, state in states.items() if state == "running"]):
        raise SnapshotFailed(f"{PROGRAM}: process {pid} has nothing to suspend: {states[pid]}")
    _change(
        found, "checkpointed", ("lock", "--timeout", "10000"), ("checkpoint",)
    )  # 10 s for what it still does
    return found


def resume_processes(pids: list[int]) -> None:
    """Undo `suspend_process`, which listed `pids`. Raises SnapshotFailed, as where others have the device's memory."""
    _change(pids, "running", ("restore",), ("unlock",))


def _change(pids: list[int], state: str, *actions: tuple[str, ...]) -> None:
    """Do one action after the other, each with all of `pids`, and make sure of the state that they come to."""
    told = [_ask(pid, "--action", *action) for action in actions for pid in pids]
    if any(_ask(pid, "--get-state") != state for pid in pids):
        raise SnapshotFailed(
            f"{PROGRAM}: {', '.join(map(str, pids))} not {state}: {'; '.join(filter(None, told))}"
        )


def _ask(pid: int, *words: str) -> str:
    """Return all that the program says of a process."""
    try:
        done = subprocess.run(
            [PROGRAM, *words, "--pid", str(pid)], capture_output=True, text=True, timeout=600
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SnapshotFailed(f"{PROGRAM}: {error}") from error
    return " ".join((done.stdout + done.stderr).split())
