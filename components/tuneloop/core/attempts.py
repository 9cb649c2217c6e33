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
    FOR_NOW,
    MEMORY,
    NO_EXIT_CODE,
    classify_end,
    describe_exit,
)
from tuneloop.core.errors import Exhausted, UserError
from tuneloop.core.store import Store
from tuneloop.core.threads import forward_signals

BUDGET = 3
"""The number of new attempts in a row that are allowed without progress; ends that do not count are not limited."""
ATTEMPT, LAST_END, MORE_MEMORY = "TUNELOOP_ATTEMPT", "TUNELOOP_LAST_END", "TUNELOOP_MEMORY_ON_RETRY"
"""Environment variables of a pod: the attempt's number, from 0; phase, exit code and message of the previous attempt;
the memory limit of later attempts, where it is higher than that of the first."""
LONGEST_WAIT_S = 60.0
RECORD = "attempts.json"
FAILURE, FAILED = "failure.json", {"time": float, "message": str}
"""The file below an output that says why its stage failed, if no engine tells readers; the types of its fields."""


class Record(BaseModel, frozen=True):
    """The record that an attempt leaves for the next one: how many attempts in a row counted and made no progress
    (`without_progress`), and how many in a row ended because a service was unavailable (`unavailable`)."""

    attempt: int
    without_progress: int = 0
    unavailable: int = 0
    progress: str


def admit_attempt(store: Store, read_progress: Callable[[], str] = str) -> None:
    """Record this attempt below `store`, or refuse it. `read_progress` names what was reached so far, such as resume
    points; a change is progress. Raises Exhausted if more than `BUDGET` attempts in a row (`AWAY_BUDGET` if a service
    is unavailable) made no progress, UserError if the last one ran out of memory and this one has no more."""
    number = read_attempt()
    if number < 1:
        return
    phase, _, rest = os.environ.get(LAST_END, "").partition(" ")  # as the workflow engine passes it
    code, message = NO_EXIT_CODE, rest
    with contextlib.suppress(ValueError):
        code, message = int(rest.partition(" ")[0]), rest.partition(" ")[2]
    end = classify_end(phase, code, message) if LAST_END in os.environ else FOR_NOW
    if end is MEMORY:
        if not (limit := os.environ.get(MORE_MEMORY)):
            remedy = "set a higher cluster.ROLE.memory, or memory_on_retry there, the limit of attempts after the first"
            raise UserError(
                "memory", None, f"the last attempt ran out of memory; {remedy} (docs/ends.md)"
            )
        if number > 1:  # the attempt that ended was not the first, so it had the higher limit
            raise UserError("memory_on_retry", limit, "was not enough either; set a higher one")
    progress = read_progress()
    same = Record(attempt=0, progress=progress)
    with contextlib.suppress(
        ValidationError
    ):  # the attempt before this one may not have come so far
        before = Record.model_validate_json(store.get(RECORD) or b"")
        same = before if (before.attempt, before.progress) == (number - 1, progress) else same
    count = same.without_progress + end.counts
    away = same.unavailable + 1 if end is AWAY else 0
    if count > BUDGET or away > AWAY_BUDGET:
        last = f"{end.name}, {describe_exit(code, message)}"
        raise Exhausted(
            f"{max(count, away)} attempts in a row ended without progress; the last one: {last}"
        )
    record = Record(attempt=number, without_progress=count, unavailable=away, progress=progress)
    store.put(RECORD, record.model_dump_json().encode())


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
