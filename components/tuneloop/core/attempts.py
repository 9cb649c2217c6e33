"""The budget of a stage's or a server's attempts: it counts attempts without progress, and knows no clock.

A workflow engine starts a pod again because of how it ended (`tuneloop.core.ends`), and cannot see whether that helps.
So the next attempt is told how the last one ended (`LAST_END`) and its own number (`ATTEMPT`). It reads the record that
the previous attempt left below its output, and gives up once more than `BUDGET` counted attempts in a row have made no
progress: no commit, no new resume point, no answered request. A first attempt reads and writes nothing."""

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
"""Environment variables of a pod: the attempt's number, from 0; phase, exit code and message of the previous attempt;
the memory limit of later attempts, where it is higher than that of the first."""
LONGEST_WAIT_S = 60.0
RECORD = "attempts.json"
FAILURE = "failure.json"
FAILED = {"time": float, "message": str}
"""The file below an output that says why its stage failed, if no engine tells readers; the types of its fields."""


class Record(BaseModel, frozen=True):
    """The budget of attempts: how many in a row counted and made no progress (`without_progress`), and how many in a
    row ended because a service was unavailable (`unavailable`). An attempt leaves it for the next one."""

    attempt: int
    without_progress: int = 0
    unavailable: int = 0
    progress: str

    def add(self, end: EndClass, progress: str) -> "Record":
        """Return the record after one more attempt that ended in a class, having reached `progress`."""
        before = self if progress == self.progress else Record(attempt=0, progress=progress)
        return Record(
            attempt=self.attempt + 1,
            without_progress=before.without_progress + end.counts,
            unavailable=before.unavailable + 1 if end is AWAY else 0,
            progress=progress,
        )

    @property
    def is_used_up(self) -> bool:
        """Whether no further attempt is allowed."""
        return self.without_progress > BUDGET or self.unavailable > AWAY_BUDGET


def admit_attempt(store: Store, read_progress: Callable[[], str] = str) -> None:
    """Record this attempt below `store`, or refuse it. `read_progress` names what was reached so far, such as resume
    points; a change is progress. Raises Exhausted if more than `BUDGET` attempts in a row (`AWAY_BUDGET` if a service
    is unavailable) made no progress, UserError if the last one ran out of memory and this one has no more."""
    number = read_attempt()
    if number < 1:
        return
    phase, _, rest = os.environ.get(LAST_END, "").partition(" ")  # as the workflow engine passes it
    code = NO_EXIT_CODE
    message = rest
    with contextlib.suppress(ValueError):
        code = int(rest.partition(" ")[0])
        message = rest.partition(" ")[2]
    # The pods of a JobSet are not told how the last attempt ended.
    end = classify_end(phase, code, message) if LAST_END in os.environ else FOR_NOW
    if end is MEMORY:
        check_more_memory(number)
    progress = read_progress()
    record = read_record(store, number - 1, progress).add(end, progress)
    if record.is_used_up:
        count = max(record.without_progress, record.unavailable)
        last = f"{end.name}, {describe_exit(code, message)}"
        raise Exhausted(f"{count} attempts in a row ended without progress; the last one: {last}")
    store.put(RECORD, record.model_dump_json().encode())


def check_more_memory(number: int) -> None:
    """Check that attempt `number`, after one that ran out of memory, has more than that one had. Raises UserError."""
    limit = os.environ.get(MORE_MEMORY)
    if not limit:
        remedy = "set a higher cluster.ROLE.memory, or memory_on_retry there, the limit of attempts after the first"
        raise UserError(
            "memory", None, f"the last attempt ran out of memory; {remedy} (docs/ends.md)"
        )
    # All attempts but the first have the higher limit.
    if MEMORY.most is not None and number > MEMORY.most:
        raise UserError("memory_on_retry", limit, "was not enough either; set a higher one")


def read_record(store: Store, attempt: int, progress: str) -> Record:
    """Read the record that attempt number `attempt` left; an empty one where it did not come so far."""
    with contextlib.suppress(ValidationError):
        record = Record.model_validate_json(store.get(RECORD) or b"")
        if record.attempt == attempt:
            return record
    return Record(attempt=attempt, progress=progress)


def wait_before_ending() -> None:
    """Wait before this attempt ends because a service is unavailable: longer with each attempt, at most
    `LONGEST_WAIT_S`, or until SIGTERM. A workflow engine's own pause is short, and its status keeps every attempt."""
    if not (number := read_attempt()):
        return
    stopped = threading.Event()
    with forward_signals(lambda _: stopped.set(), [signal.SIGTERM]):
        stopped.wait(min(LONGEST_WAIT_S, 10.0 * 2.0 ** min(number, 10)))


def record_progress(store: Store) -> None:
    """Forget the attempts so far: this one has brought progress."""
    if read_attempt():
        store.delete(RECORD)


def read_attempt() -> int:
    """Read the number of this attempt, from 0; 0 outside a pod."""
    return int(os.environ.get(ATTEMPT) or 0)
