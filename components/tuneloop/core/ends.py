"""How a pod can end, as one table.

An attempt ends in a class (`END_CLASSES`). The class says which exit codes it has, whether the pod
is started again, and on which budget of attempts it counts. From these fields are made:

- the ``retryStrategy`` of Argo's pods, which the local executor evaluates, too
  (`build_retry_expression`): it sees phase, exit code and number of the attempt;
- the failure policy of a JobSet (`RETRIED_CODES`), which sees the exit code alone;
- what the next attempt of a stage or a server does (`tuneloop.core.attempts.admit_attempt`): it
  sees the message, too, counts, and refuses to go on;
- the ends after which a task of Kubeflow Pipelines repeats its stage in its own process
  (`EndClass.is_repeated_in_process`);
- the table of docs/ends.md.

No clock decides.

Sources: how Argo 3.7 reports an end, ``workflow/controller/operator.go`` (``inferFailedReason``,
``assessNodeStatus``, ``processNodeRetries``); exit code 128 + n for signal n, POSIX.1 ``sh``; 75 is
``EX_TEMPFAIL`` of ``sysexits.h``.
"""

import re
import signal
from collections.abc import Mapping, Sequence
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
"""The exit code of a process that SIGTERM ended; one of ours ends with `EXIT_RETRY` instead."""
# The exit codes of the classes KILL and EVICTED: signals of a fault, or of the kernel. In the order
# of their numbers, in which the docs and Argo's expressions have them. `_SIGNALS` has words for
# them.
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


@dataclass(frozen=True)
class Budget:
    """A number of attempts, which the classes of ends share that count on it.

    `core/attempts.py: Record` counts each budget by name: a budget that is added needs a field
    there, a line in `add`, and one in `is_used_up`. Without them nothing counts, and a pod is
    started again until Argo's own limit (`argo/pod_fields.py: LIMIT`).

    Attributes:
        limit: how many attempts in a row may follow on such ends without progress.
    """

    limit: int


BUDGET = Budget(3)
"""Of ends that may come from the stage itself. `local/retries.py` prints its limit when a server is
restarted."""
AWAY_BUDGET = Budget(100)
"""Of ends because a service is unavailable: with the waits of attempts, hours."""
MEMORY_BUDGET = Budget(1)
"""Of ends for want of memory."""


@dataclass(frozen=True)
class EndClass:
    """A class of ends.

    Attributes:
        name: in messages and docs.
        codes: the exit codes that it can have where the container has ended. Classes may share a
            code: a pod is then started again if one of them is retried, and the new attempt
            refuses to go on if its own class is not.
        error_pattern: matches the messages with which Argo itself ends such a pod; empty: all
            messages that no class before it matches; None: Argo ends no pod so.
        is_retried: whether a stage is started again after it.
        budget: what such ends count on; None: they count on none, and any number may follow.
        first_attempts: limits ends by Argo itself, which no program counts: a pod is started again
            only after its first so many attempts, whatever those ended by. None: no limit.
        first_step_attempts: the same limit for a small step (a launcher, a continuation) whose
            container has ended: it has no output below which it could keep a count.
        ends_server: whether a server is not started again either.
    """

    name: str
    codes: tuple[int, ...] = ()
    error_pattern: str | None = None
    is_retried: bool = False
    budget: Budget | None = None
    first_attempts: int | None = None
    first_step_attempts: int | None = None
    ends_server: bool = False

    @property
    def is_repeated_in_process(self) -> bool:
        """Whether a task of Kubeflow Pipelines repeats its stage after it.

        It does if the process asked for another attempt by its exit code, and no signal ended it.
        The launcher there turns every exit code into 1, so the retries of Kubeflow Pipelines cannot
        tell.
        """
        return self.is_retried and self.codes == (EXIT_RETRY,)


# The line below each class names the places beside the table where it takes effect.
SUCCEEDED = EndClass("succeeded", codes=(0,))
"""Nothing follows."""
MISTAKE = EndClass(
    "user's mistake",
    codes=(EXIT_USER,),
    ends_server=True,
)
"""``core/errors.py`` (`UserError`)."""
NOT_PROMOTED = EndClass(
    errors.NotPromoted.kind,
    codes=(errors.EXIT_NOT_PROMOTED,),
)
"""``core/errors.py`` (`NotPromoted`)."""
INTERRUPTION = EndClass(
    INTERRUPTED,
    codes=(TERMINATED, EXIT_RETRY),
    is_retried=True,
)
"""``core/errors.py`` (`Interrupted`), ``core/context.py`` (`Stage.check_stop`)."""
AWAY = EndClass(
    UNAVAILABLE,
    codes=(EXIT_RETRY,),
    is_retried=True,
    budget=AWAY_BUDGET,
)
"""``core/errors.py`` (`Unavailable`), ``core/attempts.py`` (`wait_before_ending`)."""
FOR_NOW = EndClass(
    FAILED_FOR_NOW,
    codes=(EXIT_RETRY,),
    is_retried=True,
    budget=BUDGET,
)
"""``core/errors.py`` (`Retryable`); `admit_attempt` takes it where it is not told of the end."""
EVICTED = EndClass(
    "evicted or preempted",
    codes=KILLED,
    error_pattern=_EVICTION,
    is_retried=True,
)
"""Nowhere else: the message is Argo's or the kubelet's."""
ENGINE = EndClass(
    "workflow engine error",
    error_pattern="",
    is_retried=True,
    budget=BUDGET,
    # A pod that cannot be started may never be.
    first_attempts=20,
)
"""Nowhere else: the message is Argo's."""
REJECTED = EndClass(
    "rejected by the node",
    codes=(NO_EXIT_CODE,),
    is_retried=True,
)
"""``local/results.py`` and ``runs/stages.py`` (`NO_EXIT_CODE`); a JobSet sees no exit code of it."""
MEMORY = EndClass(
    "out of memory",
    codes=(128 + signal.SIGKILL,),
    is_retried=True,
    budget=MEMORY_BUDGET,
)
"""``core/attempts.py`` (`check_more_memory`); ``argo/pod_fields.py`` (`retried_pod_fields`) gives
all attempts but the first the higher limit; ``workflow/settings.py`` (`check_one_memory_limit`)
refuses it for JobSets and Kubeflow Pipelines."""
KILL = EndClass(
    "killed by a signal",
    codes=KILLED,
    is_retried=True,
    budget=BUDGET,
    first_step_attempts=3,
)
"""Nowhere else: the program cannot say it."""
GAVE_UP = EndClass(
    "gave up",
    codes=(EXIT_GAVE_UP,),
    ends_server=True,
)
"""``core/attempts.py`` (`admit_attempt` raises `Exhausted`)."""
BUG = EndClass(
    "bug",
    # Of a server: a stage is not started again.
    budget=BUDGET,
)
"""``core/errors.py`` (`report_errors` lets the traceback through)."""
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
"""All classes. Of those that share an exit code, the last one stands for it without another sign.
`ENGINE` stays behind the other classes with an `error_pattern`, as its empty one matches all
messages.

A class that is added is an entry here and a row of docs/ends.md (`tests/unit/core/test_ends.py`
compares the table). A class with an exit code of its own is recognized by that, and needs the code
in `core/errors.py: choose_exit_code`; any other needs a branch of `classify_end`. A class that the
process itself names needs its word in `core/errors.py: KINDS`. Other retried codes change what is
rendered: `make golden`."""
_CLASS_BY_CODE = {code: end for end in END_CLASSES for code in end.codes}
_FAILED = "lastRetry.status == 'Failed'"
_CODE = "asInt(lastRetry.exitCode)"


def list_retried_codes(classes: Sequence[EndClass]) -> list[int]:
    """List the exit codes after which a pod is started again."""
    return sorted({code for end in classes if end.is_retried for code in end.codes})


def build_retry_expression(classes: Sequence[EndClass], *, is_step: bool = False) -> str:
    """Build Argo's ``retryStrategy.expression`` of a stage.

    Args:
        classes: the table.
        is_step: whether it is of a small step (a launcher, a continuation), which keeps no count:
            `first_step_attempts` limits its attempts.
    """
    limits: dict[int, list[int]] = {}
    for end in classes:
        if is_step and end.is_retried and end.first_step_attempts is not None:
            limits.setdefault(end.first_step_attempts, []).extend(end.codes)
    limited_codes = {code for codes in limits.values() for code in codes}
    free_codes = [code for code in list_retried_codes(classes) if code not in limited_codes]
    terms = [f"{_CODE} in {free_codes}"]
    for limit, codes in limits.items():
        terms.append(f"{_CODE} in {sorted(codes)} && asInt(retries) < {limit}")
    condition = " || ".join(terms)
    if len(terms) > 1:
        condition = f"({condition})"
    return f"{_build_error_condition(classes)} || ({_FAILED} && {condition})"


def build_server_expression(classes: Sequence[EndClass]) -> str:
    """Build Argo's ``retryStrategy.expression`` of a server, which is started again unless the
    user erred or its budget is used up.
    """
    final_codes = [code for end in classes if end.ends_server for code in end.codes]
    return f"{_build_error_condition(classes)} || ({_FAILED} && !({_CODE} in {final_codes}))"


def _build_error_condition(classes: Sequence[EndClass]) -> str:
    """Build the condition on which a pod that Argo itself ended is started again."""
    terms: list[str] = []
    for end in classes:
        if not end.is_retried or end.error_pattern is None:
            continue
        conditions: list[str] = []
        if end.error_pattern:
            conditions.append(f"lastRetry.message matches '{end.error_pattern}'")
        if end.first_attempts is not None:
            conditions.append(f"asInt(retries) < {end.first_attempts}")
        terms.append(" && ".join(conditions) or "true")
    return f"(lastRetry.status == 'Error' && ({' || '.join(terms) or 'false'}))"


RETRIED_CODES = list_retried_codes(END_CLASSES)
"""Exit codes after which a pod is started again by Argo, and all pods of a JobSet by its failure
policy. The runtimes of Kubeflow Trainer have a copy (`manifests/components/trainer`), which
`tests/unit/test_manifests.py` compares."""
RETRY_STAGE = build_retry_expression(END_CLASSES)
RETRY_STEP = build_retry_expression(END_CLASSES, is_step=True)
RETRY_SERVER = build_server_expression(END_CLASSES)
"""The ``retryStrategy.expression`` of stages and pods of iterations, of small steps, and of
servers; `argo/pod_fields.py`, `argo/jobset.py` and `argo/template.py` render them."""


def classify_end(phase: str, code: int, message: str) -> EndClass:
    """Return the class of an attempt's end.

    Args:
        phase: of Argo's node: ``Error`` if the engine ended it, ``Failed`` if the container did.
        code: the exit code; `NO_EXIT_CODE` without a container.
        message: of Argo's node, or the last line of the process.
    """
    if phase == "Error":
        for end in END_CLASSES:
            if end.error_pattern is not None and re.search(end.error_pattern, message):
                return end
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
    if code in EVICTED.codes and message and "exit code" not in message:
        return EVICTED
    return _CLASS_BY_CODE.get(code, BUG)


_EXIT = re.compile(r"^(?P<exit>.*?exit code \d+(\)| \([^)]*\))?): ")
"""The beginning of the message of a pod that failed, as Argo or `describe_exit` words it; the last
line of the process follows. Who changes the words of `describe_exit` changes this pattern, too:
`runs/stages.py` and the commands cut messages by it."""


def strip_exit(message: str) -> str:
    """Return the process's own last line, of a message that begins with its exit code."""
    return _EXIT.sub("", message)


def cut_error(message: str) -> str:
    """Return a failed pod's message without the process's own last line, for where that line is
    shown beside it: an error is said once."""
    match = _EXIT.match(message)
    return match["exit"] if match else message


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
"""Signal → what messages say of it. Without an entry its name stands alone, as in ``SIGTRAP``."""


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
