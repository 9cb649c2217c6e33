"""The thread that owns the engine in a server.

Requests that come at the same time share its batches. Commands run in their order. A change of
weights happens between two steps: running requests finish first (``wait``) or go on with the new
weights afterwards (``keep``). No request is admitted or stepped meanwhile, as the same thread does
that; whether or not the change succeeds, it then continues with the waiting commands. So no pause
can be forgotten, except one that a client requests (`EngineLoop.pause`, for a fleet that is
refitted). An idle loop sleeps.

`inference/server.py` starts it, `inference/http_api.py` and `inference/follower.py` put commands
into it, each from other threads. All that touches the engine has to go through `call`; only the
attributes of `ServedEngine` and `count_requests` may be read from other threads. The tests are
`tests/unit/inference/test_batches.py` and `tests/unit/inference/test_serve.py`.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeVar

from tuneloop.core.errors import UserError
from tuneloop.formats.rollouts import Completion, Request
from tuneloop.inference.engines import Sampling
from tuneloop.inference.refusals import Refused
from tuneloop.inference.served import Answer, ServedEngine, Tokens
from tuneloop.sharing.snapshot import SnapshotFailed

Mode = Literal["wait", "keep"]
"""What becomes of running requests when weights change, in vLLM's words: they finish first
(``wait``), or go on with the new weights (``keep``). `inference/server.py` lists both for its
option ``--pause``.
"""
Emit = Callable[[int, Any], None]
"""The answers to a group of requests go to this function, as `Ticket.emit` has it."""
P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass
class Ticket:
    """An admitted group of requests.

    Attributes:
        number: of the ticket, which no other has.
        emit: called on the engine's thread with (index of a request, its completions), with (index,
            (number of a completion, `Tokens`)) for what is streamed, or with (-1, what went wrong).
        waiting: index of a request → its completions; None for those that are not finished.
    """

    number: int
    emit: Emit
    waiting: dict[int, list[Completion | None]] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The engine's names of its completions that are not emitted yet.

        `EngineLoop.generate` submits under the same names, and `EngineLoop._finish` takes them
        apart.
        """
        keys: list[str] = []
        for index, group in self.waiting.items():
            for sample in range(len(group)):
                keys.append(f"{self.number}-{index}-{sample}")
        return keys


class EngineLoop(threading.Thread):
    """Serves an engine to many callers.

    Any thread may use `call`, `cancel`, `stop` and `trouble`. All other methods run on the loop's
    own thread, by `call`.

    Attributes:
        failed: called once the engine has failed and the process can serve no more.
        change_phase: called when the engine goes to sleep (True) or wakes up (False).
        broken: why the engine has failed, or empty. It is never unset: the process ends
            (`inference/server.py`), and is started again.
        asleep: whether the engine has released its device's memory.
        waking: whether it is asleep, or awake without weights.
        paused: whether a client has paused generation. Neither a change of weights nor sleep ends a
            pause.
    """

    def __init__(self, engine: ServedEngine) -> None:
        super().__init__(name="engine", daemon=True)
        self.engine = engine
        self.failed: Callable[[], None] = lambda: None
        self.change_phase: Callable[[bool], None] = lambda asleep: None
        self.broken = ""
        self.asleep = False
        self.waking = False
        self.paused = False
        # Requests that wait until a pause or sleep is over.
        self._held: list[Callable[[], None]] = []
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._cancelled: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._numbers = count()
        self._stopping = False

    @property
    def trouble(self) -> str:
        """Why nothing can be served; empty where all is well."""
        if self.broken:
            return f"the engine failed ({self.broken}); restart the server"
        if self.asleep:
            return "the engine sleeps; POST /wake_up"
        return "" if self.engine.digest else "no version is loaded whole; load one"

    def change(
        self,
        model: Path,
        version: int,
        digest: str,
        mode: Mode = "wait",
        check: Callable[[ServedEngine], None] | None = None,
    ) -> dict[str, float]:
        """Change to the weights of a model directory.

        Args:
            model: the directory.
            version: of its weights.
            digest: of the checkpoint that they are of.
            mode: what becomes of running requests.
            check: runs after the change, before a request sees the new weights. An error that it
                raises poisons the engine until a later change succeeds.

        Returns:
            Seconds: ``drain``, until running requests have ended; then ``change`` and ``check``,
            the pause, in which nothing is stepped. `inference/follower.py: _describe_pull` reads
            these names.

        Raises:
            UserError: the engine refuses the model, and serves what it served before.
            Refused: with 503, the change failed.
        """
        start = time.perf_counter()
        if mode == "wait" and not self.paused:
            self._drain()
        if self.broken or self.engine.is_suspended:
            raise Refused(503, self.trouble)
        drained = time.perf_counter()
        served = (self.engine.version, self.engine.digest)
        failure: Exception | None = None
        try:
            self.engine.change(model, version, digest)
            changed = time.perf_counter()
            if check is not None:
                check(self.engine)
        except Exception as error:
            if isinstance(error, UserError) and (self.engine.version, self.engine.digest) == served:
                self._release()
                raise
            # Some of the weights may be those of the new version already.
            self.engine.poison()
            failure = error
        self.waking = self.asleep
        # After a failure requests are refused until a version is loaded.
        self._release()
        if failure:
            problem = f"loading version {version} failed ({failure}); load a version again"
            raise Refused(503, problem) from failure
        return {
            "drain": drained - start,
            "change": changed - drained,
            "check": time.perf_counter() - changed,
        }

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        version: int | None,
        min_version: int | None,
        emit: Emit,
        digest: str | None = None,
        *,
        prompt_logprobs: bool = False,
        stream: bool = False,
    ) -> Ticket:
        """Admit requests; a deterministic engine first finishes earlier ones.

        Args:
            requests: to complete.
            sampling: of them all.
            version: the one that has to be served; None: any.
            min_version: the oldest that may be served; None: any.
            emit: of the `Ticket`.
            digest: of the checkpoint that has to be served; None: any.
            prompt_logprobs: as `ServedEngine.submit`.
            stream: as `ServedEngine.submit`.

        Raises:
            Refused: 409 for another version, 503 where none is served, 400 for bad requests.
        """
        if self.engine.deterministic:
            self._drain()
        self._check(version, min_version, digest)
        self.engine.begin_batch()
        ticket = Ticket(next(self._numbers), emit)
        try:
            for i, request in enumerate(requests):
                ticket.waiting[i] = [None] * len(request.seeds)
                for j, seed in enumerate(request.seeds):
                    self.engine.submit(
                        f"{ticket.number}-{i}-{j}",
                        request.prompt_ids,
                        seed,
                        sampling,
                        prompt_logprobs=prompt_logprobs,
                        stream=stream,
                    )
        except Exception as error:
            # What was submitted has no ticket, so that its completions could not be emitted.
            self.engine.abort(ticket.keys)
            if isinstance(error, ValueError):
                raise Refused(400, f"request {i}: {error}") from error
            raise
        self._tickets[ticket.number] = ticket
        return ticket

    def pause(self, mode: Mode) -> None:
        """Generate nothing until `resume`.

        Running requests end first (``wait``) or freeze (``keep``); new ones wait.
        """
        if mode == "wait" and not self.paused:
            self._drain()
        self.paused = True

    def resume(self) -> None:
        """End a pause; nothing happens if there is none."""
        self.paused = False
        self._release()

    def sleep(self, level: int) -> None:
        """Release the device's memory, as `ServedEngine.sleep` does, once all requests have finished.

        New requests wait.
        """
        self._drain()
        self.engine.sleep(level)
        self.asleep = True
        self.waking = True
        self.change_phase(True)

    def wake_up(self) -> None:
        """Take the device's memory again.

        Where the weights are gone, requests wait until they are loaded.
        """
        self.change_phase(False)
        self.engine.wake_up()
        self.asleep = False
        self.waking = self.waking and not self.engine.digest
        self._release()

    def call(self, work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Future[Result]:
        """Queue `work` for the engine's thread, which runs it between two steps.

        `generate` waits until a pause or sleep is over. It alone does: any other work runs at once,
        also while the engine sleeps.
        """
        answer: Future[Result] = Future()

        def execute() -> None:
            if work == self.generate and (self.paused or self.waking):
                self._held.append(execute)
            # Where the caller no longer waits, nothing is done.
            elif answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(work(*args, **kwargs))
                except Exception as error:
                    if isinstance(error, SnapshotFailed):
                        self.broken = str(error)
                        self.failed()
                    answer.set_exception(error)

        self._inbox.put(execute)
        return answer

    def cancel(self, ticket: Ticket) -> None:
        """Drop what is still running of requests whose caller has left."""
        self._cancelled.put(ticket)
        # The thread may be waiting for a command.
        self._inbox.put(lambda: None)

    def stop(self) -> None:
        """End the thread after the current step."""
        self._stopping = True
        self._inbox.put(lambda: None)

    def run(self) -> None:
        while not self._stopping:
            # With nothing to step it sleeps until a command comes.
            if self.paused or not self._tickets:
                self._inbox.get()()
            # All waiting requests join the next step, so that they share its batch.
            while not self._inbox.empty():
                self._inbox.get()()
            if not self.paused:
                self._step()

    def _release(self) -> None:
        """Admit the waiting requests, unless the engine sleeps or is paused."""
        commands = self._held
        self._held = []
        for execute in commands:
            execute()

    def _drain(self) -> None:
        """Finish all admitted requests."""
        while self._tickets:
            self._step()

    def _check(self, version: int | None, min_version: int | None, digest: str | None) -> None:
        """Check that what is served may answer a request. Raises Refused where it may not."""
        if self.trouble:
            raise Refused(503, self.trouble)
        served = f"version {self.engine.version}"
        if version not in (None, self.engine.version):
            demand = f"version {version}"
        elif min_version is not None and self.engine.version < min_version:
            demand = f"version {min_version} or later"
        elif digest not in (None, self.engine.digest):
            served += f" of {self.engine.digest}"
            demand = str(digest)
        else:
            return
        raise Refused(409, f"serves {served}, {demand} was asked for; load it first")

    def _step(self) -> None:
        """Drop cancelled requests, run one step of the engine, and emit finished completions."""
        while not self._cancelled.empty():
            ticket = self._cancelled.get()
            if self._tickets.pop(ticket.number, None):
                self.engine.abort(ticket.keys)
        if not self._tickets:
            return
        try:
            for key, answer in self.engine.step():
                self._finish(key, answer)
        except Exception as error:
            # The engine is not trusted any more: all waiting and later callers are told.
            self.broken = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            for ticket in self._tickets.values():
                ticket.emit(-1, self.trouble)
            self._tickets.clear()
            self.failed()

    def _finish(self, key: str, answer: Answer) -> None:
        """Emit new tokens at once, and completions when all of their request have ended."""
        # As `Ticket.keys` writes them.
        number, index, sample = map(int, key.split("-"))
        ticket = self._tickets[number]
        if isinstance(answer, Tokens):
            ticket.emit(index, (sample, answer))
            return
        group = ticket.waiting[index]
        group[sample] = answer
        if all(group):
            ticket.emit(index, ticket.waiting.pop(index))
        if not ticket.waiting:
            del self._tickets[number]
