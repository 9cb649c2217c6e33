"""Environments, which reply to the policy between its turns; one file per variant.

A variant is a module with ``create_environment(row, **args) -> Environment``, called once per episode with its row of
prompts (``prompt``, ``answer``, ``metadata`` as JSON, …) and the arguments in ``environment_args``. It runs in the
stage's own process, where a policy's code must not run: `python` runs that in `tuneloop.rewards.sandbox`.
"""

import json
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol


@dataclass(frozen=True)
class Reply:
    """What an environment replies to a turn of the policy.

    Attributes:
        text: what the policy reads next, in a chat as a message of `role`; ignored where the episode is done.
        reward: of the whole episode so far, for the reward ``environment``; None: the environment gives none.
        escape: what the turn tried in order to leave the sandbox: the episode is over, and its outcome is ``escape``.
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
    parts = [
        part.partition("<tool_call>") for part in said.split("</tool_call>")[:-1]
    ]  # in linear time
    return [_parse(text) for _, begun, text in parts if begun]


def _parse(text: str) -> Call:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return Call(problem="is not JSON")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call(problem="has no name")
    arguments = call.get("arguments", {})
    return (
        Call(call["name"], arguments)
        if isinstance(arguments, dict)
        else Call(problem="has non-object arguments")
    )
