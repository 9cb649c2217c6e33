"""What a template is called with and what it comes to, and how the results of a graph's tasks combine into its own."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tuneloop.core.ends import NO_EXIT_CODE
from tuneloop.local.journal import BROKEN

Scope = dict[str, Any]
"""Tag → value."""


@dataclass(frozen=True)
class Call:
    """One use of a template.

    Attributes:
        template: its name.
        name: the node's path, ``grpo.loop.next``.
        parent: id of the node it belongs to.
        depth: templates entered above it.
        parameters: arguments, substituted.
    """

    template: str
    name: str
    parent: str
    depth: int
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Result:
    """What a node came to.

    Attributes:
        phase: one of `tuneloop.local.journal.DONE`, or ``Running`` for a daemon that is ready.
        parameters: output parameters.
    """

    phase: str
    message: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    daemon: Daemon | None = None

    @property
    def broken(self) -> bool:
        return self.phase in BROKEN

    @property
    def code(self) -> int:
        """The exit code as the controller gives it: `NO_EXIT_CODE` where there is none."""
        return NO_EXIT_CODE if self.exit_code is None else self.exit_code


class Daemon(Protocol):
    """What runs on behind a node that is ready.

    Attributes:
        over: set when it has ended for good, whoever ended it; `result` says how.
    """

    over: threading.Event
    result: Result

    def close(self) -> None:
        """End it, and wait for its end."""


def dependency_scope(names: Sequence[str], results: Mapping[str, Result]) -> Scope:
    """Return what a ``depends`` may ask of the tasks `names`."""
    scope: Scope = {}
    for name in names:
        result = results[name]
        flags = {flag: result.phase == flag for flag in ("Succeeded", "Failed", "Skipped", "Omitted")}
        flags |= {"Errored": result.phase == "Error", "Daemoned": result.daemon is not None}
        flags |= {"AnySucceeded": False, "AllFailed": False}  # of loops over items, which are not run here
        scope |= {f"{name.replace('-', '_')}.{flag}": value for flag, value in flags.items()}
    return scope


def branch_result(name: str, waits: Mapping[str, Sequence[str]], results: Mapping[str, Result]) -> Result:
    """Return the result of a leaf's branch: a task that did not complete takes over from those above it."""
    result = results[name]
    if result.phase in ("Succeeded", "Failed", "Error"):
        return result
    above = [branch_result(other, waits, results) for other in waits[name]]
    return next((each for each in above if each.broken), Result("Succeeded"))


def find_reason(results: Mapping[str, Result]) -> str:
    """Return the message of the first task that is broken."""
    return next((f"{name}: {r.message}" for name, r in results.items() if r.broken), "stopped")
