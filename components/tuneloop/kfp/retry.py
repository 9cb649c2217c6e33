"""Retry a stage in its own process.

KFP's launcher turns every exit code into 1, so KFP cannot tell a temporary failure (75) from the
user's mistake (2). A stage that ends with 75 by itself is run again within the same budget as on
Argo (`tuneloop.core.attempts`); one that was told to end is not. Which ends these are, the table says:
`tuneloop.core.ends.EndClass.is_repeated_in_process`.
"""

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from tuneloop.core.artifacts import dump_checked_json
from tuneloop.core.attempts import FAILURE, Record
from tuneloop.core.ends import classify_end
from tuneloop.core.errors import (
    TERMINATION_LOG,
    Retryable,
    UserError,
    write_termination_message,
)
from tuneloop.core.store import Store
from tuneloop.core.threads import forward_signals

PAUSE_S = 10.0
"""Seconds between two attempts, as on Argo (`argo/pod_fields.py: PAUSE`) and between two pods of a
task (`task_pod.py: configure_task_pod`)."""


def retry_in_process(
    run: Callable[[], int],
    read_progress: Callable[[], str],
    pause_s: float = PAUSE_S,
    *,
    url: str = "",
) -> int:
    """Call `run` until it ends with another code than 75, its budget is used up, or SIGTERM has
    arrived.

    Args:
        run: the stage, or another step of a task. It finds by itself what an earlier call has
            committed. Its errors have to be exit codes (`core/errors.py: report_errors`): an
            exception ends the task at once.
        read_progress: returns a text; one that differs from the last one is progress, and begins
            the budget anew. `str` stands for a step that has no progress.
        pause_s: seconds between two calls.
        url: where a failure is recorded, below an output; by default nowhere. `runs/committed.py:
            read_failures` reads it for the page and for `watch`.

    Returns:
        The exit code of the last call.
    """
    # Ranks of torchrun are not run again: they would have to agree on it.
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        return run()
    stopped = threading.Event()
    record = Record(attempt=0, progress="")
    with forward_signals(lambda _: stopped.set(), [signal.SIGTERM]):
        while True:
            code, line = _run_and_read_line(run)
            end = classify_end("Failed", code, line)
            if not end.is_repeated_in_process or stopped.is_set():
                break
            progress = record.progress
            # Perhaps the store is the unavailable service.
            with contextlib.suppress(Retryable):
                progress = read_progress()
            record = record.add(end, progress)
            if record.is_used_up:
                break
            print(f"{end.name}: retrying in {pause_s:g} s", file=sys.stderr, flush=True)
            if stopped.wait(pause_s):
                break
    if line:
        write_termination_message(line)
    if code and url:
        failure = {"message": line or f"exit code {code}", "time": time.time()}
        # KFP does not say why a task failed: `runs/committed.py` reads it from this file. The store
        # may be what is down.
        with contextlib.suppress(UserError, Retryable):
            Store(url).put(FAILURE, dump_checked_json(failure, FAILURE))
    return code


def _run_and_read_line(run: Callable[[], int]) -> tuple[int, str]:
    """Return the exit code of `run`, and the line that says why it ended."""
    previous_path = os.environ.get(TERMINATION_LOG)
    with tempfile.NamedTemporaryFile() as file:
        # The kubelet reads the pod's own file once the last attempt has ended.
        os.environ[TERMINATION_LOG] = file.name
        try:
            return run(), Path(file.name).read_text()
        finally:
            del os.environ[TERMINATION_LOG]
            if previous_path is not None:
                os.environ[TERMINATION_LOG] = previous_path
