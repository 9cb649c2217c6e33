"""Reward functions: one file a reward, with ``score(completion, answer, metadata) -> float``.

`scoring` runs them with a time limit, `sandbox` confines the code that a policy writes. No reward
knows another. A reward of yours whose judge is away raises `RewardUnavailable`.
"""

from tuneloop.rewards.outages import RewardUnavailable

NOT_VARIANTS = (
    "answers",
    "error_budget",
    "evaluated_text",
    "judging",
    "outages",
    "outcomes",
    "programs",
    "proof",
    "registry",
    "sandbox",
    "score_record",
    "scoring",
    "stage_scoring",
    "structures",
    "workers",
)

__all__ = ["NOT_VARIANTS", "RewardUnavailable"]
