"""Judges that are away: how a reward says so, how it is recognized, and how long to wait.

A reward that asks a service says ``raise RewardUnavailable("its queue is full", retry_after_s=30)``.
What the usual clients raise is recognized by its attributes, so that none of them is imported here:
urllib, requests, httpx, aiohttp, openai and anthropic put the status of an answer, and its headers,
into their errors. Connections that fail are recognized by the names of their classes.

A judge that is down or has no room (429, 503, a connection that is refused) is waited for, as long
as it takes. What a completion may cause (500, an answer that breaks off, a timeout) is tried a few
times: a policy must not be able to stop its own run.

`rewards/judging.py` asks it of every error that a reward raises, and then waits by `compute_delay`.
Who waits reports it by `OutageReport`. `tests/unit/rewards/test_judges.py` raises the errors of
each client.
"""

import contextlib
import email.utils
import random
import time
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from tuneloop.core.errors import print_diagnostic
from tuneloop.core.json_types import JsonMapping

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 60.0
"""Seconds of the first pause, which doubles each time, and of the longest."""
LONGEST_RETRY_AFTER_S = 3600.0
"""The longest pause that a judge may ask for."""
REPORT_EVERY_S = 60.0
"""Seconds between two lines that say that a reward is still away."""
TRIES = 4
"""How often a call is made that may fail because of its completion. The pauses between four tries
are seven seconds.

After a call that failed so often, further calls of the reward are made once each, until one
succeeds."""
AWAY = (425, 429, 502, 503, 504)
"""Statuses of a judge that has no room, or is not there behind its proxy."""
PASSING = (408,)
"""Statuses below 500 that are tried `TRIES` times, as all from 500 on are that are not in
`AWAY`."""
REFUSED = {
    "ConnectionRefusedError",
    "gaierror",
    # Of urllib3 and httpx, and by these of requests, openai and anthropic; of aiohttp.
    "NewConnectionError",
    "ConnectTimeoutError",
    "ConnectError",
    "ConnectTimeout",
    "ClientConnectorError",
}
"""The names of classes whose errors mean that nobody is there."""
CONNECTION_ERRORS = {
    # Of Python, requests and urllib3.
    "ConnectionError",
    "Timeout",
    "TimeoutError",
    "gaierror",
    "IncompleteRead",
    "NewConnectionError",
    "ProtocolError",
    # Of httpx, aiohttp, openai and anthropic.
    "TransportError",
    "ClientConnectionError",
    "APIConnectionError",
}
"""The names of classes whose errors mean that nobody answered, or that the answer broke off."""
_DEEPEST = 4
"""How many errors behind one are looked at: clients wrap those of the libraries below them."""


class RewardUnavailable(Exception):
    """Raised by a reward whose judge is away, or has no room now: it is called again later.

    Args:
        reason: what people are told meanwhile.
        retry_after_s: the seconds to wait at least; by default 1, and twice as many each time.
    """

    def __init__(
        self, reason: str = "its judge is away", retry_after_s: float | None = None
    ) -> None:
        self.reason = reason
        self.retry_after_s = retry_after_s
        super().__init__(reason)


@dataclass(frozen=True)
class Outage:
    """Why a judge gave no answer.

    Attributes:
        retry_after_s: the seconds after which it wants to be asked again, if it says so.
        is_away: it would answer no other call either, and is waited for without end; else the
            completion may be the cause, and the call is made `TRIES` times.
    """

    reason: str
    retry_after_s: float | None = None
    is_away: bool = False


def find_outage(error: BaseException) -> Outage | None:
    """Return the outage that an error of a reward, or an error behind it, stands for; None if it
    stands for none."""
    errors = list(_walk_causes(error))
    for cause in errors:
        if isinstance(cause, RewardUnavailable):
            return Outage(cause.reason, cause.retry_after_s, is_away=True)
        status = read_status(cause)
        if status is not None:
            # The status decides, whatever the classes are called: 401 will not pass by waiting.
            is_away = status in AWAY
            if is_away or status >= 500 or status in PASSING:
                return Outage(_describe(cause), _read_retry_after(cause), is_away)
            return None
    if _is_named(errors, REFUSED):
        return Outage(_describe(error), is_away=True)
    if _is_named(errors, CONNECTION_ERRORS):
        return Outage(_describe(error))
    return None


def read_status(error: BaseException) -> int | None:
    """Read the HTTP status that a client's error carries; None where it has none."""
    for source in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            status = getattr(source, name, None)
            if isinstance(status, int) and 100 <= status < 600:
                return status
    return None


def compute_delay(failures: int, retry_after_s: float | None) -> float:
    """Compute the seconds to wait after failures in a row, at least what the judge asks for."""
    delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2.0 ** min(failures, 10))
    # Several processes ask the same judge: they should not all come back at once. The reward's own
    # random numbers are left alone.
    delay_s *= random.SystemRandom().uniform(0.75, 1.0)
    if retry_after_s is None:
        return delay_s
    return max(delay_s, min(retry_after_s, LONGEST_RETRY_AFTER_S))


@dataclass
class _Wait:
    since: float
    next_report_at: float


class OutageReport:
    """Says that rewards wait for their judges, at once and then once a minute."""

    def __init__(self) -> None:
        self._waits_by_reward: dict[str, _Wait] = {}

    def add_wait(self, name: str, reason: str, delay_s: float) -> None:
        """Say that the reward `name` waits `delay_s` seconds, unless that was said lately."""
        time_s = time.monotonic()
        wait = self._waits_by_reward.setdefault(name, _Wait(time_s, time_s))
        if time_s < wait.next_report_at:
            return
        wait.next_report_at = time_s + REPORT_EVERY_S
        seconds = time_s - wait.since
        duration = f", for {seconds:.0f} s so far" if seconds >= 1 else ""
        line = f"rewards: {name} is away ({reason}); asks again in {delay_s:.0f} s{duration}"
        print_diagnostic(line, 0)

    def end_wait(self, name: str) -> None:
        """Note that the reward `name` has answered."""
        wait = self._waits_by_reward.pop(name, None)
        if wait is not None:
            seconds = time.monotonic() - wait.since
            print_diagnostic(f"rewards: {name} is back after {seconds:.0f} s", 0)


def _walk_causes(error: BaseException, depth: int = 0) -> Iterator[BaseException]:
    """Yield an error, those in its arguments and its `reason`, and those behind it."""
    yield error
    if depth == _DEEPEST:
        return
    causes = (getattr(error, "reason", None), error.__cause__ or error.__context__, *error.args)
    for cause in causes:
        if isinstance(cause, BaseException):
            yield from _walk_causes(cause, depth + 1)


def _is_named(errors: Iterable[BaseException], names: Collection[str]) -> bool:
    """Return whether one of `errors` is of a class with one of `names`, or of a subclass of it."""
    return any(kind.__name__ in names for error in errors for kind in type(error).__mro__)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _read_retry_after(error: BaseException) -> float | None:
    """Read the seconds after which an answer asks for another request; None where it does not.

    Retry-After has seconds, or a date (RFC 9110); openai's retry-after-ms has milliseconds.
    """
    headers = _read_headers(error)
    milliseconds = headers.get("retry-after-ms")
    text = str(headers.get("retry-after"))
    with contextlib.suppress(ValueError):
        if milliseconds is not None:
            return max(0.0, float(milliseconds) / 1000)
        return max(0.0, float(text))
    with contextlib.suppress(ValueError, OverflowError):
        return max(0.0, email.utils.parsedate_to_datetime(text).timestamp() - time.time())
    return None


def _read_headers(error: BaseException) -> JsonMapping:
    """Return the headers of an error's answer, by their names in lower case."""
    for source in (error, getattr(error, "response", None)):
        items = getattr(getattr(source, "headers", None), "items", None)
        if callable(items):
            return {str(name).lower(): value for name, value in items()}
    return {}
