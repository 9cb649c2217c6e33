"""The environment's own reward of the episode, 0 to 1, which rollout wrote to ``metadata["environment"]["reward"]``."""

from tuneloop.core.json_types import JsonObject

NEEDS_EPISODE = True


def score(completion: str, answer: str, metadata: JsonObject) -> float | None:
    """Return the environment's reward; None without an environment, or if it gave no reward."""
    reward = metadata.get("environment", {}).get("reward")
    return None if reward is None else float(reward)
