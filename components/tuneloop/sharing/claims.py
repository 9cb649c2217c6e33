"""Who sits on which claim: seats of runs on claims of one group, without a cluster.

A claim has a seat for each of `limit` runs. A run has one seat, however many workflows it takes: as long as one of them
is active. So the seats that stand in a claim, and the active workflows, say all there is to know, and whoever looks
can tidy up after all the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Owner = tuple[str, str]
"""A workflow's name and uid."""


@dataclass(frozen=True)
class Claim:
    """A claim, as far as seats go.

    Attributes:
        runs: that sit on it, in the order in which they came.
    """

    name: str
    runs: tuple[str, ...]


def choose_claim(claims: Sequence[Claim], run: str, limit: int) -> str | None:
    """Choose the claim on which `run` gets its seat: where it sits already, else the fullest that has room, the first
    by name among equals; None where another one is needed."""
    if seated := [claim.name for claim in claims if run in claim.runs]:
        return min(seated)
    room = [claim for claim in claims if len(claim.runs) < limit]
    return min(room, key=lambda claim: (-len(claim.runs), claim.name)).name if room else None


def find_free_name(stem: str, taken: Iterable[str]) -> str:
    """Return the first of ``<stem>-1``, ``<stem>-2``, … that is not `taken`."""
    there = set(taken)
    return next(name for n in itertools.count(1) if (name := f"{stem}-{n}") not in there)


def filter_active_runs(runs: Iterable[str], active: Mapping[str, Sequence[Owner]]) -> tuple[list[str], list[Owner]]:
    """Return the runs that keep their reservations, and the active workflows of these runs.

    Args:
        runs: that have a seat.
        active: run → its workflows that are under way.
    """
    stay = [run for run in runs if active.get(run)]
    return stay, [owner for run in stay for owner in active[run]]
