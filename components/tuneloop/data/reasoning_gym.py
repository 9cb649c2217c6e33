"""Tasks of reasoning_gym by name. The metadata has what their verifier needs, for the reward of
that name (`rewards/reasoning_gym.py`).

`data/layouts/math.py: read_reasoning_gym` writes the same metadata for rows of files.
"""

import json
from typing import Any

import reasoning_gym
from reasoning_gym.factory import DATASETS

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.data import Example, Splits


def load_splits(n: int, seed: int, *, task: str, config: JsonObject | None = None) -> Splits:
    """Generate questions of one task as they are asked for.

    Args:
        task: its name in reasoning_gym.
        config: the task's own settings.

    Raises:
        UserError: no such task, or settings that it refuses; while rows are read, a task without
            gold answers.
    """
    config = config or {}
    if task not in DATASETS:
        names = sorted(DATASETS)
        # Names are made of words, as `spell_backward`: those with the same first word are near.
        close = [name for name in names if task.split("_")[0] in name]
        remedy = f"not a task of reasoning_gym; known: {', '.join(close or names)}"
        raise UserError("source_args.task", task, remedy)
    # Small tasks repeat, and `data_prep` drops repeats: more are offered than are wanted.
    count = 4 * n + 64
    try:
        questions = reasoning_gym.create_dataset(task, seed=seed % 2**31, size=count, **config)
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError("source_args.config", config, f"{task} refuses it ({error})") from error
    numbers = range(len(questions))
    return Splits.of(_make_example(questions[number], task, config) for number in numbers)


def _make_example(entry: Any, task: str, config: JsonObject) -> Example:
    """Make an example of an entry of reasoning_gym. Raises UserError: it has no gold answer."""
    answer = entry["answer"]
    if answer is None:
        remedy = "has no gold answers to check its verifier with; choose another"
        raise UserError("source_args.task", task, remedy)
    # Fractions become text. The check of gold answers shows whether that matters to a verifier.
    entry = json.loads(json.dumps(entry, default=str))
    return Example(
        entry["question"],
        answer if isinstance(answer, str) else json.dumps(answer, default=str),
        metadata={"reasoning_gym": {"task": task, "config": config, "entry": entry}},
        rewards={"reasoning_gym": 1.0},
    )
