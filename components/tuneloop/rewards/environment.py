"""The environment's own reward of the episode, from 0 to 1.

The rollout wrote it to ``metadata["environment"]["reward"]``.
"""

from tuneloop.core.json_types import JsonObject

NEEDS_EPISODE = True


def score(completion: str, answer: str, metadata: JsonObject) -> float | None:
    """Return the environment's reward; None without an environment, or if it gave no reward."""
    reward = metadata.get("environment", {}).get("reward")
    return None if reward is None else float(reward)
