"""The environment's own reward of the episode, from 0 to 1.

The rollout wrote it to ``metadata["environment"]["reward"]``:
`inference/multi_turn.py: _LiveEpisode` states it, and `formats/rollouts.py: build_reward_inputs`
puts it there. The key ``escape`` beside it is read by `rewards/judging.py` for every reward.
"""

from tuneloop.core.json_types import JsonObject

NEEDS_EPISODE = True
"""`data/tables.py: RowBuilder` does not prove gold answers by it, as there is no episode yet."""


def score(completion: str, answer: str, metadata: JsonObject) -> float | None:
    """Return the environment's reward; None without an environment, or if it gave no reward."""
    reward = metadata.get("environment", {}).get("reward")
    return None if reward is None else float(reward)
