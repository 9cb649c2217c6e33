"""Identity preference optimization (arXiv 2310.12036): a margin to reach, not to exceed."""

from tuneloop.algorithms._preference import Judged, Preference
from tuneloop.algorithms._terms import Tensor


class Algorithm(Preference):
    """``(h - 1/(2β))²``, with h the difference of the ratios' means over tokens.

    TRL: DPOTrainer, ``loss_type="ipo"``.
    """

    def loss(self, judged: Judged) -> Tensor:
        chosen, rejected = judged.pairs(judged.ratios / judged.lengths)
        return (chosen - rejected - 1 / (2 * self.beta)).square()
