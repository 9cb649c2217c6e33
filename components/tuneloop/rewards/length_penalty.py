"""Soft punishment of length: DAPO's (arXiv 2503.14476, eq. 13), over the characters of the completion: a verifier sees
text, not tokens, and the gold answers are checked before there is a tokenizer. ``metadata["length_penalty"]`` holds
`max_length`, from where it is -1, and `buffer`, the length before that over which it falls linearly from 0."""

from tuneloop.core.json_types import JsonObject

RANGE = (-1.0, 0.0)
TRUSTED = True


def score(completion: str, answer: str, metadata: JsonObject) -> float | None:
    """Return 0.0 up to ``max_length - buffer`` characters, -1.0 from `max_length` on; None without limits."""
    if (limits := metadata.get("length_penalty")) is None:
        return None
    over = len(completion) - (limits["max_length"] - limits["buffer"])
    return -min(max(over / limits["buffer"], 0.0), 1.0) if limits["buffer"] else -float(over > 0)
