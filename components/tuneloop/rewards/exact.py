"""Exact match: the completion is the answer, white space at the ends aside.

It judges rows whose rewards nobody names (`data/tables.py: DEFAULT_REWARDS`).
"""

from tuneloop.core.json_types import JsonObject

TRUSTED = True
"""It is called in the stage's own process: see `rewards/length_penalty.py: TRUSTED`."""


def score(completion: str, answer: str, metadata: JsonObject) -> float | None:
    """Return 1.0 for equal text, else 0.0; None where there is no answer, which an empty completion
    would equal."""
    expected = answer.strip()
    if not expected:
        return None
    return float(completion.strip() == expected)
