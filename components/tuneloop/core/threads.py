"""Work that goes on beside the rest of a program, and the end of a process in which some may go on."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn


@contextmanager
def repeat_in_background(work: Callable[[], None], pause_s: float) -> Iterator[None]:
    """Call `work` on another thread every `pause_s` seconds, until the block ends."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(pause_s):
            work()

    thread = threading.Thread(target=repeat, daemon=True, name=work.__name__)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def end_process(code: int) -> NoReturn:
    """End this process with an exit code, after its threads and what is registered for its end.

    The interpreter is not taken apart. That takes half a second where torch is loaded, and threads of native libraries
    may still run then, and abort a command that has succeeded ("terminate called without an active exception").
    """
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end: joins, then exit functions
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    os._exit(code)
