"""Environments, which reply to the policy between its turns; one file per variant.

A variant is a module with ``create_environment(row, **args) -> Environment``, called once per
episode with its row of prompts (``prompt``, ``answer``, ``metadata`` as JSON, …) and the arguments
in ``environment_args``. An environment runs in the stage's own process, where code of the policy
must not run: `environments/python.py` runs such code in `tuneloop.rewards.sandbox`.

An environment with a tool states ``TOOL``: the tool's name, and the argument that holds what the
policy writes. `tuneloop probe` sends attacks there (`local/probe.py: _find_tool`). Without ``TOOL``
it attacks by whole turns alone; `tests/unit/local/test_probe.py` requires it of those that ship.

`inference/multi_turn.py` opens and steps environments. The tests are
`tests/unit/inference/test_episodes.py`, and of `python` `tests/unit/rewards/test_code.py`, too.
"""

import json
from dataclasses import dataclass, field
from typing import Literal, Protocol

from tuneloop.core.json_types import JsonObject


@dataclass(frozen=True)
class Reply:
    """What an environment replies to a turn of the policy.

    A field that is added reaches rewards and files only if `_LiveEpisode` of
    `inference/multi_turn.py` keeps it, and its `finish` writes it into `Episode.facts`.

    Attributes:
        text: what the policy reads next, in a chat as a message of `role`; ignored where the
            episode is done.
        done: whether the episode ends with this turn.
        role: of the message; a chat template has to know it (`formats/chat_replies.py`).
        reward: of the whole episode so far, which the reward ``environment``
            (`rewards/environment.py`) reads. That of the last turn counts, a None too. None: the
            environment gives none.
        escape: what the turn tried in order to leave the sandbox. The episode is over then, and its
            outcome is ``escape`` (`rewards/judging.py: judge_row`).
    """

    text: str = ""
    done: bool = False
    role: Literal["tool", "user"] = "tool"
    reward: float | None = None
    escape: str = ""


class Environment(Protocol):
    """One episode: `inference/multi_turn.py` opens one for each completion."""

    def step(self, turn: str, /) -> Reply:
        """Reply to a turn of the policy, text without special tokens.

        What it raises ends the stage.
        """


@dataclass(frozen=True)
class Call:
    """A tool that the policy asked for.

    Attributes:
        problem: why it is no JSON object with a name and arguments; empty if it is one.
    """

    name: str = ""
    arguments: JsonObject = field(default_factory=dict)
    problem: str = ""


def parse_tool_calls(turn: str) -> list[Call]:
    """Parse the calls in a turn, as Hermes and Qwen write them.

    That is ``<tool_call>{"name": …, "arguments": {…}}</tool_call>``, as often as there is one.
    `local/probe.py: _send_to_tool` writes the same form. The rewards of tool calls have a parser of
    their own, of more forms: `rewards/structures/calls.py: parse_calls`.
    """
    # Splitting takes linear time. A pattern with a lazy middle would look at the rest of the text
    # from each tag that is never closed.
    parts = [part.partition("<tool_call>") for part in turn.split("</tool_call>")[:-1]]
    return [_parse_call(text) for _, tag, text in parts if tag]


def _parse_call(text: str) -> Call:
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return Call(problem="is not JSON")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return Call(problem="has no name")
    arguments = call.get("arguments", {})
    if not isinstance(arguments, dict):
        return Call(problem="has non-object arguments")
    return Call(call["name"], arguments)
