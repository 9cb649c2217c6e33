"""The call of a template, and its result.

`graph`, `retries` and `pod` pass these to one another.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from tuneloop.core.ends import NO_EXIT_CODE
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.local.journal import BROKEN

Scope = dict[str, Any]
"""Tag → value."""


def list_outputs(template: JsonMapping) -> list[JsonObject]:
    """List the output parameters that a template declares."""
    outputs: list[JsonObject] = template.get("outputs", {}).get("parameters", [])
    return outputs


@dataclass(frozen=True)
class Call:
    """One use of a template.

    Attributes:
        name: the node's path, such as ``grpo.loop.next``.
        parent: the id of the node that it belongs to.
        depth: the number of templates entered above it; a recursion without an end is refused.
    """

    template: str
    name: str
    parent: str
    depth: int
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Result:
    """The result of a node.

    `local/execution.py: Execution.settle` copies it to the node, field by field.

    Attributes:
        phase: one of `tuneloop.local.journal.DONE`; ``Running`` for a daemon that is ready.
        parameters: its outputs.
    """

    phase: str
    message: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    daemon: "Daemon | None" = None
    address: str = ""

    @property
    def broken(self) -> bool:
        """Whether nodes that depend on it do not run."""
        return self.phase in BROKEN

    @property
    def code(self) -> int:
        """The exit code as the controller gives it: `NO_EXIT_CODE` where there is none."""
        return NO_EXIT_CODE if self.exit_code is None else self.exit_code


class Daemon(Protocol):
    """A process that goes on after its node is ready.

    `result` says how it ended, once `over` is set.
    """

    over: threading.Event
    result: Result

    def close(self) -> None:
        """End it, and wait for its end."""
