"""CISPO (arXiv 2506.13585): the ratio is a clipped weight, and every token keeps its gradient."""

from pydantic import Field

from tuneloop.algorithms import _terms, grpo
from tuneloop.algorithms._objective import Tokens
from tuneloop.algorithms._terms import Tensor


class Algorithm(grpo.Algorithm):
    """``min(r, epsilon_high) A log π`` with a detached ratio.

    TRL: ``loss_type="cispo"``. There as here `epsilon_high` is the bound itself (ScaleRL,
    arXiv 2510.13786, takes 5), and nothing bounds it below: `epsilon` and `delta` have no effect.
    """

    epsilon_high: float = Field(5.0, gt=0, description="bounds the ratio")
    loss_agg_mode: _terms.Aggregation = "token-mean"

    def surrogate(self, ratio: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        # The gradient comes through the log-probability, so the bound takes none away.
        bounded = ratio.detach().clamp(max=self.epsilon_high)
        gain = bounded * tokens.advantages * tokens.logprobs
        is_bounded = (bounded < ratio) & (tokens.advantages > 0)
        return gain, is_bounded
