"""The one thread that owns a vLLM engine in a server: requests that come at the same time share its batches.

Commands run in the order they came. A load finishes what runs before it touches a weight, and nothing is admitted
meanwhile because the thread that admits is the one that loads; whatever becomes of the load, it then goes on with
the commands that waited. An idle loop sleeps.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from tuneloop.artifacts import Artifact
from tuneloop.engines import Request, Sampling
from tuneloop.engines.vllm import Answer, Vllm
from tuneloop.errors import UserError


class Refused(RuntimeError):
    """The server can not do this, or not now: `status` as HTTP has it."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = status
        super().__init__(reason)


@dataclass
class Ticket:
    """An admitted group of requests.

    Attributes:
        emit: called on the engine's thread with (index of a request, its completions), or (-1, what went wrong).
    """

    number: int
    emit: Callable[[int, Any], None]
    waiting: dict[int, list[Any]] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        return [f"{self.number}-{i}-{j}" for i, group in self.waiting.items() for j in range(len(group))]


class EngineLoop(threading.Thread):
    """Serves an engine to many callers; all methods but `run` may be called from any thread."""

    def __init__(self, engine: Vllm) -> None:
        super().__init__(name="engine", daemon=True)
        self.engine = engine
        self.broken = ""
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._cancelled: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._tickets: dict[int, Ticket] = {}
        self._scores: dict[str, Future[list[float]]] = {}
        self._numbers = count()
        self._stopping = False

    @property
    def trouble(self) -> str:
        """Why nothing can be served; empty where all is well."""
        if self.broken:
            return f"the engine failed ({self.broken}); restart the server"
        return "" if self.engine.digest else "no version is loaded whole; load one"

    def load(self, policy: Artifact, *, force: bool) -> Future[None]:
        """Change to the weights of `policy` once all that runs has finished."""
        return self._command(lambda: self._load(policy, force))

    def generate(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        version: int | None,
        min_version: int | None,
        emit: Callable[[int, Any], None],
    ) -> Future[Ticket]:
        """Admit requests, if the version that is served then satisfies the caller.

        The future raises `Refused`: 409 for another version, 503 where nothing is served, 400 for bad requests.
        """
        return self._command(lambda: self._admit(requests, sampling, version, min_version, emit))

    def score(self, ids: Sequence[int], version: int | None) -> Future[list[float]]:
        """Log-probabilities of `ids`, as `Engine.score`; refused as in `generate`."""
        scored: Future[list[float]] = Future()
        asked = self._command(lambda: self._start_score(ids, version, scored))
        asked.add_done_callback(lambda done: scored.set_exception(e) if (e := done.exception()) else None)
        return scored

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits for these any more: drop what is still running."""
        self._cancelled.put(ticket)
        self._inbox.put(lambda: None)  # wake up

    def stop(self) -> None:
        """End the thread after the step at hand."""
        self._stopping = True
        self._inbox.put(lambda: None)

    def run(self) -> None:
        while not self._stopping:
            if not self._busy:
                self._inbox.get()()
            while not self._inbox.empty():
                self._inbox.get()()
            self._step()

    @property
    def _busy(self) -> bool:
        return bool(self._tickets or self._scores)

    def _command(self, work: Callable[[], Any]) -> Future[Any]:
        answer: Future[Any] = Future()

        def execute() -> None:
            try:
                answer.set_result(work())
            except Exception as error:
                answer.set_exception(error)

        self._inbox.put(execute)
        return answer

    def _load(self, policy: Artifact, force: bool) -> None:
        while self._busy:
            self._step()
        if self.broken:
            raise Refused(503, self.trouble)
        try:
            self.engine.load(policy, force=force)
        except UserError:
            raise
        except Exception as error:
            raise Refused(503, f"loading {policy.ref} failed ({error}); load a version again") from error

    def _admit(
        self,
        requests: Sequence[Request],
        sampling: Sampling,
        version: int | None,
        min_version: int | None,
        emit: Callable[[int, Any], None],
    ) -> Ticket:
        self._check(version, min_version)
        ticket = Ticket(next(self._numbers), emit)
        try:
            for i, request in enumerate(requests):
                ticket.waiting[i] = [None] * len(request.seeds)
                for j, seed in enumerate(request.seeds):
                    self.engine.submit(f"{ticket.number}-{i}-{j}", request.prompt_ids, seed, sampling)
        except ValueError as error:
            self.engine.abort(ticket.keys)
            raise Refused(400, f"request {i}: {error}") from error
        self._tickets[ticket.number] = ticket
        return ticket

    def _start_score(self, ids: Sequence[int], version: int | None, scored: Future[list[float]]) -> None:
        self._check(version, None)
        key = f"score-{next(self._numbers)}"
        try:
            self.engine.submit_score(key, ids)
        except ValueError as error:
            raise Refused(400, str(error)) from error
        self._scores[key] = scored

    def _check(self, version: int | None, min_version: int | None) -> None:
        served = self.engine.version
        if self.trouble:
            raise Refused(503, self.trouble)
        if version not in (None, served) or (min_version is not None and served < min_version):
            asked = f"version {version}" if version is not None else f"version {min_version} or later"
            raise Refused(409, f"serves version {served}, {asked} was asked for; load it first")

    def _step(self) -> None:
        """Drop what was cancelled, run one step of the engine, hand out what it finished."""
        while not self._cancelled.empty():
            ticket = self._cancelled.get()
            if self._tickets.pop(ticket.number, None):
                self.engine.abort(ticket.keys)
        if not self._busy:
            return
        try:
            for key, answer in self.engine.step():
                self._finish(key, answer)
        except Exception as error:
            self._fail(error)

    def _finish(self, key: str, answer: Answer) -> None:
        if key in self._scores:
            self._scores.pop(key).set_result(answer)  # type: ignore[arg-type]
            return
        number, i, j = map(int, key.split("-"))
        ticket = self._tickets[number]
        group = ticket.waiting[i]
        group[j] = answer
        if all(group):
            ticket.emit(i, ticket.waiting.pop(i))
        if not ticket.waiting:
            del self._tickets[number]

    def _fail(self, error: Exception) -> None:
        """An engine that raised is not trusted again: everybody who waits is told, and later callers too."""
        self.broken = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        for ticket in self._tickets.values():
            ticket.emit(-1, self.trouble)
        for future in self._scores.values():
            future.set_exception(Refused(503, self.trouble))
        self._tickets.clear()
        self._scores.clear()
