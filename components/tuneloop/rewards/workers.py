"""Judge in forked processes, each of which is replaced when a call hangs, crashes or takes memory.

A process writes a line of JSON for each verdict: the seconds of processor time that it has used,
then the fields of the `Verdict`. Its first line has the seconds alone and says that it has begun;
a line with `AWAY` says that it waits for a judge.

`rewards/scoring.py` drives the workers from one thread. The fork happens in a process that may have
threads of libraries: the child calls rewards and nothing of the stage. A call that is out of memory
ends as a crash, because `judging.py: judge_row` lets `MemoryError` pass. Who reads the words of
`ended_by` is said in `rewards/outcomes.py: Verdict`. Tests are in
`tests/unit/rewards/test_scoring.py` and `test_judges.py`.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from tuneloop.rewards.judging import PatientJudge
from tuneloop.rewards.outages import Outage, OutageReport
from tuneloop.rewards.outcomes import Verdict
from tuneloop.rewards.registry import Call
from tuneloop.rewards.sandbox import find_sandbox
from tuneloop.workflow.settings import PROCESS

AWAY = "away"
"""In place of a verdict's kind: the process waits for a judge. The reason and the seconds
follow."""
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that a process gets when its parent ends."""
PATIENCE = 10
"""How many times its seconds a call may take by the clock, while it computes. `HINDERED` of
`rewards/sandbox/__init__.py` is the same for a program, and docs/training.md states it."""

Verdicts = list[tuple[Call, Verdict]]
"""Calls that a worker is done with, each with its verdict."""


@dataclass(frozen=True)
class CallLimits:
    """What one call of a reward may use.

    Attributes:
        seconds: of processor time, and by the clock unless it computes.
        memory: bytes that judging may take, beyond what the stage itself has; None: no limit.
        punish: whether a completion that ends its judge's process is to be scored for it.
    """

    seconds: float
    memory: int | None
    punish: bool


class Worker:
    """A forked process that judges calls in turn.

    Attributes:
        calls: those without a verdict; the process is at the first.
        pipe: the descriptor from which the process's lines are read.
        due: when to look whether the time of the current call is over, by `time.monotonic`.
    """

    pipe: int
    due: float
    _pid: int
    _partial_line: bytes
    _is_ready: bool
    """Whether the process has begun to judge."""
    _began_at: float
    _used_before_s: float
    """When the current call began, and the processor time that had been used by then."""

    def __init__(self, calls: Iterable[Call], limits: CallLimits, report: OutageReport) -> None:
        self.calls = deque(calls)
        self._limits = limits
        self._report = report
        # The call that has killed a process once.
        self._killer: Call | None = None
        self._start()

    def receive(self) -> Verdicts:
        """Return the verdicts that have arrived; replace the process if it died."""
        data = os.read(self.pipe, 1 << 16)
        if not data:
            return self._replace_dead()
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        verdicts: Verdicts = []
        for line in lines:
            used_s, *fields = json.loads(line)
            self._begin_call(used_s)
            if not fields:
                self._is_ready = True
                continue
            name = self.calls[0].reward.name
            if fields[0] == AWAY:
                _, reason, delay_s = fields
                self.due += delay_s
                self._report.add_wait(name, reason, delay_s)
                continue
            self._report.end_wait(name)
            verdicts.append((self.calls.popleft(), Verdict(*fields)))
        return verdicts

    def replace_late(self) -> Verdicts:
        """Give up on the current call, unless it still computes.

        A call that was kept from a processor, and has used less time than allowed, may take up to
        `PATIENCE` times as long. Its child processes count, and a program in a remote sandbox.
        """
        seconds = self._limits.seconds
        duration_s = time.monotonic() - self._began_at
        reason = f"took more than {seconds:g} s"
        states, used_s = _read_stats(self._pid)
        if used_s - self._used_before_s >= seconds:
            return self._give_up("timeout", reason, "timeout")
        # proc(5): R runs, or would; D waits for a page.
        is_computing = not {"R", "D"}.isdisjoint(states) or find_sandbox() != PROCESS
        if not is_computing or duration_s >= PATIENCE * seconds:
            return self._give_up("timeout", reason)
        self.due = time.monotonic() + seconds / 4
        return []

    def stop(self) -> None:
        """Kill the process and whatever it started."""
        if self._pid:
            # The process is not reaped yet, so its group is there.
            os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            os.close(self.pipe)
            self._pid = 0

    def _replace_dead(self) -> Verdicts:
        """Try the current call once more in a new process; give up if it killed that one, too."""
        call = self.calls[0]
        if self._is_ready and self._killer is not call:
            self._killer = call
            self.stop()
            self._start()
            return []
        # A process that could not begin is the fault of its host, not of the completion.
        ended_by = "crash" if self._is_ready else ""
        return self._give_up("infra_error", "the process that ran it died", ended_by)

    def _give_up(
        self, kind: Literal["timeout", "infra_error"], reason: str, ended_by: str = ""
    ) -> Verdicts:
        """Give up on the current call, and continue with the others in a new process."""
        self.stop()
        call = self.calls.popleft()
        if self.calls:
            self._start()
        return [(call, Verdict(kind, reason, {}, ended_by if self._limits.punish else ""))]

    def _begin_call(self, used_s: float) -> None:
        """Note that a call begins, and the processor time that was used before it."""
        self._used_before_s = used_s
        self._began_at = time.monotonic()
        self.due = self._began_at + self._limits.seconds

    def _start(self) -> None:
        # What stands in the buffers would be written twice.
        sys.stdout.flush()
        sys.stderr.flush()
        self.pipe, write_end = os.pipe()
        parent = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            _serve(parent, write_end, self.calls, self._limits)
        _own_group(self._pid)
        os.close(write_end)
        self._partial_line = b""
        self._is_ready = False
        self._begin_call(0.0)


def _read_stats(pid: int) -> tuple[str, float]:
    """Read how a process and all that it has started are doing (proc(5)).

    Returns:
        Their states, a letter each, and the seconds of processor time that they have had. Elsewhere
        than on Linux nothing is known.
    """
    states = ""
    ticks = 0
    numbers = [str(pid)]
    # The list grows while it is read, by the children of each process.
    for number in numbers:
        # A process that has just ended has no files.
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
            states += fields[0]
            ticks += sum(map(int, fields[11:15]))
            for file in Path(f"/proc/{number}/task").glob("*/children"):
                numbers += file.read_text().split()
    return states, ticks / os.sysconf("SC_CLK_TCK")


def _limit_memory(memory: int) -> None:
    """Limit this process to `memory` bytes more than it has, but never beyond its hard limit."""
    used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    limit = used + memory
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))


def _own_group(pid: int) -> None:
    """Give a process its own group; both sides of the fork do, so that no kill can come too early."""
    with contextlib.suppress(PermissionError, ProcessLookupError):
        os.setpgid(pid, pid)


def _serve(parent: int, pipe: int, calls: Sequence[Call], limits: CallLimits) -> NoReturn:
    """Judge in the child. It never returns into the parent's code, and dies when the parent
    dies."""

    def send(*fields: object) -> None:
        # An alarm that the reward left behind would hit what comes next.
        signal.setitimer(signal.ITIMER_REAL, 0)
        os.write(pipe, json.dumps([sum(os.times()[:4]), *fields]).encode() + b"\n")

    def pause(call: Call, outage: Outage, delay_s: float) -> None:
        send(AWAY, outage.reason, delay_s)
        time.sleep(delay_s)

    try:
        _own_group(os.getpid())
        if sys.platform == "linux":
            # A reward that hangs must not outlive the stage, which may have ended by now.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(0)
            if limits.memory is not None:
                _limit_memory(limits.memory)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        # What a reward prints is for people, and the stage's output may be for a program.
        os.dup2(2, 1)
        send()
        judge = PatientJudge(pause)
        for call in calls:
            send(*judge.judge(call))
    finally:
        os._exit(0)
