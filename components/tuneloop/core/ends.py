"""How a pod can end, as one table.

Argo's expression, the local executor, the docs and the messages are made from it. An attempt ends
in a class (`END_CLASSES`). The class says which exit codes it has, whether the pod is started
again, how often at most, and whether the attempt counts against the budget of attempts without
progress (`tuneloop.core.attempts`). From it come the `retryStrategy` of Argo's pods, the failure
policy of a JobSet, the ends that a task of Kubeflow Pipelines repeats in its own process, and the
rule for memory. No clock decides.

Sources: how Argo 3.7 reports an end, ``workflow/controller/operator.go`` (``inferFailedReason``,
``assessNodeStatus``, ``processNodeRetries``); exit code 128 + n for signal n, POSIX.1 ``sh``; 75 is
``EX_TEMPFAIL`` of ``sysexits.h``.
"""

import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from tuneloop.core import errors
from tuneloop.core.errors import (
    EXIT_GAVE_UP,
    EXIT_RETRY,
    EXIT_USER,
    FAILED_FOR_NOW,
    INTERRUPTED,
    UNAVAILABLE,
)

OUT_OF_MEMORY = "OOMKilled"
"""The kubelet's reason, which Argo puts into a node's message."""
NO_EXIT_CODE = -1
"""Argo's exit code of a pod that has no container status."""
TERMINATED = 128 + signal.SIGTERM
# In the order of their numbers, in which the docs and Argo's expressions have them.
KILLED = tuple(
    128 + number
    for number in (
        signal.SIGILL,
        signal.SIGTRAP,
        signal.SIGABRT,
        signal.SIGBUS,
        signal.SIGFPE,
        signal.SIGKILL,
        signal.SIGSEGV,
    )
)
DELETED = "pod deleted"
"""Argo's message of a pod that was evicted or preempted."""
_EVICTION = f"{DELETED}|exit code 1(37|43)"
"""Matches the messages of Argo's errors that are evictions."""
BUDGET = 3
"""The number of new attempts in a row that are allowed without progress; ends that do not count are
not limited."""
AWAY_BUDGET = 100
"""The number of new attempts in a row that are allowed while a service is unavailable: with their
waits, hours."""
MOST_ENGINE_ERRORS = 20
"""Attempts after which an error of the engine itself ends the run: a pod that cannot be started may
never be."""
MOST_KILLS_OF_A_STEP = 3
"""Attempts after which a signal ends a small step, which has no output to keep a budget at."""


@dataclass(frozen=True)
class EndClass:
    """A class of ends.

    Attributes:
        name: in messages and docs.
        recognized: how it is recognized, in words.
        retried: whether and how often it is started again, in words.
        codes: the exit codes that have this class, unless the message says otherwise.
        is_retried: whether a stage is started again after it.
        max_attempts: the most attempts after ends of this class; in a row, for one that counts.
        counts: whether it counts against the budget of attempts without progress.
    """

    name: str
    recognized: str
    retried: str = "no"
    codes: tuple[int, ...] = ()
    is_retried: bool = False
    max_attempts: int | None = None
    counts: bool = False


SUCCEEDED = EndClass("succeeded", "exit code 0", codes=(0,))
MISTAKE = EndClass(
    "user's mistake",
    f"exit code {EXIT_USER}",
    "no; the last line says what to change",
    codes=(EXIT_USER,),
)
NOT_PROMOTED = EndClass(
    errors.NotPromoted.kind,
    f"exit code {errors.EXIT_NOT_PROMOTED}",
    "no; the last line says why",
    codes=(errors.EXIT_NOT_PROMOTED,),
)
INTERRUPTION = EndClass(
    INTERRUPTED,
    f"exit code {TERMINATED}, or {EXIT_RETRY} after SIGTERM",
    "yes, always",
    codes=(TERMINATED,),
    is_retried=True,
)
AWAY = EndClass(
    UNAVAILABLE,
    f"exit code {EXIT_RETRY}, "
    "a store, a server, a device lease or another process of the stage is away",
    f"yes, {AWAY_BUDGET} times in a row without progress",
    is_retried=True,
    max_attempts=AWAY_BUDGET,
)
FOR_NOW = EndClass(
    FAILED_FOR_NOW,
    f"exit code {EXIT_RETRY}, for another cause that may pass",
    "yes, within the budget",
    codes=(EXIT_RETRY,),
    is_retried=True,
    max_attempts=BUDGET,
    counts=True,
)
EVICTED = EndClass(
    "evicted or preempted",
    f"phase Error, message `{DELETED}`, "
    f"or exit code {128 + signal.SIGKILL} or {TERMINATED} of Argo's own containers; "
    "phase Failed with the kubelet's message in place of the container's",
    "yes, always",
    is_retried=True,
)
ENGINE = EndClass(
    "workflow engine error",
    "phase Error, another message: the pod could not be started, or its outputs not be read",
    f"yes, if it is among the first {MOST_ENGINE_ERRORS} attempts, whatever those before ended by",
    is_retried=True,
    max_attempts=MOST_ENGINE_ERRORS,
    counts=True,
)
REJECTED = EndClass(
    "rejected by the node",
    f"phase Failed without a container (Argo's exit code {NO_EXIT_CODE})",
    "yes, always",
    codes=(NO_EXIT_CODE,),
    is_retried=True,
)
MEMORY = EndClass(
    "out of memory",
    f"reason {OUT_OF_MEMORY}",
    "once, with `memory_on_retry` of its role; without that no, and the message says what to set",
    is_retried=True,
    max_attempts=1,
)
KILL = EndClass(
    "killed by a signal",
    f"exit code {', '.join(map(str, KILLED))}",
    "yes, within the budget",
    codes=KILLED,
    is_retried=True,
    max_attempts=BUDGET,
    counts=True,
)
GAVE_UP = EndClass(
    "gave up",
    f"exit code {EXIT_GAVE_UP}",
    "no; the budget of attempts without progress is used up",
    codes=(EXIT_GAVE_UP,),
)
BUG = EndClass(
    "bug",
    "any other exit code",
    "no, the log has the traceback; a server: yes, within the budget",
    counts=True,
)
END_CLASSES: tuple[EndClass, ...] = (
    SUCCEEDED,
    MISTAKE,
    NOT_PROMOTED,
    INTERRUPTION,
    AWAY,
    FOR_NOW,
    EVICTED,
    ENGINE,
    REJECTED,
    MEMORY,
    KILL,
    GAVE_UP,
    BUG,
)
# An exit code without another sign stands for the class that names it.
_CLASS_BY_CODE = {code: end for end in END_CLASSES for code in end.codes}
RETRIED_CODES = sorted(code for code, end in _CLASS_BY_CODE.items() if end.is_retried)
"""Exit codes after which a stage is started again, a pod by Argo and all pods of a JobSet by its
failure policy."""
# These do not count, so a small step needs no budget for them.
_FREE_CODES = [code for code in RETRIED_CODES if code not in KILL.codes]
# What Argo's expressions may ask of the last attempt (fields of a retry strategy's `lastRetry`).
_FAILED = "lastRetry.status == 'Failed'"
_CODE = "asInt(lastRetry.exitCode)"
_RETRIED_ERROR = (
    f"(lastRetry.status == 'Error' && "
    f"(lastRetry.message matches '{_EVICTION}' || asInt(retries) < {ENGINE.max_attempts}))"
)
RETRY_STAGE = f"{_RETRIED_ERROR} || ({_FAILED} && {_CODE} in {RETRIED_CODES})"
"""Argo's ``retryStrategy.expression`` of a stage: the table, for what Argo can see."""
RETRY_STEP = (
    f"{_RETRIED_ERROR} || ({_FAILED} && ({_CODE} in {_FREE_CODES} "
    f"|| {_CODE} in {list(KILL.codes)} && asInt(retries) < {MOST_KILLS_OF_A_STEP}))"
)
"""``retryStrategy.expression`` of a small step (a launcher, a continuation): it has no output to
keep a budget at."""
RETRY_SERVER = f"{_RETRIED_ERROR} || ({_FAILED} && !({_CODE} in [{EXIT_USER}, {EXIT_GAVE_UP}]))"
"""``retryStrategy.expression`` of a server, which is started again unless the user erred or its
budget is used up."""


def classify_end(phase: str, code: int, message: str) -> EndClass:
    """Return the class of an attempt's end.

    Args:
        phase: of Argo's node: ``Error`` if the engine ended it, ``Failed`` if the container did.
        code: the exit code; `NO_EXIT_CODE` without a container.
        message: of Argo's node, or the last line of the process.
    """
    if phase == "Error":
        return EVICTED if re.search(_EVICTION, message) else ENGINE
    # This is what Argo passes on for a pod that never had a container.
    if phase == "Failed" and code == 0:
        return REJECTED
    if code == EXIT_RETRY:
        last_line = strip_exit(message)
        for end in (INTERRUPTION, AWAY):
            if last_line.startswith(f"{end.name}:"):
                return end
        return FOR_NOW
    if code != 0 and OUT_OF_MEMORY in message:
        return MEMORY
    # The kubelet's message, such as that the node is low on memory, stands for the container's.
    if code in KILLED and message and "exit code" not in message:
        return EVICTED
    return _CLASS_BY_CODE.get(code, BUG)


def is_repeated_in_process(code: int, end: EndClass) -> bool:
    """Return whether a task of Kubeflow Pipelines repeats its stage after this end.

    It does if the stage ended by itself, and not because it was told to. The launcher there turns
    every exit code into 1, so the retries of Kubeflow Pipelines cannot tell.
    """
    return code in FOR_NOW.codes and end is not INTERRUPTION


def strip_exit(message: str) -> str:
    """Return the process's own last line, of a message that begins with its exit code as Argo or
    this package names it.
    """
    return re.sub(r"^.*?exit code \d+(\)| \([^)]*\))?: ", "", message)


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


def describe_exit(code: int, message: str = "") -> str:
    """Describe an exit code and its message for people.

    Returns:
        Such as ``exit code 132 (SIGILL, illegal instruction): message``.
    """
    # The message may name the code already.
    message = re.sub(rf"^exit code {code}\b( \([^)]*\))?(: )?", "", message)
    text = f"exit code {code}"
    name = name_signal(code)
    if name:
        text += f" ({name})"
    return f"{text}: {message}" if message else text


def name_signal(code: int) -> str:
    """Name the signal that an exit code stands for, as ``SIGILL, illegal instruction``.

    Returns:
        Nothing if it stands for none.
    """
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return ""
    meaning = _SIGNALS.get(code - 128)
    return f"{name}, {meaning}" if meaning else name
