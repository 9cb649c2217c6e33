"""What can happen to a run, by kind, and at which of its calls: the plan of a certificate."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

Place = Literal["files", "reads", "objects", "requests", "executor", "pods", "clock"]
"""Where the calls are numbered: the files that stages change, the store's reads, the calls of an object store's
library, the requests that reach its server, the files that the executor changes, those that a pod of it changes, and
the attempts by the virtual clock of Argo's rules."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        place: whose calls it happens at.
        fits: whether it can happen at a call, by the call's text.
        weight: how many injections it has, beside the others.
    """

    name: str
    place: Place
    fits: Callable[[str], bool] = lambda call: True
    weight: int = 10


@dataclass(frozen=True)
class Injection:
    """One fault at one call.

    Attributes:
        index: its number in the plan.
        at: the number of the call.
        call: what the call is in an undisturbed run.
        chance: seeds what else is drawn: how much of a write is torn, how long a server is away.
    """

    index: int
    kind: str
    place: Place
    at: int
    call: str
    chance: int

    def __str__(self) -> str:
        return f"{self.index}: {self.kind} at {self.place} call {self.at}, {self.call}"


def _of(*names: str) -> Callable[[str], bool]:
    return lambda call: call.startswith(tuple(f"{name} " for name in names))


def _is_file_sync(call: str) -> bool:
    """Say whether the call makes a file durable, and not a directory: only then are its bytes under way."""
    return call.startswith("fsync ") and "." in call.rpartition("/")[2]


_ROOM = _of("open", "mkdir", "link", "fsync")
KINDS = (
    Kind("killed before a call", "files", weight=14),
    Kind("killed after a call", "files", weight=14),
    Kind("torn write", "files", _is_file_sync),
    Kind("power lost: renames and names", "files"),
    Kind("power lost: bytes, names stay", "files"),
    Kind("disk full for a moment", "files", _ROOM),
    Kind("disk full until it is freed", "files", _ROOM),
    Kind("duplicate pod", "files"),
    Kind("preempted (SIGTERM)", "files"),
    Kind("clock jumps forward", "files", weight=5),
    Kind("clock jumps backward", "files", weight=5),
    Kind("stale read", "reads", _of("get")),
    Kind("stale list", "reads", _of("keys", "parts", "find_marks")),
    Kind("killed before a request", "objects"),
    Kind("killed after a request", "objects"),
    Kind("server error, not done", "requests"),
    Kind("server error, done all the same", "requests"),
    Kind("throttled (429)", "requests", weight=6),
    Kind("throttled (SlowDown)", "requests", weight=6),
    Kind("answer torn", "requests"),
    Kind("upload torn", "requests", _of("PUT", "PUT if")),
    Kind("server dead", "requests", weight=6),
    Kind("conflicts (409)", "requests", _of("PUT if")),
    Kind("conflicts (412)", "requests", _of("PUT if")),
    Kind("stale read of an object", "requests", _of("GET"), weight=5),
    Kind("stale list of objects", "requests", _of("LIST"), weight=5),
    Kind("executor killed", "executor", weight=5),
    Kind(
        "executor's disk full", "executor", _of("open", "mkdir", "link", "fsync", "write"), weight=2
    ),
    Kind("executor preempted (SIGTERM)", "executor", weight=2),
    Kind("two executors", "executor", weight=2),
    Kind("journal line torn", "executor", _of("write"), weight=2),
    Kind("journal line damaged", "executor", _of("write"), weight=2),
    Kind("pod killed", "pods", weight=3),
    Kind("pod preempted (SIGTERM)", "pods", weight=2),
    Kind("a week of preemptions", "clock", weight=1),
)
SERVER_FAULTS: Mapping[str, str] = {
    "server error, not done": "error before",
    "server error, done all the same": "error after",
    "throttled (429)": "throttled",
    "throttled (SlowDown)": "slow down",
    "answer torn": "torn answer",
    "upload torn": "torn upload",
    "server dead": "dead",
    "conflicts (409)": "conflict 409",
    "conflicts (412)": "conflict 412",
    "stale read of an object": "stale read",
    "stale list of objects": "stale list",
}
ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)


def make_plan(calls: Mapping[Place, Sequence[str]], count: int, seed: int) -> list[Injection]:
    """Draw `count` injections: of each kind its share, and of its calls each once before any is drawn again."""
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS if any(map(kind.fits, calls.get(kind.place, ())))]
    draws = {kind.name: _draw(kind, calls[kind.place], chance) for kind in kinds}
    shares = _share(kinds, count)
    order = [kind for kind in kinds for _ in range(shares[kind.name])]
    chance.shuffle(order)
    plan = []
    for index, kind in enumerate(order):
        at = next(draws[kind.name])
        plan.append(
            Injection(
                index, kind.name, kind.place, at, calls[kind.place][at], chance.getrandbits(32)
            )
        )
    return plan


def _share(kinds: Sequence[Kind], count: int) -> dict[str, int]:
    """Share `count` among kinds by their weights, each at least one."""
    total = sum(kind.weight for kind in kinds)
    shares = {kind.name: max(1, count * kind.weight // total) for kind in kinds}
    for kind in sorted(kinds, key=lambda kind: -kind.weight):
        if sum(shares.values()) == count:
            break
        shares[kind.name] = max(1, shares[kind.name] + (1 if sum(shares.values()) < count else -1))
    while sum(shares.values()) < count:
        shares[kinds[0].name] += 1
    return shares


def _draw(kind: Kind, calls: Sequence[str], chance: random.Random) -> Iterator[int]:
    fitting = [number for number, call in enumerate(calls) if kind.fits(call)]
    while True:
        chance.shuffle(fitting)
        yield from fitting
