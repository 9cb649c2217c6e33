"""Exact match: the completion is the answer, white space at the ends aside."""

from typing import Any

TRUSTED = True


def score(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """Return 1.0 for equal text, else 0.0."""
    return float(completion.strip() == answer.strip())
