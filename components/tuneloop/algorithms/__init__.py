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

A file that is added is found by its name, and `config/algorithms.py: list_classes` makes its class
a section of the settings. The first line of the docstring of its class is the help of that section,
and stands in ``tests/golden/kfp`` (`make golden`). ``docs/training.md`` lists the algorithms;
`tests/local/test_parity.py` compares them with TRL.
"""
