"""Work that goes on beside the rest of a program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


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
