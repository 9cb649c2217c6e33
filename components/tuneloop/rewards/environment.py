"""What the environment itself said of the episode, 0 to 1: ``metadata["environment"]["reward"]``, as rollout put it."""

from typing import Any

NEEDS_EPISODE = True


def score(completion: str, answer: str, metadata: dict[str, Any]) -> float | None:
    """Return the environment's reward; None without an environment, or from one that has no opinion."""
    reward = metadata.get("environment", {}).get("reward")
    return None if reward is None else float(reward)
