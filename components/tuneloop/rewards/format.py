"""Form: the whole completion matches a regular expression, ``metadata["format"]["pattern"]``.

It must not be ``TRUSTED``: a completion may let a user's pattern take for ever.

Set it for all prompts with ``--reward-args '{"format": {"pattern": "<think>.*</think>.*"}}'`` of
`data_prep`.
"""

import re

from tuneloop.core.json_types import JsonObject


def score(completion: str, answer: str, metadata: JsonObject) -> float | None:
    """Return 1.0 if the pattern matches the stripped completion, else 0.0; None without a pattern.

    Dots match line ends, too.
    """
    pattern = metadata.get("format", {}).get("pattern")
    if pattern is None:
        return None
    return float(re.fullmatch(pattern, completion.strip(), re.DOTALL) is not None)
