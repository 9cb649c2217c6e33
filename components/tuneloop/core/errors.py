"""The errors that decide a process's exit code, which is part of the stage contract.

It is 0 if the stage has committed, 2 for the user's mistake (never retried), 3 for a model that its
gate refuses, 75 if it was interrupted or is temporarily impossible (retried), and 70 if the budget
of attempts is used up. Any other code is a bug.

`core/program.py` and `report_errors` turn them into codes and one line. The beginnings of these
lines are read again by `core/ends.py`, from the pod's termination message.
"""

import difflib
import functools
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ParamSpec

from tuneloop.core import disk_faults

P = ParamSpec("P")
# Exit codes of stages and commands: Argo's retry strategies, the local executor, KFP's tasks and
# users' scripts tell by them what may be run again (docs/commands.md). A further code needs a class
# in `core/ends.py` (`END_CLASSES`), and a place in `choose_exit_code`. `cli/show.py` shows the last
# line of a stage as an error, and `training/delegation.py` blames the user, for codes from 1 to 74
# alone.
EXIT_USER = 2
EXIT_NOT_PROMOTED = 3
# EX_TEMPFAIL of sysexits.h.
EXIT_RETRY = 75
# EX_SOFTWARE: the budget of attempts is used up (`tuneloop.core.attempts`).
EXIT_GAVE_UP = 70
TERMINATION_LOG = "TUNELOOP_TERMINATION_LOG"
"""Variable that names the file for the last line of a pod; default: Kubernetes' own
``/dev/termination-log``."""
INTERRUPTED = "interrupted"
UNAVAILABLE = "unavailable"
FAILED_FOR_NOW = "failed for now"
"""How the last line of a process that ends with `EXIT_RETRY` begins: the class of its end
(`core/ends.py: classify_end`). `training/delegation.py` and `training/torchrun.py` use these words,
too."""
MESSAGE_LENGTH = 2000
"""The longest message in characters: Kubernetes keeps 4,096 bytes of a termination message."""


class UserError(ValueError):
    """A mistake that only the user can mend: one line with the field, the value and the remedy."""

    kind = "error"
    exit_code = EXIT_USER

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        super().__init__(f"{shorten_text(field)}: {shorten_text(repr(value))}: {remedy}")


def shorten_text(text: str, limit: int = 200) -> str:
    """Return a text that is longer than `limit` without its middle, and with its length."""
    if len(text) <= limit:
        return text
    tail = limit // 4
    return f"{text[: limit - tail]}… ({len(text)} characters) …{text[-tail:]}"


def suggest_name(name: str, names: Collection[str]) -> str:
    """Return the remedy for a name that is none of `names`: the nearest of them, or all."""
    nearest = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(names)}"


class NotPromoted(UserError):
    """A model does not pass its gate: the model that was served before is still served.

    It has an exit code of its own, so that scripts can tell it from a mistake;
    `stages/deploy_model.py` raises it.
    """

    kind = "not promoted"
    exit_code = EXIT_NOT_PROMOTED


KINDS = (UserError.kind, NotPromoted.kind, "gave up", INTERRUPTED, UNAVAILABLE, FAILED_FOR_NOW)
NAMED = tuple(f"{kind}:" for kind in KINDS)
"""Matches the beginning of a last line that names the class of its end; `cli/show.py` writes
``error:`` before any other line. `describe_error` words the same beginnings."""


def choose_exit_code(codes: Collection[int | None]) -> int:
    """Choose the exit code of a failed run from the exit codes of its failed pods.

    It is the first of these three that a pod has. All other codes, `EXIT_GAVE_UP` among them,
    become 1. `local/journal.py` and `cluster/submit.py` call it; docs/commands.md lists the codes.
    """
    return next((code for code in (EXIT_USER, EXIT_NOT_PROMOTED, EXIT_RETRY) if code in codes), 1)


class Retryable(RuntimeError):
    """The stage stopped through no fault of its inputs; running it again is right.

    A subclass is `FAILED_FOR_NOW`, three attempts without progress, unless it is an `Interrupted`
    or an `Unavailable`: `describe_error` asks for these two.
    """


class NoKeys(Retryable):
    """No credentials for a store are set, and the machine's metadata service gives none.

    A pod is retried, as its node may give them later; on a command line it is the user's `mistake`.
    """

    def __init__(self, mistake: UserError) -> None:
        self.mistake = mistake
        super().__init__(str(mistake))


class Exhausted(RuntimeError):
    """The budget of attempts is used up: starting again does not help."""


class Interrupted(Retryable):
    """SIGTERM or SIGINT arrived; what resume needs has been committed."""


class Unavailable(Retryable):
    """A store, a server, a device lease or another process of the stage is unavailable: wait,
    however long it takes.
    """


class Corrupt(UserError):
    """Bytes that differ from what their manifest says. It is not retried: the bytes stay as they
    are."""


class DiskError(Unavailable):
    """A disk has no room or no quota, is read-only, or fails.

    What was committed stays, and a retry goes on from it.
    """

    def __init__(self, refusal: disk_faults.Refusal, places: Sequence[Path] = ()) -> None:
        self.is_read_only = refusal.fault is disk_faults.READ_ONLY
        super().__init__(disk_faults.describe_refusal(refusal, places))


def find_disk_error(error: BaseException, places: Sequence[Path] = ()) -> DiskError | None:
    """Return what to raise for an error, of whatever library, that is a disk's refusal.

    Args:
        places: directories that the program writes to, named where no error names a file.

    Returns:
        None for any other error.
    """
    if isinstance(error, Retryable | Exhausted | SystemExit | KeyboardInterrupt | GeneratorExit):
        return None
    # The text of a mistake may quote a user's value: only what it was raised from counts.
    is_mistake = isinstance(error, UserError)
    refusal = disk_faults.find_cause(error) if is_mistake else disk_faults.find_refusal(error)
    return DiskError(refusal, places) if refusal else None


@contextmanager
def name_disk_errors(*places: Path) -> Iterator[None]:
    """Raise DiskError for what any library raises in the block because of a disk.

    Args:
        places: directories that the block writes to.
    """
    try:
        yield
    except BaseException as error:
        disk = find_disk_error(error, places)
        if disk:
            raise disk from error
        raise


def list_chain(error: BaseException | None) -> list[BaseException]:
    """List an error, the one that it was raised from or beside, and so on."""
    chain: list[BaseException] = []
    # Errors may refer to one another in a circle.
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def print_diagnostic(line: str, code: int, replace: bool = True) -> int:
    """Print one line on standard error, and return its exit code, `code`.

    A line that explains a failure is also the pod's termination message, which Argo puts into the
    node's message.

    Args:
        replace: replace the termination message of another rank.
    """
    line = shorten_text(" ".join(line.split()), MESSAGE_LENGTH)
    # A log on a full disk must not change how a program ends.
    with suppress(OSError):
        # One write, as other ranks print, too.
        print(f"{line}\n", end="", file=sys.stderr, flush=True)
    if code:
        write_termination_message(line, replace)
    return code


def flush_output() -> None:
    """Write out what was printed, and drop what a full disk does not take.

    The interpreter would try it again at its end, and replace the program's exit code by 120.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def write_termination_message(line: str, replace: bool = True) -> None:
    """Leave `line` where Kubernetes, or the local executor, reads why a container ended."""
    path = Path(os.environ.get(TERMINATION_LOG, "/dev/termination-log"))
    # Argo would substitute a tag in double braces.
    message = re.sub(r"\{(?=\{)", "{ ", line)[:MESSAGE_LENGTH]
    # A message explains an end, and must not become another one.
    with suppress(OSError):
        if path.is_file() and (replace or not path.stat().st_size):
            path.write_text(message)


def report_errors(program: Callable[P, int]) -> Callable[P, int]:
    """Return `program` such that it says what ended it, and returns that exit code.

    It is for servers, tasks of Kubeflow Pipelines and helpers. Stages have
    `core/program.py: run_component`, which also waits while a service is away, and commands have
    `cli/exits.py`: an error that is to be handled in another way is changed in all three.
    """

    @functools.wraps(program)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            return program(*args, **kwargs)
        except BaseException as error:
            disk = find_disk_error(error)
            if disk:
                return report_error(disk)
            if isinstance(error, UserError | Retryable | Exhausted):
                return report_error(error)
            raise

    return run


def report_error(error: UserError | Retryable | Exhausted) -> int:
    """Say what ended a program, and return its exit code."""
    return print_diagnostic(*describe_error(error))


def describe_error(error: UserError | Retryable | Exhausted) -> tuple[str, int]:
    """Return the line that says what ended a program, and its exit code."""
    if isinstance(error, UserError):
        return f"{error.kind}: {error}", error.exit_code
    if isinstance(error, Exhausted):
        return f"gave up: {error}", EXIT_GAVE_UP
    kind = FAILED_FOR_NOW
    if isinstance(error, Interrupted):
        kind = INTERRUPTED
    elif isinstance(error, Unavailable):
        kind = UNAVAILABLE
    return f"{kind}: {error}", EXIT_RETRY
