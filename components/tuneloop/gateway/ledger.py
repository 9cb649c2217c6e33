"""Requests to a worker: each is applied once, those to a model in the order of their numbers. A client that hears no
answer sends its request again under the same number, and requests may overtake one another. So a request is known by
(stream, number), and a model's waits for those before it. One thread does them; a future has the result of each."""

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
"""Results of a stream that can still be asked for; a client fetches each within seconds. As many requests may wait."""
FETCHED, UNFETCHED = 300.0, 3600.0
"""Seconds for which one can: since it was last given to somebody, who may not have heard it, and since it was there."""
SWEEP = 60.0
"""Seconds between two looks for what is kept no longer."""


@dataclass(eq=False)
class Entry:
    """A request. Those of an equal `batch` can be done together (None: alone); equal requests have one `fingerprint`.
    Its result is dropped at `until`, by `time.monotonic`."""

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
    """The requests of a model or sampling session by number; `following` is the next one (None: they have no order)."""

    following: int | None
    last: int = 0
    entries: dict[int, Entry] = field(default_factory=dict)


class Ledger:
    """The requests of one worker. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._streams: dict[str, Stream] = {}
        self._ready: deque[Entry] = deque()
        self._changed = threading.Condition()
        self._swept, self._closed = time.monotonic(), False

    def open(self, stream: str, first: int | None = None) -> None:
        """Take requests for `stream`: from number `first` on in their order, or in any where it is None."""
        with self._changed:
            self._streams.setdefault(stream, Stream(first, (first or 1) - 1))

    def submit(self, stream: str, number: int | None, entry: Entry) -> str:
        """Take a request, and return its id. Raises Refused: 404, the stream is not open; 409, another request has that
        number; 503, no new one is taken."""
        with self._changed:
            if (now := time.monotonic()) - self._swept >= SWEEP:
                self._swept = now
                for each in self._streams.values():
                    each.entries = {place: kept for place, kept in each.entries.items() if kept.until > now}
            if (known := self._streams.get(stream)) is None:
                raise Refused(404, f"{stream} is not known here")
            if number is None:
                number = known.last + 1
            standing = known.entries.get(number)
            if standing is None and known.following is not None and number < known.following:
                raise Refused(404, f"{stream}:{number} was applied, and is kept no longer")
            if standing is not None and standing.fingerprint != entry.fingerprint:
                raise Refused(409, f"{stream}:{number} was another request; take a number that is free")
            if standing is None and self._closed and number > known.last:
                raise Refused(503, f"{stream}: its session ends and takes nothing new; go on from what it saves")
            if standing is None and len(known.entries) >= 2 * KEPT and number != known.following:
                raise Refused(503, f"{stream}: {len(known.entries)} requests wait, or their results; ask again later")
            if standing is None:
                known.entries[number], entry.number, known.last = entry, number, max(known.last, number)
                self._advance(known, entry)
            return f"{stream}:{number}"

    def future(self, request: str) -> Future[Any]:
        """Return a request's future; a result that is there is kept `FETCHED` s from now on. Raises Refused (404)."""
        stream, _, number = request.rpartition(":")
        with self._changed:
            known = self._streams.get(stream)
            entry = known.entries.get(int(number)) if known and number.isdigit() else None
            if entry is None:
                raise Refused(404, f"{request} is not known here, or its result is kept no longer")
            if entry.future.done():
                entry.until, entry.fetched = time.monotonic() + FETCHED, True
            return entry.future

    def close(self) -> None:
        """Take no new requests: only again those that are known, and those that a later one waits for."""
        self._closed = True

    def count_open(self) -> tuple[int, int, int]:
        """Count requests: not done; not done as one before them did not come; done, the result given to nobody."""
        with self._changed:
            pairs = [(stream, entry) for stream in self._streams.values() for entry in stream.entries.values()]
        waiting = [(stream.following, entry.number) for stream, entry in pairs if not entry.future.done()]
        behind = sum(following is not None and number > following for following, number in waiting)
        return len(waiting) - behind, behind, sum(not entry.fetched for _, entry in pairs) - len(waiting)

    def take(self, timeout: float | None = None) -> list[Entry]:
        """Take what is to be done next, and what can be done together with it; nothing after `timeout` seconds."""
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
        """Settle a request; what it was about is forgotten."""
        entry.work, entry.request, entry.until = _settled, None, time.monotonic() + UNFETCHED
        if error is not None:
            entry.future.set_exception(error)
        else:
            entry.future.set_result(result)

    def put_first(self, entries: Sequence[Entry]) -> None:
        """Put before all others what was taken and not begun, or is in no stream."""
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
        while len(stream.entries) > KEPT and stream.entries[first := min(stream.entries)].future.done():
            del stream.entries[first]
        self._changed.notify_all()


def _settled(entries: list[Entry]) -> list[Any]:
    raise AssertionError("a request is done once")
