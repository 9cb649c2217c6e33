"""Group relative policy optimization (arXiv 2402.03300).

A completion's baseline is its group's mean reward. The classes of dapo, dr_grpo, gspo and cispo
extend the one here: what changes in it changes in them, unless they override it. It is the default
of `policy_update` (`stages/policy_update.py`).
"""

from pydantic import Field

from tuneloop.algorithms import _terms
from tuneloop.algorithms._objective import Completions, PolicyGradient
from tuneloop.algorithms._terms import Tensor


class Algorithm(PolicyGradient):
    """GRPO with every token of the batch weighing the same, as by TRL's default.

    As published every completion weighs the same: ``loss_agg_mode="seq-mean-token-mean"``, TRL's
    ``loss_type="grpo"``.
    """

    scale_rewards: _terms.Scale = Field(
        "group", description="whose standard deviation divides advantages"
    )

    def advantages(self, batch: Completions) -> Tensor:
        """Compute rewards relative to their group; a completion's tokens share its advantage."""
        advantages = _terms.group_relative(
            self.shaped(batch),
            batch.groups,
            batch.valid,
            self.scale_rewards,
        )
        return batch.spread(advantages)
