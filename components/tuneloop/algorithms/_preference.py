"""The base of every preference objective.

It knows completions only by their log-ratio to the reference.

`stages/preference.py` calls `loss` and `measures` for each micro-batch, whose pairs lie side by
side: chosen, rejected, chosen, rejected. Of the measures it logs those that its `METRICS` names: a
further one has to be added there, too.

The backend `trl` trains only the algorithms that `training/backends/trl.py: LOSSES` lists, and
gives their options to TRL as they are: an option that TRL has keeps TRL's name.
"""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import BaseModel, Field

from tuneloop.algorithms._terms import Tensor


@dataclass(frozen=True, slots=True)
class Judged:
    """A micro-batch of pairs, alternately chosen and rejected: ``[2 pairs]`` each.

    Attributes:
        ratios: float32, ``log π(y|x) - log π_ref(y|x)``, summed over the completion's tokens, with
            gradient.
        lengths: int64, the completions' tokens.
        kl: float32 ``[]``, an estimate of KL(π, π_ref) for the whole batch, at least 0; 0 if it is
            not needed.
    """

    ratios: Tensor
    lengths: Tensor
    kl: Tensor

    def pairs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Split ``[2 pairs]`` into chosen and rejected, ``[pairs]`` each."""
        chosen, rejected = values.view(-1, 2).unbind(1)
        return chosen, rejected


class Preference(BaseModel, frozen=True, extra="forbid"):
    """A loss of pairs; implicit rewards are ``β · ratio``."""

    needs_kl: ClassVar[bool] = False
    """Whether `Judged.kl` must be estimated, from completions of other prompts.

    `reference_logprobs` scores those only if its parameter `mismatched_pairs` says so, which
    `pipelines/dpo.py` sets by this flag.
    """

    beta: float = Field(0.1, gt=0, description="strength of the pull to the reference")

    def loss(self, judged: Judged) -> Tensor:
        """Compute the loss: float32 ``[pairs]``; a step is taken on the mean over its pairs."""
        raise NotImplementedError

    def measures(self, judged: Judged) -> dict[str, Tensor]:
        """Compute measures, ``[pairs]`` each, detached, under TRL's names."""
        chosen, rejected = judged.pairs(self.beta * judged.ratios.detach())
        return {
            "rewards/chosen": chosen,
            "rewards/rejected": rejected,
            "rewards/margins": chosen - rejected,
            "rewards/accuracies": (chosen > rejected).float(),
        }
