"""Reward functions: one file a reward, with ``score(completion, answer, metadata) -> float``.

`scoring` runs them with a time limit, `sandbox` confines the code that a policy writes. No reward
knows another. A reward of yours whose judge is away raises `RewardUnavailable`.

A file here is a reward that users may name, unless its name begins with an underscore or is in
`NOT_VARIANTS`: a module of helpers has to be added there.
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
