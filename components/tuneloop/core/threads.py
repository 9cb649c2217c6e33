"""Work on threads beside a program, the signals that end it, and its end while threads run.

`BACKGROUND` is the one piece of state: a pod of several iterations sets `is_concurrent`
(`local/iterations.py`), `core/component.py` begins the work of `Stage.commit_later` there, and
`training/checkpoint.py` waits for it before it changes the trainer.
"""

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
Result = TypeVar("Result")


@contextmanager
def repeat_in_background(work: Callable[[], object], pause_s: float) -> Iterator[None]:
    """Call `work` on another thread every `pause_s` seconds, until the block ends."""
    finished = threading.Event()

    def repeat() -> None:
        while not finished.wait(pause_s):
            work()

    thread = threading.Thread(target=repeat, daemon=True, name=work.__name__)
    thread.start()
    try:
        yield
    finally:
        finished.set()
        thread.join()


def map_ahead(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    threads: int = 1,
) -> Iterator[Result]:
    """Yield `function` of each item, in order, while `threads` threads work ahead.

    At most `threads` results wait for the caller, and as many items are being worked on: that
    bounds the memory of large items.
    """
    waiting: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for item in items:
                waiting.append(pool.submit(function, item))
                # One item a thread is worked on, and one is done.
                if len(waiting) == 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def forward_signals(
    handler: Callable[[int], object],
    numbers: Iterable[int] = (SIGTERM, SIGINT),
) -> Iterator[None]:
    """Call `handler` with the number of each of these signals that arrives in the block.

    The handler that was installed before is called, too, as its owner may have more stages to run.
    Only Python's own one for SIGINT is not. Only the main thread can install handlers; on another
    one this does nothing.
    """
    previous: dict[int, Any] = {}

    def handle(number: int, frame: object) -> None:
        handler(number)
        earlier = previous.get(number)
        # Python's own handler of SIGINT would raise KeyboardInterrupt in the midst of a step.
        if callable(earlier) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    # On any thread but the main one `signal` raises ValueError.
    with contextlib.suppress(ValueError):
        for number in numbers:
            previous[number] = signal.signal(number, handle)
    try:
        yield
    finally:
        for number, earlier in previous.items():
            signal.signal(number, earlier)


def end_process(code: int, report: Callable[[int], None] = lambda code: None) -> NoReturn:
    """End this process with an exit code, after its threads and exit functions, and then `report`
    with the code. `local/processes.py` has another function of this name, which ends a child.

    The interpreter is not finalized: that takes half a second where torch is loaded, and threads of
    native libraries may still run then, and abort a command that has succeeded ("terminate called
    without an active exception").
    """
    # The interpreter does the same at its end: it joins threads, then calls exit functions.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
    report(code)
    os._exit(code)


class Background:
    """Work that a stage defers until its output is committed, one piece at most.

    No result depends on it. Code that uses its product, or changes its input, waits for it first:
    today `training/checkpoint.py`, whose trainer the thread may still read.

    Attributes:
        is_concurrent: whether the work runs on a thread, as more stages follow.
        work: the work that was begun on a thread, until it was waited for.
    """

    def __init__(self) -> None:
        self.is_concurrent = False
        self.work: Future[None] | None = None

    def begin(self, work: Callable[[], None]) -> None:
        """Begin `work`, which no signal ends, once earlier work is done. Raises as `wait`."""
        self.wait()
        if self.is_concurrent:
            pool = ThreadPoolExecutor(1)
            self.work = pool.submit(work)
            pool.shutdown(wait=False)
        else:
            with forward_signals(lambda number: None):
                work()

    def wait(self) -> None:
        """Wait for the work that was begun, and raise the error that ended it."""
        work = self.work
        # It counts as waited for even if it failed.
        self.work = None
        if work:
            work.result()


BACKGROUND = Background()
"""The background work of this process."""
