"""Objectives: advantages and losses, one file an algorithm.

An algorithm is a module of two pure functions::

    advantages(rewards, groups, valid, *, scale_rewards) -> Tensor
    loss(logprobs, old_logprobs, advantages, *, engine_logprobs, reference_logprobs, …) -> (Tensor, dict[str, Tensor])

`loss` gives one value a token; the caller divides their sum by the token count of the whole batch.
"""
