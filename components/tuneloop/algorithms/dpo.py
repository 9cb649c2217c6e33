"""Direct preference optimization (arXiv 2305.18290).

It is the default of `preference` (`stages/preference.py`). The options have TRL's names:
`training/backends/trl.py` passes them on.
"""

from pydantic import Field

from tuneloop.algorithms._preference import Judged, Preference
from tuneloop.algorithms._terms import Tensor


class Algorithm(Preference):
    """``-log σ(β (ratio chosen - ratio rejected))``. TRL: DPOTrainer, ``loss_type="sigmoid"``."""

    label_smoothing: float = Field(
        0.0, ge=0, lt=0.5, description="share of pairs that are the wrong way round (cDPO)"
    )

    def loss(self, judged: Judged) -> Tensor:
        from torch.nn.functional import logsigmoid

        chosen, rejected = judged.pairs(judged.ratios)
        margin = self.beta * (chosen - rejected)
        # A pair that is the wrong way round has the margin with the other sign.
        right = -(1 - self.label_smoothing) * logsigmoid(margin)
        wrong = self.label_smoothing * logsigmoid(-margin)
        return right - wrong
