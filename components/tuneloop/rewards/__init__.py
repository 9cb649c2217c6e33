"""Reward functions: one file a reward, with ``score(completion, answer, metadata) -> float`` and ``RANGE``.

`scoring` runs them with a time limit, `sandbox` confines the code that a policy writes. No reward knows another."""

NOT_VARIANTS = ("answers", "programs", "proof", "sandbox", "scoring", "structures")
