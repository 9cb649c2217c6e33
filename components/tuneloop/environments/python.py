"""Python as a tool: ``<tool_call>{"name": "python", "arguments": {"code": "print(6 * 7)"}}</tool_call>``.

Each call runs as a program of its own in `tuneloop.rewards.sandbox`, as with the reward ``code``, and the policy reads
what it printed. A turn without a call is the final answer; the rewards of the row judge it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from tuneloop.core.errors import Retryable
from tuneloop.environments import Call, Environment, Reply, tool_calls
from tuneloop.rewards.sandbox import Limits, check_sandbox, run_in_sandbox


def create_environment(
    row: Mapping[str, Any],
    *,
    seconds: Annotated[float, Field(gt=0)] = 4.0,
    memory_mb: Annotated[float, Field(gt=0)] = 256,
    output_kb: Annotated[float, Field(gt=0)] = 4,
) -> Environment:
    """Begin an episode in which the policy may run programs: `seconds` are for all calls of a turn together,
    `memory_mb` and `output_kb` for each call. Raises UserError: the sandbox cannot be set up here."""
    check_sandbox("environment", "python")
    return Python(Limits(seconds, int(memory_mb * 2**20), int(output_kb * 2**10)))


class Python:
    """`Environment` with one tool."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.left = limits, limits.seconds

    def step(self, said: str) -> Reply:
        calls, self.left = tool_calls(said), self.limits.seconds
        replies = [self._answer(call) for call in calls]
        escape = next((reply.escape for reply in replies if reply.escape), "")
        return Reply(
            "\n".join(reply.text for reply in replies),
            done=not calls or bool(escape),
            escape=escape,
        )

    def _answer(self, call: Call) -> Reply:
        if call.problem:
            return Reply(f"error: the call {call.problem}")
        code = call.arguments.get("code")
        if call.name != "python" or not isinstance(code, str):
            return Reply('error: there is only python, and it takes {"code": "…"}')
        if self.left <= 0:
            return Reply("error: the calls before it used up the time of the turn")
        try:
            ending = run_in_sandbox(code, "", None, replace(self.limits, seconds=self.left))
        except OSError as error:
            raise Retryable(f"environment python: {error}") from error
        self.left -= ending.seconds
        if ending.kind == "escape":
            return Reply(escape=ending.door)
        said = ending.stdout[: self.limits.output].rstrip("\n")
        trouble = {
            "done": "",
            "error": ending.error or "it failed",
            "output": "more output than is kept",
        }
        problem = trouble.get(
            ending.kind, f"it used up its {'memory' if ending.kind == 'memory' else 'time'}"
        )
        return Reply("\n".join(filter(None, (said, problem and f"error: {problem}"))))
