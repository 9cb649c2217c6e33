"""The errors that decide a process's exit code.

Exit codes are part of the stage contract: 0 committed, 2 the user's mistake (never retried),
75 interrupted or temporarily impossible (retry), anything else a bug.
"""

from __future__ import annotations

import sys

EXIT_USER = 2
EXIT_RETRY = 75  # EX_TEMPFAIL of sysexits.h


class UserError(ValueError):
    """A mistake only the user can mend: one line with the field, the value and the remedy."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field, self.value, self.remedy = field, value, remedy
        super().__init__(f"{field}: {value!r}: {remedy}")


class Retryable(RuntimeError):
    """The stage stopped through no fault of its inputs; running it again is right."""


class NoKeys(Retryable):
    """Nothing here says with which keys to ask a store, and the machine's own are not given out.

    A pod is tried again, as its node may give them later; for who types a command it is a mistake.
    """

    def __init__(self, mistake: UserError) -> None:
        self.mistake = mistake
        super().__init__(str(mistake))


class Interrupted(Retryable):
    """SIGTERM or SIGINT arrived; what resume needs has been committed."""


class Corrupt(UserError):
    """Bytes that differ from what their manifest says."""


def say(line: str, code: int) -> int:
    """Print one line on standard error, and return the exit code that goes with it."""
    print(" ".join(line.split()), file=sys.stderr, flush=True)
    return code


def failed(error: UserError | Retryable) -> int:
    """Say what ended a program, and return its exit code."""
    if isinstance(error, UserError):
        return say(f"error: {error}", EXIT_USER)
    return say(f"interrupted: {error}", EXIT_RETRY)
