"""Mathematical equality by math-verify: ``\\frac{1}{2}``, ``0.5`` and ``50\\%`` are the same answer."""

import functools
import logging
from typing import Any

from math_verify import parse, verify

# Its own time limits are alarms, which work in a main thread only and do not stop C code. Ours is the parent's clock.
for _name in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # each warns once that its limit is off


def score(completion: str, answer: str, metadata: dict[str, Any]) -> float | None:
    """Return 1.0 if the last expression of `completion` equals `answer`, else 0.0; None if `answer` has none."""
    if not (gold := _gold(answer)):
        return None
    try:
        return float(verify(gold, parse(completion, parsing_timeout=None), timeout_seconds=None))
    except Exception:  # whatever the completion makes the library raise, it is not the answer
        return 0.0


@functools.lru_cache(maxsize=4096)
def _gold(answer: str) -> Any:
    return parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None)
