"""The verifier of the reasoning_gym task that a prompt came from. ``metadata["reasoning_gym"]``, which the source of
the same name writes, has the task, its config, and the entry that the verifier compares with."""

import functools
import json
from collections.abc import Callable
from typing import Any

import reasoning_gym


def score(completion: str, answer: str, metadata: dict[str, Any]) -> float | None:
    """Return the task's own score of the stripped completion, 0 to 1; None for a prompt from elsewhere."""
    task = metadata.get("reasoning_gym")
    if task is None:
        return None
    score_answer = _find_verifier(task["task"], json.dumps(task["config"]))
    # Whatever the completion makes a verifier raise, it is not the answer.
    try:
        return float(score_answer(completion.strip(), task["entry"]))
    except Exception:
        return 0.0


@functools.lru_cache(maxsize=64)
def _find_verifier(task: str, config: str) -> Callable[[str, dict[str, Any]], float]:
    return reasoning_gym.create_dataset(task, seed=0, size=1, **json.loads(config)).score_answer
