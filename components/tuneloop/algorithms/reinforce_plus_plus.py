"""REINFORCE++ (arXiv 2501.03262): no critic and no group.

Advantages are whitened over all tokens of the batch. The KL is subtracted token by token, so that
`PolicyGradient.shaped` (`algorithms/_objective.py`), which subtracts its sum, is not used.
"""

from typing import Literal

from pydantic import Field

from tuneloop.algorithms import _terms
from tuneloop.algorithms._objective import Completions, PolicyGradient
from tuneloop.algorithms._terms import Tensor


class Algorithm(PolicyGradient):
    """A token's return is the reward less β times the KL from this token on.

    OpenRLHF calls it ``reinforce``. REINFORCE++-baseline is ``baseline="group"``, for which the
    paper has ``kl_in="loss", kl_estimator="k2"``.
    """

    kl_estimator: _terms.Estimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"
    baseline: Literal["none", "group"] = Field(
        "none", description="group: rewards less their group's mean"
    )

    def advantages(self, batch: Completions) -> Tensor:
        """Whiten the returns of the tokens whose completion has a score."""
        import torch

        rewards = batch.rewards
        if self.baseline == "group":
            rewards = _terms.group_relative(rewards, batch.groups, batch.valid, "none")
        values = batch.spread(rewards.where(batch.valid, 0.0))
        if batch.kl is not None and self.kl_in == "reward":
            parts = batch.kl.split(batch.targets.tolist())
            # Sums from the end: a token answers for what follows it, not for what precedes it.
            remaining = [part.flip(0).cumsum(0).flip(0) for part in parts]
            values = values - self.beta * torch.cat(remaining)
        scored = batch.spread(batch.valid)
        result = values.new_zeros(len(values))
        result[scored] = _terms.whiten_values(values[scored])
        return result
