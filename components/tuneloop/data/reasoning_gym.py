"""Tasks of reasoning_gym by name; what their verifier needs travels in the metadata, for the reward of that name."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from tuneloop.data import Example, Splits
from tuneloop.errors import UserError


def load(n: int, seed: int, *, task: str, config: dict[str, Any] | None = None) -> Splits:
    """Questions of one task, generated as they are asked for.

    Args:
        n: how many are wanted; four times as many are tried, since small tasks repeat themselves.
        seed: of the task.
        task: its name in reasoning_gym.
        config: its own settings, by reasoning_gym's names.

    Raises:
        UserError: no such task, or settings that it refuses.
    """
    if task not in DATASETS:
        close = [name for name in sorted(DATASETS) if task.split("_")[0] in name] or sorted(DATASETS)
        raise UserError("source_args.task", task, f"not a task of reasoning_gym; known: {', '.join(close)}")
    try:
        questions = reasoning_gym.create_dataset(task, seed=seed % 2**31, size=4 * n + 64, **(config or {}))
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError("source_args.config", config, f"{task} refuses it ({error})") from error
    return Splits.of(_stream(questions, task, config or {}))


def _stream(questions: Any, task: str, config: dict[str, Any]) -> Iterator[Example]:
    for index in itertools.takewhile(lambda i: i < len(questions), itertools.count()):
        entry = questions[index]
        answer = entry["answer"]
        if not isinstance(answer, str):
            answer = json.dumps(answer, default=str)
        about = {"task": task, "config": config, "entry": entry}
        yield Example(entry["question"], answer, metadata={"reasoning_gym": about})
