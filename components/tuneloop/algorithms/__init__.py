"""Objectives: what training maximises, one file an algorithm, found by name.

A policy gradient (for `policy_update`) is a module with a class ``Algorithm``, a
`_objective.PolicyGradient`: a pydantic model of the options, under TRL's names where TRL has them,
with three methods::

    advantages(completions) -> float32 [targets]
        # how much better each token is than its baseline
    loss(tokens) -> LossOutput
        # one value a token, before it is weighed; metrics; auxiliary terms of the batch
    token_weights(targets) -> float32 [completions]
        # the weight of each token of a completion in the mean

The step is taken on the sum of ``loss * weight`` over a whole mini-batch, however that is cut into
micro-batches and dealt to ranks, and on the auxiliary terms of the loss. Preference objectives
(`preference`) are in `_preference`, shared mathematics in `_terms`.
"""
