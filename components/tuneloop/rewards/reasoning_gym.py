"""The verifier of the reasoning_gym task that a prompt came from.

``metadata["reasoning_gym"]`` has the task, its config, and the entry that the verifier compares
with. The source `data/reasoning_gym.py` writes it, and the layouts of `data/layouts/math.py`.

Some verifiers evaluate the completion as Python or sympy (`tuneloop.rewards.evaluated_text`). They
get only text that runs no code; any other is to them a text that cannot be read.
"""

import functools
import json
from collections.abc import Callable

import reasoning_gym

from tuneloop.core.json_types import JsonObject
from tuneloop.rewards.evaluated_text import Evaluation, find_evaluations


def score(completion: str, answer: str, metadata: JsonObject) -> float | None:
    """Return the task's own score of the stripped completion, from 0 to 1.

    A prompt from elsewhere has none.
    """
    task = metadata.get("reasoning_gym")
    if task is None:
        return None
    score_answer = _find_verifier(task["task"], json.dumps(task["config"]))
    # Whatever the completion makes a verifier raise, it is not the answer.
    try:
        return float(score_answer(completion.strip(), task["entry"]))
    except MemoryError:
        # Earlier calls may hold it: a new process judges again (`judging.py: judge`).
        raise
    except Exception:
        return 0.0


@functools.lru_cache(maxsize=64)
def _find_verifier(task: str, config: str) -> Callable[[str, JsonObject], float]:
    """Find a task's verifier, which judges harmless text only."""
    dataset = reasoning_gym.create_dataset(task, seed=0, size=1, **json.loads(config))
    verifiers = [dataset]
    # A composite task hands the text to one of its parts.
    verifiers += getattr(dataset, "datasets", {}).values()
    evaluations: set[Evaluation] = set()
    for verifier in verifiers:
        evaluations.update(find_evaluations(verifier.score_answer, type(verifier)))

    def judge_text(text: str, entry: JsonObject) -> float:
        for evaluation in evaluations:
            text = evaluation.keep_harmless(text)
        return float(dataset.score_answer(text, entry))

    return judge_text
