"""Work that goes on beside the rest of a program, the signals that end it, and its end while threads may go on."""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from signal import SIGINT, SIGTERM
from typing import Any, NoReturn, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


@contextmanager
def repeat_in_background(work: Callable[[], object], pause_s: float) -> Iterator[None]:
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


def map_ahead(
    function: Callable[[Item], Made], items: Iterable[Item], threads: int = 1
) -> Iterator[Made]:
    """Yield `function` of each item, in order; `threads` threads work ahead, and at most as many results wait."""
    waiting = deque[Future[Made]]()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                if len(waiting) == 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def forward_signals(
    handler: Callable[[int], object], numbers: Iterable[int] = (SIGTERM, SIGINT)
) -> Iterator[None]:
    """Call `handler` with the number of each of these signals that arrives in the block. A handler of the caller's
    hears them, too, as it may have more stages to run. Only the main thread hears signals; on another, do nothing."""
    previous: dict[int, Any] = {}

    def handle(number: int, frame: object) -> None:
        handler(number)
        if callable(before := previous.get(number)) and before is not signal.default_int_handler:
            before(number, frame)

    with contextlib.suppress(ValueError):  # not the main thread
        for number in numbers:
            previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, before in previous.items():
            signal.signal(number, before)


def end_process(code: int, report: Callable[[int], None] = lambda code: None) -> NoReturn:
    """End this process with an exit code, after its threads and exit functions, and then `report` with the code.

    The interpreter is not finalized: that takes half a second where torch is loaded, and threads of native libraries
    may still run then, and abort a command that has succeeded ("terminate called without an active exception")."""
    threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter does at its end: joins, then exit functions
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    report(code)
    os._exit(code)


class Background:
    """Work that a stage defers until its output is committed, one piece at most; no result depends on it. Code that
    uses its product, or changes its input, waits for it first. `beside`: run it on a thread, as more stages follow."""

    def __init__(self) -> None:
        self.beside = False
        self.work: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Begin `work`, which no signal ends, once what was begun before is done. Raises as `wait`."""
        self.wait()
        if self.beside:
            pool = ThreadPoolExecutor(1)
            self.work = pool.submit(work)
            pool.shutdown(wait=False)
        else:
            with forward_signals(lambda number: None):
                work()

    def wait(self) -> None:
        """Wait for the work that was begun, and raise the error that ended it."""
        work = self.work
        self.work = None
        if work:
            work.result()


BACKGROUND = Background()
"""The background work of this process."""
