"""Kahneman-Tversky optimization (arXiv 2402.01306).

Each completion is good or bad by itself, not within a pair. The options have TRL's names:
`training/backends/trl.py` passes them on.
"""

from typing import ClassVar

from pydantic import Field

from tuneloop.algorithms._preference import Judged, Preference
from tuneloop.algorithms._terms import Tensor


class Algorithm(Preference):
    """``w (1 - σ(±β (ratio - KL)))``, the mean over completions.

    TRL: KTOTrainer, ``loss_type="kto"``.
    """

    needs_kl: ClassVar[bool] = True
    desirable_weight: float = Field(
        1.0, ge=0, description="weight of the chosen completions in the loss"
    )
    undesirable_weight: float = Field(
        1.0, ge=0, description="weight of the rejected completions in the loss"
    )

    def loss(self, judged: Judged) -> Tensor:
        chosen, rejected = judged.pairs(self.beta * (judged.ratios - judged.kl))
        good = self.desirable_weight * (1 - chosen.sigmoid())
        bad = self.undesirable_weight * (1 - (-rejected).sigmoid())
        return (good + bad) / 2
