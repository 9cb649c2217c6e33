"""Tasks of reasoning_gym by name; what their verifier needs travels in the metadata, for the reward of that name."""

import json
from collections.abc import Iterator
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from tuneloop.core.errors import UserError
from tuneloop.data import Example, Splits


def load_splits(n: int, seed: int, *, task: str, config: dict[str, Any] | None = None) -> Splits:
    """Generate questions of one task as they are asked for: four times the `n` that are wanted, since small tasks
    repeat themselves. Raises UserError: no such task, settings that it refuses, or a task without gold answers."""
    if task not in DATASETS:
        close = [name for name in sorted(DATASETS) if task.split("_")[0] in name] or sorted(
            DATASETS
        )
        raise UserError(
            "source_args.task", task, f"not a task of reasoning_gym; known: {', '.join(close)}"
        )
    try:
        questions = reasoning_gym.create_dataset(
            task, seed=seed % 2**31, size=4 * n + 64, **(config or {})
        )
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError("source_args.config", config, f"{task} refuses it ({error})") from error
    return Splits.of(_stream(questions, task, config or {}))


def _stream(questions: Any, task: str, config: dict[str, Any]) -> Iterator[Example]:
    for index in range(len(questions)):
        entry = questions[index]
        answer = entry["answer"]
        if answer is None:
            raise UserError(
                "source_args.task",
                task,
                "has no gold answers to check its verifier with; choose another",
            )
        # fractions become text; the gold check sees whether it matters
        entry = json.loads(json.dumps(entry, default=str))
        about = {"task": task, "config": config, "entry": entry}
        text = answer if isinstance(answer, str) else json.dumps(answer, default=str)
        yield Example(
            entry["question"],
            text,
            metadata={"reasoning_gym": about},
            rewards={"reasoning_gym": 1.0},
        )
