"""RLOO (arXiv 2402.14740): REINFORCE on whole completions, the group's others as baseline."""

from typing import Literal

from pydantic import Field

from tuneloop.algorithms import _terms
from tuneloop.algorithms._objective import Completions, PolicyGradient, Tokens
from tuneloop.algorithms._terms import Tensor


class Algorithm(PolicyGradient):
    """The ratio is that of the completion, the product over its tokens. TRL: RLOOTrainer.

    `importance_sampling_level` has no effect, as `ratio` is overridden.
    """

    kl_estimator: _terms.Estimator = "k1"
    kl_in: Literal["loss", "reward"] = "reward"
    loss_agg_mode: _terms.Aggregation = "seq-mean-token-mean"
    normalize_advantages: bool = Field(
        False, description="subtract the mean of all advantages, and divide by their deviation"
    )

    def advantages(self, batch: Completions) -> Tensor:
        """Compute the difference from the mean of the group's other rewards."""
        rewards = self.shaped(batch)
        values = _terms.leave_one_out(rewards, batch.groups, batch.valid)
        scored = values[batch.valid]
        if self.normalize_advantages and len(scored) > 1:
            normalized = (values - scored.mean()) / (scored.std() + _terms.EPSILON)
            # What has no score has no advantage, whatever the mean is.
            values = normalized.where(batch.valid, 0.0)
        return batch.spread(values)

    def ratio(self, tokens: Tokens) -> Tensor:
        """Compute ``π/π_old`` of the completion."""
        log_ratio = tokens.logprobs - tokens.old
        return _terms.sequence_sum(log_ratio, tokens.sequence).exp()
