"""The budget of a stage's or a server's attempts: it counts attempts without progress, and knows no
clock.

A workflow engine starts a pod again because of how it ended (`tuneloop.core.ends`), and cannot see
whether that helps. So the next attempt is told how the last one ended (`LAST_END`) and its own
number (`ATTEMPT`). It reads the record that the previous attempt left below its output, and gives
up once more than `BUDGET` counted attempts in a row have made no progress: no commit, no new resume
point, no answered request. A first attempt reads and writes nothing.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Callable

from pydantic import BaseModel, ValidationError

from tuneloop.core.ends import (
    AWAY,
    AWAY_BUDGET,
    BUDGET,
    FOR_NOW,
    MEMORY,
    NO_EXIT_CODE,
    EndClass,
    classify_end,
    describe_exit,
)
from tuneloop.core.errors import Exhausted, UserError
from tuneloop.core.store import Store
from tuneloop.core.threads import forward_signals

ATTEMPT = "TUNELOOP_ATTEMPT"
LAST_END = "TUNELOOP_LAST_END"
MORE_MEMORY = "TUNELOOP_MEMORY_ON_RETRY"
"""Environment variables of a pod: the attempt's number, from 0; phase, exit code and message of the
previous attempt; the memory limit of later attempts, where it is higher than that of the first."""
FIRST_WAIT_S = 10.0
LONGEST_WAIT_S = 60.0
RECORD = "attempts.json"
FAILURE = "failure.json"
FAILED = {"time": float, "message": str}
"""The file below an output that says why its stage failed, if no engine tells readers; the types of
its fields."""


class Record(BaseModel, frozen=True):
    """The budget of attempts, as an attempt leaves it for the next one.

    Attributes:
        attempt: the number of the attempt that wrote it, from 0.
        without_progress: how many attempts in a row counted and made no progress.
        unavailable: how many in a row ended because a service was unavailable.
        progress: what was reached, such as the names of resume points.
    """

    attempt: int
    without_progress: int = 0
    unavailable: int = 0
    progress: str

    def add(self, end: EndClass, progress: str) -> "Record":
        """Return the record after one more attempt that ended in a class, having reached
        `progress`.
        """
        has_progressed = progress != self.progress
        previous = Record(attempt=0, progress=progress) if has_progressed else self
        return Record(
            attempt=self.attempt + 1,
            without_progress=previous.without_progress + end.counts,
            unavailable=previous.unavailable + 1 if end is AWAY else 0,
            progress=progress,
        )

    @property
    def is_used_up(self) -> bool:
        """Whether no further attempt is allowed."""
        return self.without_progress > BUDGET or self.unavailable > AWAY_BUDGET


def admit_attempt(store: Store, read_progress: Callable[[], str] = str) -> None:
    """Record this attempt below `store`, or refuse it.

    Args:
        read_progress: names what was reached so far, such as resume points; a change is progress.

    Raises:
        Exhausted: more than `BUDGET` attempts in a row (`AWAY_BUDGET` if a service is unavailable)
            made no progress.
        UserError: the last one ran out of memory and this one has no more.
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
    if end is MEMORY:
        check_more_memory(number)
    progress = read_progress()
    record = read_record(store, number - 1, progress).add(end, progress)
    if record.is_used_up:
        count = max(record.without_progress, record.unavailable)
        last_end = f"{end.name}, {describe_exit(code, message)}"
        raise Exhausted(
            f"{count} attempts in a row ended without progress; the last one: {last_end}"
        )
    store.put(RECORD, record.model_dump_json().encode())


def check_more_memory(number: int) -> None:
    """Check that attempt `number`, after one that ran out of memory, has more than that one had.

    Raises UserError if it has not.
    """
    limit = os.environ.get(MORE_MEMORY)
    if not limit:
        raise UserError(
            "memory",
            None,
            "the last attempt ran out of memory; set a higher cluster.ROLE.memory, or "
            "memory_on_retry there, the limit of attempts after the first (docs/ends.md)",
        )
    # All attempts but the first have the higher limit.
    if MEMORY.max_attempts is not None and number > MEMORY.max_attempts:
        raise UserError("memory_on_retry", limit, "was not enough either; set a higher one")


def read_record(store: Store, attempt: int, progress: str) -> Record:
    """Read the record that attempt number `attempt` left; an empty one where it did not come so
    far.
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
    """Forget the attempts so far: this one has brought progress."""
    if read_attempt():
        store.delete(RECORD)


def read_attempt() -> int:
    """Read the number of this attempt, from 0; 0 outside a pod."""
    return int(os.environ.get(ATTEMPT) or 0)
