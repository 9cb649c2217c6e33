"""Attempts of one pod, one after another as Argo's rules have it, each a process of its own."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.certify.interpose import FIRED, wait_for_others
from tuneloop.core import attempts as budget
from tuneloop.core import component
from tuneloop.core.ends import RETRY_STAGE, describe_exit
from tuneloop.core.errors import TERMINATION_LOG
from tuneloop.local.results import Result
from tuneloop.local.retries import _pause, _refusal
from tuneloop.local.spawn import adopt_orphans

STRATEGY = {
    "limit": 1000,
    "retryPolicy": "Always",
    "expression": RETRY_STAGE,
    "backoff": {"duration": "10s"},
}
"""As it is rendered; `tests/unit/core/test_ends.py` compares."""
LIMIT_S = 600.0
"""Seconds after which an attempt hangs, however busy the machine is."""
STAGES = "CERTIFY_STAGES"
"""Variable that names the file in which stages are noted as they begin and commit."""
BY_HAND = 3
"""So often somebody may have to resume a run after one injection."""


class Violation(Exception):
    """What must not be has been seen."""


@dataclass
class Ended:
    """How an attempt ended.

    Attributes:
        code: its exit code as Argo gives it: 128 + n for signal n.
        message: its termination message.
        output: what it printed.
        stages: those whose function was entered: name, seconds, and whether they committed.
    """

    code: int
    message: str
    output: str
    stages: list[tuple[str, float, bool]] = field(default_factory=list)


@dataclass
class Ends:
    """What the attempts of one run came to.

    Attributes:
        attempts: how many there were.
        by_hand: how often Argo's rules let nothing follow, and somebody resumed the run.
        waited_s: by the virtual clock, for the next attempt.
        codes: their exit codes.
        temporary: what those that were ended by a signal have left in the temporary directory, which a pod takes along.
        met: the call that something was done at; empty where the run had no such call this time.
        lost: stages whose function was entered, and whose work did not commit; `lost_s`: their seconds.
    """

    attempts: int = 0
    by_hand: int = 0
    waited_s: float = 0.0
    lost: int = 0
    lost_s: float = 0.0
    codes: list[int] = field(default_factory=list)
    temporary: list[str] = field(default_factory=list)
    met: str = ""

    def add(self, ended: Ended) -> None:
        """Count an attempt."""
        self.attempts += 1
        self.codes.append(ended.code)
        for _, seconds, committed in ended.stages:
            self.lost, self.lost_s = (
                self.lost + (not committed),
                self.lost_s + (0.0 if committed else seconds),
            )


def name_end(ended: Ended) -> Result:
    """Return what Argo makes of a pod that ended so."""
    return Result("Failed", describe_exit(ended.code, ended.message), exit_code=ended.code)


def run_until_ended(
    work: Callable[[int], Callable[[], int]],
    scratch: Path,
    name: Callable[[Ended], Result] = name_end,
) -> Ends:
    """Run attempts until one ends with 0.

    Args:
        work: attempt (from 0) → what it does; it returns its exit code.
        name: what Argo makes of its end.

    Raises:
        Violation: an attempt showed a traceback, hung or left something behind in the process, or there is no end.
    """
    ends, number, last = Ends(), 0, ""
    while True:
        ended = run_apart(
            work(ends.attempts), scratch, {budget.ATTEMPT: str(number), budget.LAST_END: last}
        )
        ends.add(ended)
        if ended.code == 0:
            return ends
        result = name(ended)
        facts = {"lastRetry.status": result.phase, "lastRetry.exitCode": str(result.code)}
        facts |= {
            "lastRetry.message": result.message,
            "lastRetry.duration": "0",
            "retries": str(number),
        }
        if _refusal(STRATEGY, facts, result, number) is None:
            ends.waited_s += _pause(STRATEGY["backoff"], number)  # type: ignore[arg-type]
            number, last = number + 1, f"{result.phase} {result.code} {result.message}"
            continue
        ends.by_hand += 1
        number, last = 0, ""
        if ends.by_hand > BY_HAND:
            raise Violation(f"did not end: {ended.output[-2000:]}")


def read_met(scratch: Path) -> str:
    """Return the call that something was done at; nothing where it was not met."""
    return (scratch / "fired").read_text() if (scratch / "fired").exists() else ""


def run_apart(
    work: Callable[[], int], scratch: Path, env: Mapping[str, str] | None = None
) -> Ended:
    """Run `work` in a process of its own; its exit code is what it returns."""
    words, output, told = scratch / "words", scratch / "output", scratch / "stages"
    for path in (words, output, told):
        path.write_bytes(b"")
    adopt_orphans()
    pid = os.fork()
    if not pid:
        places = {TERMINATION_LOG: str(words), STAGES: str(told), FIRED: str(scratch / "fired")}
        _end_like_a_program(work, output, {**places, "TMPDIR": str(scratch / "tmp"), **(env or {})})
    code = _wait(pid)
    left = _end_group(pid)
    said = output.read_text(errors="replace")
    if left and code != 128 + signal.SIGKILL:
        raise Violation(f"the attempt left {left} processes behind: {said[-2000:]}")
    if code == 99:
        raise Violation(f"the attempt left something open: {said[-2000:]}")
    if "Traceback (most recent call last)" in said:
        raise Violation(f"a traceback, exit code {code}: {said[-6000:]}")
    if "panicked at" in said:
        raise Violation(f"a panic: {said[-2000:]}")
    return Ended(code, words.read_text(errors="replace").strip(), said, _read_stages(told))


def _end_like_a_program(work: Callable[[], int], output: Path, env: Mapping[str, str]) -> None:
    """Do the work, and end without the parent's exit functions; 99: something was left open."""
    code = 1
    try:
        os.setsid()
        _redirect(output)
        os.environ.update(env)
        tempfile.tempdir = None
        count_stages()
        budget.wait_before_ending = component.program.wait_before_ending = lambda: (
            None
        )  # the clock is virtual
        before = _list_open()
        code = work()
        wait_for_others()
        gc.collect()  # what nobody refers to any more is as good as closed
        left = {*threading.enumerate()} - {threading.main_thread()}
        left = {thread for thread in left if thread.is_alive() and not thread.daemon}
        opened = _list_open() - before
        if left or opened:
            print(f"threads: {left}, files: {opened}", file=sys.stderr)
            code = 99
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _redirect(output: Path) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    to = os.open(output, os.O_WRONLY | os.O_APPEND)
    for number in (1, 2):
        os.dup2(to, number)
    os.close(to)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", closefd=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def _list_open() -> set[str]:
    """Files below a run, and Unix sockets, that this process has open; HTTP connections are pooled by obstore."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{name}"))
        except OSError:
            continue
    return {path for path in found if "/store/" in path}


def count_stages() -> None:
    """Note each stage of this process whose function is entered, and whether and when it committed."""
    told = Path(os.environ[STAGES])
    real = component.Component._run

    def run(self: component.Component, stage: Any, inputs: Any) -> Any:
        began = time.perf_counter()
        _note(told, ["begin", self.name, 0.0])
        made = real(self, stage, inputs)
        _note(told, ["end", self.name, time.perf_counter() - began])
        return made

    component.Component._run = run  # type: ignore[method-assign]


def _note(told: Path, what: list[Any]) -> None:
    with told.open("a") as file:
        file.write(json.dumps([*what, time.monotonic()]) + "\n")


def _read_stages(told: Path) -> list[tuple[str, float, bool]]:
    """Return name, seconds and whether it committed of each stage that was entered."""
    found: list[tuple[str, float, bool]] = []
    begun: tuple[str, float] | None = None
    for kind, name, seconds, at in map(json.loads, told.read_text().splitlines()):
        if kind == "begin":
            if begun:
                found.append((begun[0], at - begun[1], False))
            begun = name, at
        else:
            found.append((name, seconds, True))
            begun = None
    if begun:
        found.append((begun[0], max(0.0, time.monotonic() - begun[1]), False))
    return found


def _wait(pid: int) -> int:
    """Wait for a process; return its exit code, 128 + n for signal n."""
    watched = os.pidfd_open(pid)
    try:
        hangs = not select.select([watched], [], [], LIMIT_S)[0]
    finally:
        os.close(watched)
    if hangs:
        os.kill(pid, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if hangs:
        raise Violation(f"an attempt had not ended after {LIMIT_S:.0f} s")
    return 128 - code if code < 0 else code


def _end_group(group: int) -> int:
    """End what is left of an attempt's processes, as a container ends with its first; return how many there were."""
    left = 0
    while True:
        try:
            os.killpg(group, signal.SIGKILL)
            os.waitpid(-group, 0)
            left += 1
        except (ChildProcessError, ProcessLookupError):
            return left
