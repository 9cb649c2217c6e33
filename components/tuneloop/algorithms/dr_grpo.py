"""Dr. GRPO (arXiv 2503.20783): GRPO without the two divisions that bias it.

These are by the deviation of rewards, and by the length of completions. It extends
`algorithms/grpo.py` by defaults alone. A run has to set `max_completion_length`: `PolicyGradient`
(`algorithms/_objective.py`) refuses this `loss_agg_mode` without it, and no other setting gives it.
"""

from tuneloop.algorithms import _terms, grpo


class Algorithm(grpo.Algorithm):
    """Advantages are not scaled, and token losses are divided by a constant.

    TRL: ``loss_type="dr_grpo"``.
    """

    scale_rewards: _terms.Scale = "none"
    loss_agg_mode: _terms.Aggregation = "seq-mean-token-sum-norm"
