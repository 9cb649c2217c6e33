"""Soft punishment of length: DAPO's (arXiv 2503.14476, eq. 13), over characters.

A verifier sees text, not tokens, and the gold answers are checked before there is a tokenizer.
``metadata["length_penalty"]`` holds `max_length`, from where the reward is -1, and `buffer`, the
length before that over which it falls linearly from 0.
"""

from tuneloop.core.json_types import JsonObject

RANGE = (-1.0, 0.0)
"""The lowest and the highest score. A gold answer must earn the highest one, if the weight is above
0 (`rewards/registry.py: compute_full_marks`)."""
TRUSTED = True
"""The reward is called in the stage's own process, without limits of time or memory
(`rewards/scoring.py`): `score` must do nothing whose cost a completion decides, such as match a
user's regular expression."""


def score(completion: str, answer: str, metadata: JsonObject) -> float | None:
    """Return 0.0 up to ``max_length - buffer`` characters, and -1.0 from `max_length` on.

    Return None where the metadata has no limits: the row cannot be judged.
    """
    limits = metadata.get("length_penalty")
    if limits is None:
        return None
    excess = len(completion) - (limits["max_length"] - limits["buffer"])
    # Without a buffer the reward does not fall, but drops.
    if not limits["buffer"]:
        return -float(excess > 0)
    return -min(max(excess / limits["buffer"], 0.0), 1.0)
