"""Exact match: the completion is the answer, white space at the ends aside."""

from typing import Any

TRUSTED = True


def score(completion: str, answer: str, metadata: dict[str, Any]) -> float | None:
    """Return 1.0 for equal text, else 0.0; None where there is no answer, which an empty completion
    would equal."""
    expected = answer.strip()
    if not expected:
        return None
    return float(completion.strip() == expected)
