"""How a pod can end, as one table: what Argo's expression, the local executor, the docs and the messages are made from.

An attempt ends in a class (`END_CLASSES`). The class says whether the pod is started again, and whether the attempt
counts against the budget of `tuneloop.attempts`: a stage may be started again any number of times as long as it makes
progress (a commit, a new resume point) between the attempts that count. No clock decides.

Sources: how Argo 3.7 reports an end, ``workflow/controller/operator.go`` (``inferFailedReason``, ``assessNodeStatus``,
``processNodeRetries``); exit code 128 + n for signal n, POSIX.1 ``sh``; 75 is ``EX_TEMPFAIL`` of ``sysexits.h``.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from tuneloop.errors import EXIT_RETRY, EXIT_USER

OUT_OF_MEMORY = "OOMKilled"
"""The kubelet's reason, which Argo puts at the start of a node's message."""
NO_EXIT_CODE = -1
"""Argo's exit code of a pod that has no container status."""
INTERRUPTED = (EXIT_RETRY, 128 + signal.SIGTERM)
CRASHES = tuple(128 + n for n in (signal.SIGILL, signal.SIGTRAP, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE))
KILLED = (*CRASHES, 128 + signal.SIGKILL, 128 + signal.SIGSEGV)


@dataclass(frozen=True)
class EndClass:
    """A class of ends.

    Attributes:
        name: what messages and docs call it.
        recognized: by what, in words.
        retried: what follows, in words.
        counts: whether the attempt counts against the budget of attempts without progress.
    """

    name: str
    recognized: str
    retried: str
    counts: bool = False


SUCCEEDED = EndClass("succeeded", "exit code 0", "no")
MISTAKE = EndClass("user's mistake", f"exit code {EXIT_USER}", "no: the last line says what to change")
INTERRUPTION = EndClass("interrupted", f"exit code {INTERRUPTED[1]}, or {EXIT_RETRY} after SIGTERM", "yes")
UNAVAILABLE = EndClass(
    "unavailable", f"exit code {EXIT_RETRY}: a store, a server, a lease or another process of the stage is away", "yes"
)
FAILED_FOR_NOW = EndClass(
    "failed for now", f"exit code {EXIT_RETRY}: too many rewards could not be computed", "yes", counts=True
)
EVICTED = EndClass("evicted or preempted", "phase Error: the pod was deleted, or its node is gone", "yes")
REJECTED = EndClass("rejected by the node", f"phase Failed without an exit code (Argo: {NO_EXIT_CODE})", "yes")
MEMORY = EndClass(
    "out of memory",
    f"reason {OUT_OF_MEMORY}",
    "once, with `cluster.memory_limit_after_oom`; without it no: the message says what to set",
    counts=True,
)
KILL = EndClass("killed by a signal", f"exit code {', '.join(map(str, sorted(KILLED)))}", "yes", counts=True)
BUG = EndClass("bug", "any other exit code", "no: the traceback is in the log")
END_CLASSES = (
    SUCCEEDED, MISTAKE, INTERRUPTION, UNAVAILABLE, FAILED_FOR_NOW, EVICTED, REJECTED, MEMORY, KILL, BUG,
)  # fmt: skip

_SIGNALS: Mapping[int, str] = {
    signal.SIGILL: "illegal instruction",
    signal.SIGABRT: "aborted",
    signal.SIGBUS: "bus error",
    signal.SIGFPE: "arithmetic error",
    signal.SIGKILL: "killed: out of memory, or by somebody",
    signal.SIGSEGV: "invalid memory reference",
    signal.SIGTERM: "asked to end",
    signal.SIGINT: "interrupted from the keyboard",
}


def describe_exit(code: int) -> str:
    """Name an exit code for people: ``exit code 132 (SIGILL, illegal instruction)``, ``exit code 1``."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return f"exit code {code}"
    meaning = _SIGNALS.get(code - 128)
    return f"exit code {code} ({name}{f', {meaning}' if meaning else ''})"
