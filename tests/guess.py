"""A number to find: the policy guesses and reads ``higher`` or ``lower`` until it says the row's answer: reward 1. An
environment as a user would write it."""

import re
from collections.abc import Mapping
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.environments import Environment, Reply

NUMBER = re.compile(r"-?\d{1,18}")


def create_environment(row: Mapping[str, Any]) -> Environment:
    """Begin an episode over the number ``row["answer"]``. Raises UserError where it is not a whole number."""
    if not NUMBER.fullmatch(row["answer"]):
        raise UserError(
            f"prompts row {row['id']}: answer",
            row["answer"],
            "the environment guess needs a whole number",
        )
    return Guess(int(row["answer"]))


class Guess:
    """`Environment` that knows a number."""

    def __init__(self, number: int) -> None:
        self.number = number

    def step(self, said: str) -> Reply:
        if not (guesses := NUMBER.findall(said)):
            return Reply("say a number\n", role="user", reward=0.0)
        if (guess := int(guesses[-1])) == self.number:
            return Reply(done=True, reward=1.0)
        return Reply("higher\n" if guess < self.number else "lower\n", role="user", reward=0.0)
