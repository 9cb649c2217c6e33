"""Group relative policy optimization (arXiv 2402.03300): a completion's baseline is its group's mean reward."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from tuneloop.algorithms import _terms
from tuneloop.algorithms._objective import Completions, PolicyGradient


class Algorithm(PolicyGradient):
    """GRPO as published: every completion weighs the same, the clip is symmetric.

    TRL: ``loss_type="grpo"``.
    """

    scale_rewards: _terms.Scale = "group"
    loss_agg_mode: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "seq-mean-token-mean"

    def advantages(self, batch: Completions) -> Tensor:
        rewards = self.shaped(batch)
        return batch.spread(_terms.group_relative(rewards, batch.groups, batch.valid, self.scale_rewards))
