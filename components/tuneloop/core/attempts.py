"""The budget of a stage's or a server's attempts: it counts attempts without progress, and knows no
clock.

A workflow engine starts a pod again because of how it ended (`tuneloop.core.ends`), and cannot see
whether that helps. So the next attempt is told how the last one ended (`LAST_END`) and its own
number (`ATTEMPT`). It reads the record that the previous attempt left below its output, and gives
up once a budget of the table is used up: too many attempts in a row have made no progress, that is
no commit, no new resume point, no answered request. A first attempt reads and writes nothing.

Who sets the variables: `argo/pod_fields.py` in every pod, from Argo's ``lastRetry``, and
`argo/jobset.py` in those of a JobSet; the local executor, as it runs the same workflow. `kfp/retry.py`
repeats a stage in one process and counts by a `Record` of its own. Who asks: each
stage before it begins (`core/component.py`), and a rollout server (`inference/server.py`).
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable

from pydantic import BaseModel, ValidationError

from tuneloop.core.ends import (
    AWAY_BUDGET,
    BUDGET,
    FOR_NOW,
    MEMORY_BUDGET,
    NO_EXIT_CODE,
    RETRIED_CODES,
    EndClass,
    classify_end,
    describe_exit,
)
from tuneloop.core.errors import Exhausted, UserError
from tuneloop.core.store import Store
from tuneloop.core.threads import forward_signals
from tuneloop.core.wording import format_count

ATTEMPT = "TUNELOOP_ATTEMPT"
LAST_END = "TUNELOOP_LAST_END"
MORE_MEMORY = "TUNELOOP_MEMORY_ON_RETRY"
"""Environment variables of a pod: the attempt's number, from 0; phase, exit code and message of the
previous attempt, with a blank between them; the memory limit of attempts after the first, where
`memory_on_retry` of the role is set. Pods of a JobSet have only the first."""
FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 60.0
"""Attempt `n` waits ``FIRST_WAIT_S * 2**n`` before it ends, the first one (0) not at all; at most the
other."""
RECORD = "attempts.json"
"""The file of a `Record`, in the store that `admit_attempt` is given: ``resume`` below a stage's
output, which is deleted with the commit; for a server what its flag ``--attempts`` names."""
FAILURE = "failure.json"
"""The file below an output in which a task of Kubeflow Pipelines leaves why its stage failed, as
that engine does not say it: `kfp/retry.py` writes it, `runs/committed.py` reads it."""
FAILED = {"time": float, "message": str}
"""Field of `FAILURE` → its type. Each is required: with a further one, files of earlier runs are
refused as damaged."""


class Record(BaseModel, frozen=True):
    """The budget of attempts, as an attempt leaves it for the next one.

    A new field needs a default: a record that cannot be read counts as empty, so the budget would
    begin anew. `kfp/retry.py` counts by the same class.

    Attributes:
        attempt: the number of the attempt that wrote it, from 0.
        without_progress: how many attempts without progress ended in classes of `BUDGET`.
        unavailable: how many in a row ended in a class of `AWAY_BUDGET`.
        out_of_memory: how many without progress ended in a class of `MEMORY_BUDGET`; other ends
            between them use nothing up.
        progress: what was reached, such as the names of resume points.
    """

    attempt: int
    without_progress: int = 0
    unavailable: int = 0
    out_of_memory: int = 0
    progress: str

    def add(self, end: EndClass, progress: str) -> "Record":
        """Return the record after one more attempt that ended in a class, having reached
        `progress`.
        """
        has_progressed = progress != self.progress
        previous = Record(attempt=0, progress=progress) if has_progressed else self
        return Record(
            attempt=self.attempt + 1,
            without_progress=previous.without_progress + (end.budget is BUDGET),
            unavailable=previous.unavailable + 1 if end.budget is AWAY_BUDGET else 0,
            out_of_memory=previous.out_of_memory + (end.budget is MEMORY_BUDGET),
            progress=progress,
        )

    @property
    def is_used_up(self) -> bool:
        """Whether no further attempt is allowed. `MEMORY_BUDGET` is not part of it: only
        `check_more_memory` reads that count.
        """
        is_away_too_long = self.unavailable > AWAY_BUDGET.limit
        return self.without_progress > BUDGET.limit or is_away_too_long


def admit_attempt(store: Store, read_progress: Callable[[], str] = str) -> None:
    """Record this attempt below `store`, or refuse it.

    Args:
        store: holds the `RECORD`; readers of runs do not look there.
        read_progress: names what was reached so far, such as resume points; a change is progress.

    Raises:
        Exhausted: a budget is used up, or the class of the last end is not retried.
        UserError: the last one ran out of memory and there is no higher limit.
    """
    number = read_attempt()
    if number < 1:
        return
    # The workflow engine passes phase, exit code and message, with a space between.
    phase, _, ending = os.environ.get(LAST_END, "").partition(" ")
    code_text, _, message = ending.partition(" ")
    try:
        code = int(code_text)
    except ValueError:
        code = NO_EXIT_CODE
        message = ending
    # The pods of a JobSet are not told how the last attempt ended.
    end = classify_end(phase, code, message) if LAST_END in os.environ else FOR_NOW
    last_end = f"{end.name}, {describe_exit(code, message)}"
    check_retried(end, code, last_end)
    progress = read_progress()
    record = read_record(store, number - 1, progress).add(end, progress)
    if end.budget is MEMORY_BUDGET:
        check_more_memory(record)
    if record.is_used_up:
        count = max(record.without_progress, record.unavailable)
        raise Exhausted(
            f"{format_count(count, 'attempt')} in a row ended without progress; the last one: {last_end}"
        )
    store.put(RECORD, record.model_dump_json().encode())


def check_retried(end: EndClass, code: int, last_end: str) -> None:
    """Check that the class of the last end is retried, where its exit code is.

    Argo and a JobSet start a pod again for a code that classes share; its own class is known here.

    Args:
        end: the class.
        code: of the last attempt.
        last_end: the end in words.

    Raises:
        Exhausted: it is not.
    """
    if not end.is_retried and code in RETRIED_CODES:
        raise Exhausted(f"the last attempt's end is not tried again: {last_end}")


def check_more_memory(record: Record) -> None:
    """Check that an attempt after one that ran out of memory has a higher limit, and that no
    other has run out of it since the last progress.

    Args:
        record: with the last attempt.

    Raises:
        UserError: there is no higher limit, or it was not enough.
    """
    limit = os.environ.get(MORE_MEMORY)
    if not limit:
        raise UserError(
            "memory",
            None,
            "the last attempt ran out of memory; set a higher cluster.ROLE.memory, or "
            "memory_on_retry there, the limit of attempts after the first (docs/ends.md)",
        )
    if record.out_of_memory > MEMORY_BUDGET.limit:
        raise UserError("memory_on_retry", limit, "was not enough either; set a higher one")


def read_record(store: Store, attempt: int, progress: str) -> Record:
    """Read the record that attempt number `attempt` left. If it left none, as it ended before
    `admit_attempt`, the record is empty.
    """
    with contextlib.suppress(ValidationError):
        record = Record.model_validate_json(store.get(RECORD) or b"")
        if record.attempt == attempt:
            return record
    return Record(attempt=attempt, progress=progress)


def wait_before_ending() -> None:
    """Wait before this attempt ends because a service is unavailable, or until SIGTERM.

    The wait doubles with each attempt, up to `LONGEST_WAIT_S`. A workflow engine's own pause is
    short, and its status keeps every attempt.
    """
    number = read_attempt()
    if not number:
        return
    stopped = threading.Event()
    with forward_signals(lambda _: stopped.set(), [signal.SIGTERM]):
        # The exponent is bounded, as attempts are not.
        stopped.wait(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0 ** min(number, 10)))


def record_progress(store: Store) -> None:
    """Forget the attempts so far: this one has brought progress.

    A server calls it when it has answered (`inference/http_api.py`). A stage does not: its resume
    points and its commit are its progress.
    """
    if read_attempt():
        store.delete(RECORD)


def read_attempt() -> int:
    """Read the number of this attempt, from 0; 0 outside a pod."""
    return int(os.environ.get(ATTEMPT) or 0)
