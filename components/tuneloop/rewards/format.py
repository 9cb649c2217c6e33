"""Form: the whole completion matches a regular expression, ``metadata["format"]["pattern"]``. Set it for all prompts
with ``--reward-args '{"format": {"pattern": "<think>.*</think>.*"}}'`` of `data_prep`."""

import re

from tuneloop.core.json_types import JsonObject


def score(completion: str, answer: str, metadata: JsonObject) -> float | None:
    """Return 1.0 if the pattern matches the stripped completion (dots match line ends), else 0.0; None without one."""
    if (pattern := metadata.get("format", {}).get("pattern")) is None:
        return None
    return float(re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None)
