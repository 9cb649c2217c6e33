"""What a stage leaves to be done once its output stands, beside the stages that follow it in the same process.

No result depends on it: who needs what it makes, or changes what it reads, waits for it first.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from tuneloop.core.threads import forward_signals


class Background:
    """At most one piece of work. `beside`: whether stages follow in this process, beside which work goes on; else it is
    done at once."""

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
        """Wait for what was begun, and raise what ended it."""
        work, self.work = self.work, None
        if work:
            work.result()


BACKGROUND = Background()
"""That of this process."""
