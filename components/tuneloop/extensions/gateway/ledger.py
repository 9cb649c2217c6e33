"""Requests to a worker: each is applied once, those to a model in the order of their numbers.

A client without an answer sends its request again with the same number, and requests may arrive out
of order. So a request is identified by (stream, number), and a model's request waits for earlier
ones. One thread executes them; each has a future.

`session.py` puts requests in, on the threads of HTTP, and `worker.py` takes them out on the one
that computes.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tuneloop.inference.refusals import Refused

KEPT_RESULTS = 4096
"""The number of results of a stream that are kept; a client fetches each within seconds. As many
requests may wait."""
FETCHED_S = 300.0
"""Seconds for which a result is kept after it was last sent, as that answer may be lost."""
UNFETCHED_S = 3600.0
"""Seconds for which a result is kept after it was computed, if nobody has fetched it."""
SWEEP_S = 60.0
"""Seconds between two searches for expired results."""


@dataclass(eq=False)
class Entry:
    """A request.

    Attributes:
        fingerprint: equal requests have an equal one.
        work: executes requests, and returns their results; it may raise any error.
        batch: requests with an equal one can be executed together; None: alone. All parameters that
            the requests share have to be in it, as those of the first are used for all.
        number: in its stream; -1 outside of one.
        until: when the result is dropped, by `time.monotonic`.
        fetched: whether the result was sent.
    """

    fingerprint: str
    work: "Callable[[list[Entry]], list[Any]]"
    request: Any = None
    batch: Hashable | None = None
    number: int = -1
    until: float = math.inf
    fetched: bool = False
    future: Future[Any] = field(default_factory=Future)


@dataclass
class Stream:
    """The requests of a model or sampling session.

    Attributes:
        following: the number of the next one to execute; None: any order.
        last: the highest number so far.
        entries: number → request.
    """

    following: int | None
    last: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)

    def waits_for_earlier(self, number: int) -> bool:
        """Return whether the request of this number waits for one that has not arrived."""
        return self.following is not None and number > self.following

    def drop_expired(self, time_s: float) -> None:
        self.entries = {n: entry for n, entry in self.entries.items() if entry.until > time_s}

    def drop_oldest(self) -> None:
        """Drop the first results of more than `KEPT_RESULTS`; a request that is not done stays."""
        while len(self.entries) > KEPT_RESULTS:
            oldest = min(self.entries)
            if not self.entries[oldest].future.done():
                break
            del self.entries[oldest]


class OpenCounts(NamedTuple):
    """Requests that are not finished: not done; not done because an earlier one is missing; done,
    but the result not fetched.
    """

    undone: int
    blocked: int
    unfetched: int


class Ledger:
    """The requests of one worker. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._ready: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._swept = time.monotonic()
        self._closed = False

    def open(self, stream: str, first: int | None = None) -> None:
        """Accept requests for `stream`: in order, from number `first` on, or in any order if it is
        None.

        A model's stream begins with 0, the request that creates the model; the client counts the
        model's further requests from 1 on. Sampling sessions have no order.
        """
        with self._changed:
            self._streams.setdefault(stream, Stream(first, (first or 1) - 1))

    def submit(self, stream_name: str, number: int | None, entry: Entry) -> str:
        """Accept a request, and return its id.

        Args:
            number: the client's; None: the next one.

        Raises Refused: 404, the stream is not open; 409, another request has that number; 503, no
        new request is accepted.
        """
        with self._changed:
            self._sweep()
            stream = self._streams.get(stream_name)
            if stream is None:
                raise Refused(404, f"{stream_name} is not known here")
            if number is None:
                number = stream.last + 1
            name = f"{stream_name}:{number}"
            accepted = stream.entries.get(number)
            if accepted is None:
                self._check_new(stream, number, name)
                entry.number = number
                stream.entries[number] = entry
                stream.last = max(stream.last, number)
                self._advance(stream, entry)
            elif accepted.fingerprint != entry.fingerprint:
                raise Refused(409, f"{name} was another request; use a free number")
            return name

    def _sweep(self) -> None:
        time_s = time.monotonic()
        if time_s - self._swept >= SWEEP_S:
            self._swept = time_s
            for stream in self._streams.values():
                stream.drop_expired(time_s)

    def _check_new(self, stream: Stream, number: int, name: str) -> None:
        """Refuse a request that was not accepted before, if it may not be accepted now."""
        stream_name = name.rpartition(":")[0]
        if stream.following is not None and number < stream.following:
            raise Refused(404, f"{name} was applied, and its result has expired")
        # While the session ends, a request that a later one waits for is still accepted.
        if self._closed and number > stream.last:
            remedy = "continue from the checkpoints that it saves"
            raise Refused(503, f"{stream_name}: its session is ending; {remedy}")
        # The next one in order is accepted, or those that wait for it would never end.
        count = len(stream.entries)
        if count >= 2 * KEPT_RESULTS and number != stream.following:
            problem = f"{count} requests or results are waiting; try again later"
            raise Refused(503, f"{stream_name}: {problem}")

    def future(self, request: str) -> Future[Any]:
        """Return a request's future; a finished result is kept for `FETCHED_S` from now on.

        Raises Refused (404) if the request is not known, or its result has expired.
        """
        stream_name, _, number = request.rpartition(":")
        with self._changed:
            stream = self._streams.get(stream_name)
            entry = stream.entries.get(int(number)) if stream and number.isdigit() else None
            if entry is None:
                raise Refused(404, f"{request} is not known here, or its result has expired")
            # The answer may be lost, so it is kept for a repeated request.
            if entry.future.done():
                entry.until = time.monotonic() + FETCHED_S
                entry.fetched = True
            return entry.future

    def close(self) -> None:
        """Accept no new requests, only repeated ones and those that a later request waits for."""
        self._closed = True

    def count_open(self) -> OpenCounts:
        """Count the requests that are not finished."""
        undone = 0
        blocked = 0
        unfetched = 0
        with self._changed:
            for stream in self._streams.values():
                for entry in stream.entries.values():
                    if entry.future.done():
                        unfetched += not entry.fetched
                    elif stream.waits_for_earlier(entry.number):
                        blocked += 1
                    else:
                        undone += 1
        return OpenCounts(undone, blocked, unfetched)

    def take(self, timeout: float | None = None) -> list[Entry]:
        """Take the next request, and those that can be executed together with it.

        Returns:
            None of them after `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._ready), timeout):
                return []
            entries = [self._ready.popleft()]
            batch = entries[0].batch
            if batch is not None:
                entries += [entry for entry in self._ready if entry.batch == batch]
                self._ready = deque(entry for entry in self._ready if entry.batch != batch)
            return entries

    def finish(self, entry: Entry, result: Any = None, error: BaseException | None = None) -> None:
        """Set the result of a request, and drop its input."""
        # A batch of training data has megabytes, and the result is kept for an hour.
        entry.work = _refuse_work
        entry.request = None
        entry.until = time.monotonic() + UNFETCHED_S
        if error is not None:
            entry.future.set_exception(error)
        else:
            entry.future.set_result(result)

    def fail(self, entries: Sequence[Entry], error: BaseException) -> None:
        """Set the error of requests that are not done."""
        for entry in entries:
            if not entry.future.done():
                self.finish(entry, error=error)

    def put_first(self, entries: Sequence[Entry]) -> None:
        """Put requests before all others: those that were taken, but not begun, or have no stream."""
        with self._changed:
            # `extendleft` puts one after the other at the left, so the first must come last.
            self._ready.extendleft(reversed(entries))
            self._changed.notify_all()

    def _advance(self, stream: Stream, entry: Entry) -> None:
        """Make a new request ready, or in a stream with an order all that can follow now."""
        if stream.following is None:
            self._ready.append(entry)
        else:
            while stream.following in stream.entries:
                self._ready.append(stream.entries[stream.following])
                stream.following += 1
        stream.drop_oldest()
        self._changed.notify_all()


def _refuse_work(entries: list[Entry]) -> list[Any]:
    raise AssertionError("a request is executed once")
