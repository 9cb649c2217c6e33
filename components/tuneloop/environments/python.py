"""Python as a tool: ``<tool_call>{"name": "python", "arguments": {"code": "print(6)"}}</tool_call>``.

Each call runs as a program of its own in `tuneloop.rewards.sandbox`, as with the reward ``code``,
and the policy reads what it printed. A turn without a call is the final answer; the rewards of the
row judge it. The tests are `tests/unit/rewards/test_code.py`,
`tests/unit/inference/test_episodes.py` and, for a remote sandbox,
`tests/unit/inference/test_sandbox_server.py`.
"""

from dataclasses import replace
from typing import Annotated

from pydantic import Field

from tuneloop.core.errors import Retryable
from tuneloop.core.json_types import JsonMapping
from tuneloop.environments import Call, Environment, Reply, parse_tool_calls
from tuneloop.rewards.sandbox import LEAST_MEMORY, Limits, check_sandbox, run_in_sandbox

# `tuneloop probe` sends its attacks there. `Python._answer_call` knows the same names.
TOOL = ("python", "code")
"""The tool's name, and its argument that holds what the policy writes."""


def create_environment(
    row: JsonMapping,
    *,
    seconds: Annotated[float, Field(gt=0)] = 4.0,
    memory_mb: Annotated[float, Field(ge=LEAST_MEMORY >> 20)] = 256,
    output_kb: Annotated[float, Field(gt=0)] = 4,
) -> Environment:
    """Begin an episode in which the policy may run programs.

    Args:
        row: of prompts; not read.
        seconds: for all calls of a turn together.
        memory_mb, output_kb: for each call.

    Raises:
        UserError: the sandbox cannot be set up here.
    """
    check_sandbox("environment", "python")
    return Python(
        Limits(
            seconds=seconds,
            memory=int(memory_mb * 2**20),
            output=int(output_kb * 2**10),
        )
    )


class Python:
    """`Environment` with one tool."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.remaining_s = limits.seconds

    def step(self, turn: str) -> Reply:
        """Run the programs of a turn in their order."""
        calls = parse_tool_calls(turn)
        self.remaining_s = self.limits.seconds
        texts: list[str] = []
        escape = ""
        for call in calls:
            reply = self._answer_call(call)
            texts.append(reply.text)
            if reply.escape:
                # The episode is over: no further program runs.
                escape = reply.escape
                break
        return Reply("\n".join(texts), done=not calls or bool(escape), escape=escape)

    def _answer_call(self, call: Call) -> Reply:
        if call.problem:
            return Reply(f"error: the call {call.problem}")
        code = call.arguments.get("code")
        if call.name != "python" or not isinstance(code, str):
            return Reply('error: there is only python, and it takes {"code": "…"}')
        if self.remaining_s <= 0:
            return Reply("error: the calls before it used up the time of the turn")
        limits = replace(self.limits, seconds=self.remaining_s)
        try:
            ending = run_in_sandbox(code, "", None, limits)
        except OSError as error:
            raise Retryable(f"environment python: {error}") from error
        self.remaining_s -= ending.seconds
        if ending.kind == "escape":
            return Reply(escape=ending.door)
        # The sandbox keeps a byte more than the limit, which shows that there was more.
        lines = [ending.stdout[: self.limits.output].rstrip("\n")]
        # By `Kind` of `rewards/sandbox`: a kind that is not here, as ``done``, gets no line.
        problems = {
            "error": ending.error or "it failed",
            "output": "more output than is kept",
            "memory": "it used up its memory",
            "timeout": "it used up its time",
        }
        if ending.kind in problems:
            lines.append(f"error: {problems[ending.kind]}")
        return Reply("\n".join(filter(None, lines)))
