"""GSPO (arXiv 2507.18071): ratio and clip belong to the completion, as the reward does.

It extends `algorithms/grpo.py` by defaults alone: `PolicyGradient.ratio`
(`algorithms/_objective.py`) computes the ratio of either level.
"""

from typing import Literal

from pydantic import Field

from tuneloop.algorithms import _terms, grpo


class Algorithm(grpo.Algorithm):
    """The ratio is the geometric mean over the completion.

    TRL: ``importance_sampling_level="sequence"``, GRPO loss.
    """

    importance_sampling_level: Literal["token", "sequence"] = "sequence"
    loss_agg_mode: _terms.Aggregation = "seq-mean-token-mean"
    # A mean over hundreds of tokens differs from 1 by far less than a token's ratio does.
    epsilon: float = Field(3e-4, gt=0)
    epsilon_high: float | None = Field(4e-4, gt=0)
