"""Requests to a worker: each is applied once, those to a model in the order of their numbers. A client without an
answer sends its request again with the same number, and requests may arrive out of order. So a request is identified by
(stream, number), and a model's request waits for earlier ones. One thread executes them; each has a future."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from tuneloop.inference.refusals import Refused

KEPT = 4096
"""The number of results of a stream that are kept; a client fetches each within seconds. As many requests may wait."""
FETCHED = 300.0
UNFETCHED = 3600.0
"""Seconds for which a result is kept: after it was last sent, as it may be lost, and after it was computed."""
SWEEP = 60.0
"""Seconds between two searches for expired results."""


@dataclass(eq=False)
class Entry:
    """A request. Requests with an equal `batch` can be executed together (None: alone); equal requests have an equal
    `fingerprint`. The result is dropped at `until`, by `time.monotonic`."""

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
    """The requests of a model or sampling session by number; `following` is the next one (None: any order)."""

    following: int | None
    last: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)


class Ledger:
    """The requests of one worker. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._ready: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._swept = time.monotonic()
        self._closed = False

    def open(self, stream: str, first: int | None = None) -> None:
        """Accept requests for `stream`: in order, from number `first` on, or in any order if it is None."""
        with self._changed:
            self._streams.setdefault(stream, Stream(first, (first or 1) - 1))

    def submit(self, stream: str, number: int | None, entry: Entry) -> str:
        """Accept a request, and return its id. Raises Refused: 404, the stream is not open; 409, another request has
        that number; 503, no new request is accepted."""
        with self._changed:
            if (now := time.monotonic()) - self._swept >= SWEEP:
                self._swept = now
                for each in self._streams.values():
                    each.entries = {
                        place: kept for place, kept in each.entries.items() if kept.until > now
                    }
            if (known := self._streams.get(stream)) is None:
                raise Refused(404, f"{stream} is not known here")
            if number is None:
                number = known.last + 1
            standing = known.entries.get(number)
            if standing is None and known.following is not None and number < known.following:
                raise Refused(404, f"{stream}:{number} was applied, and its result has expired")
            if standing is not None and standing.fingerprint != entry.fingerprint:
                raise Refused(409, f"{stream}:{number} was another request; use a free number")
            if standing is None and self._closed and number > known.last:
                raise Refused(
                    503,
                    f"{stream}: its session is ending; continue from the checkpoints that it saves",
                )
            if standing is None and len(known.entries) >= 2 * KEPT and number != known.following:
                raise Refused(
                    503,
                    f"{stream}: {len(known.entries)} requests or results are waiting; try again later",
                )
            if standing is None:
                known.entries[number], entry.number, known.last = (
                    entry,
                    number,
                    max(known.last, number),
                )
                self._advance(known, entry)
            return f"{stream}:{number}"

    def future(self, request: str) -> Future[Any]:
        """Return a request's future; a finished result is kept for `FETCHED` s from now. Raises Refused (404)."""
        stream, _, number = request.rpartition(":")
        with self._changed:
            known = self._streams.get(stream)
            entry = known.entries.get(int(number)) if known and number.isdigit() else None
            if entry is None:
                raise Refused(404, f"{request} is not known here, or its result has expired")
            if entry.future.done():
                entry.until = time.monotonic() + FETCHED
                entry.fetched = True
            return entry.future

    def close(self) -> None:
        """Accept no new requests, only repeated ones and those that a later request waits for."""
        self._closed = True

    def count_open(self) -> tuple[int, int, int]:
        """Count requests: not done; not done because an earlier one is missing; done, but the result not fetched."""
        with self._changed:
            pairs = [
                (stream, entry)
                for stream in self._streams.values()
                for entry in stream.entries.values()
            ]
        waiting = [
            (stream.following, entry.number) for stream, entry in pairs if not entry.future.done()
        ]
        behind = sum(following is not None and number > following for following, number in waiting)
        return (
            len(waiting) - behind,
            behind,
            sum(not entry.fetched for _, entry in pairs) - len(waiting),
        )

    def take(self, timeout: float | None = None) -> list[Entry]:
        """Take the next request, and those that can be executed together with it; none after `timeout` seconds."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._ready), timeout):
                return []
            first = self._ready.popleft()
            if first.batch is None:
                return [first]
            alike = [entry for entry in self._ready if entry.batch == first.batch]
            self._ready = deque(entry for entry in self._ready if entry.batch != first.batch)
            return [first, *alike]

    def finish(self, entry: Entry, result: Any = None, error: BaseException | None = None) -> None:
        """Set the result of a request, and drop its input."""
        entry.work = _settled
        entry.request = None
        entry.until = time.monotonic() + UNFETCHED
        if error is not None:
            entry.future.set_exception(error)
        else:
            entry.future.set_result(result)

    def put_first(self, entries: Sequence[Entry]) -> None:
        """Put requests before all others: those that were taken but not begun, or are in no stream."""
        with self._changed:
            self._ready.extendleft(reversed(entries))
            self._changed.notify_all()

    def _advance(self, stream: Stream, entry: Entry) -> None:
        if stream.following is None:
            self._ready.append(entry)
        else:
            while (following := stream.entries.get(stream.following)) is not None:
                self._ready.append(following)
                stream.following += 1
        while (
            len(stream.entries) > KEPT
            and stream.entries[first := min(stream.entries)].future.done()
        ):
            del stream.entries[first]
        self._changed.notify_all()


def _settled(entries: list[Entry]) -> list[Any]:
    raise AssertionError("a request is executed once")
