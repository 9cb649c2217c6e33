"""Bodies that no client would send: a good one with something hostile in one or two of its places."""

import copy
import os
import re
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st

HOSTILE: Sequence[Any] = (
    *(
        None,
        True,
        -1,
        0,
        1,
        2**31,
        2**63,
        -(2**63) - 1,
        10**30,
        -(10**30),
        0.5,
        1e308,
        -1e308,
        1e-320,
    ),
    *(
        "",
        "x",
        "1",
        "\x00",
        "\ud83d\ude00",
        "\ud800",
        "x" * 5000,
        "../../etc/passwd",
        "file:///etc/passwd@xxh3-128:00",
        "tinker://a",
    ),
    *([], {}, [[]], [None], [10**30], [0] * 5000, {"a": 1}, {"tokens": [2**40]}),
    *(float("nan"), float("inf")),
)
SECONDS = float(os.environ.get("FUZZ_SECONDS", 0))
"""For each request, as `make fuzz` has it; 0: the same 25 bodies each time."""


def run_examples(check: Callable[[], None], least: int = 0) -> None:
    """Run a test that draws its bodies (`hypothesis.given`), again and again for `SECONDS`, and until there were
    `least` bodies, however slow the machine is."""
    each = 10 if SECONDS else 25
    check = settings(max_examples=each, derandomize=not SECONDS, deadline=None)(check)
    end, rounds = time.monotonic() + SECONDS, 0
    while not rounds or time.monotonic() < end or (SECONDS and rounds * each < least):
        check()
        rounds += 1
    print(f"{rounds * each} bodies at most")


class Memory:
    """What a server's process has resident, note by note, in MiB."""

    WARM = 500
    """Bodies after which all has been used: a session grows from 876 to 900 MiB in the first 300, and has 901 after
    13,000."""
    MOST = 24
    """That it may grow: far less than what thousands of bodies hold, some of them of 35 KB."""

    def __init__(self, pid: int) -> None:
        self.pid, self.notes = pid, list[float]()

    def note(self) -> None:
        told = Path(f"/proc/{self.pid}/status").read_text()
        self.notes.append(int(re.search(r"VmRSS:\s+(\d+) kB", told)[1]) / 1024)

    def check_growth(self, what: str) -> None:
        """From the tenth of the notes that follows `WARM`, or of few notes their second tenth, to the last."""
        part = max(len(self.notes) // 10, 1)
        warm = self.WARM if len(self.notes) > 2 * self.WARM else part
        begun = statistics.median(self.notes[warm : warm + part])
        ended = statistics.median(self.notes[-part:])
        print(
            f"{what}: {len(self.notes)} bodies, {begun:.1f} MiB after {warm} of them, {ended:.1f} at the end"
        )
        assert ended - begun < self.MOST, (what, self.notes[:: max(part, 1)])


def list_places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places in a JSON value, itself apart."""
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, each in inside:
        yield (*at, key)
        yield from list_places(each, (*at, key))


@st.composite
def draw_bodies(draw: st.DrawFn, good: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One of the `good` bodies, broken."""
    body: dict[str, Any] = copy.deepcopy(draw(st.sampled_from(good)))
    for _ in range(draw(st.integers(1, 2))):
        if places := list(list_places(body)):
            *above, last = draw(st.sampled_from(places))
            place: Any = body
            for key in above:
                place = place[key]
            if draw(st.integers(0, 9)):
                place[last] = copy.deepcopy(
                    draw(st.sampled_from(HOSTILE))
                )  # the next change may be inside it
            else:
                del place[last]
    return body
