"""Host memory of runs that share a node's devices.

Pods request little and may use much: the scheduler adds up what all runs request, while only those that have their turn
use what they may. So both sums have to fit: what is requested, or the last run's pods are never scheduled; and what is
used at a time, or the kernel kills one. Beside them, what trainers need that stay in memory between their turns (the
gateway's sessions; a stage of a workflow ends with its turn): weights and Adam's two moments, in pinned host memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Colocation:
    """Runs on one node; bytes throughout.

    Attributes:
        runs: that share it.
        request: of the stage pods that a run has at a time.
        limit: of the largest stage; None: not known. One stage has the turn at a time.
        server_request, server_limit: of what a run keeps beside its stages.
        overhead: of the node, what is not the runs'.
        node: all that it has; None: not told.
    """

    runs: int
    request: int
    limit: int | None
    server_request: int
    server_limit: int | None
    overhead: int
    node: int | None

    @property
    def requested(self) -> int:
        return self.runs * (self.request + self.server_request) + self.overhead

    @property
    def used(self) -> int | None:
        """At most, at a time; None where a limit is not known."""
        if self.limit is None or self.server_limit is None:
            return None
        return self.limit + self.runs * self.server_limit + self.overhead

    def excess(self) -> Iterator[tuple[str, int]]:
        """Yield what does not fit: requested or used, and how much that is."""
        for what, amount in (("request", self.requested), ("use", self.used)):
            if self.node is not None and amount is not None and amount > self.node:
                yield what, amount


def compute_trainer_memory(parameters: int, width: int = 4) -> tuple[int, int]:
    """Compute the host memory of a sleeping trainer in bytes: weights, and Adam's two moments.

    Full fine-tuning of a model of 4.02 billion parameters at 2 bytes: 7.5 GiB and 15.0 GiB.
    """
    return parameters * width, 2 * parameters * width
