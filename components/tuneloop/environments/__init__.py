"""Environments: what answers the policy between its turns. One file a variant.

A variant is a module with ``create_environment(row, **args) -> Environment``: one environment an episode, from the row
of prompts that it begins with (``prompt``, ``answer``, ``metadata`` as JSON, …) and the typed arguments of its own that
are given as ``environment_args``. It is asked in the stage's own process, so what a policy says must not be run there:
`python` runs it in `tuneloop.rewards.sandbox`. How an episode is put together belongs to `inference.multi_turn`.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Reply:
    """What an environment says to a turn of the policy.

    Attributes:
        text: what the policy reads next; of no consequence where the episode is done.
        done: whether the episode is over.
        role: of the message, in a chat.
        reward: of the whole episode so far, for the reward ``environment``; None: the environment has no opinion.
        escape: what the turn tried, to get out of where it was shut in: the episode is over, and its outcome `escape`.
    """

    text: str = ""
    done: bool = False
    role: Literal["tool", "user"] = "tool"
    reward: float | None = None
    escape: str = ""


class Environment(Protocol):
    """One episode."""

    def step(self, said: str) -> Reply:
        """Reply to the policy's turn `said`, text without special tokens. What it raises ends the stage."""


@dataclass(frozen=True)
class Call:
    """A tool that the policy asked for; `problem` where it is not a JSON object with a name and arguments."""

    name: str = ""
    arguments: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


def tool_calls(said: str) -> list[Call]:
    """List the calls in a turn: ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as Hermes and Qwen write."""
    parts = [part.partition("<tool_call>") for part in said.split("</tool_call>")[:-1]]  # in linear time
    return [_parse(text) for _, begun, text in parts if begun]


def _parse(text: str) -> Call:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return Call(problem="is not JSON")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call(problem="has no name")
    arguments = call.get("arguments", {})
    return Call(call["name"], arguments) if isinstance(arguments, dict) else Call(problem="has non-object arguments")
