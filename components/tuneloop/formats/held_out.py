"""What a checkpoint says of the loss on held-out demonstrations: ``facts.held_out``.

`training/held_out.py` measures it. `formats/facts.py` reads it back from the manifests of earlier
runs, too, and refuses one that lacks a field without a default: a new field needs a default. The
names of the fields are also keys of the commands' JSON output (docs/commands.md).
"""

import math
from dataclasses import asdict, dataclass

from tuneloop.core.wording import format_count

FACT = "held_out"
"""The key of the facts, which is also the field's name in `formats/facts.py`."""


@dataclass(frozen=True)
class HeldOutFacts:
    """The loss on held-out demonstrations before and after training. The page shows it as `__str__`
    says it.

    Attributes:
        demonstrations: how many were held out.
        targets: number of tokens that are learned, in all of them; a loss is the mean over these.
        loss_before, loss_after: mean negative log-probability of a target, in nats.
    """

    demonstrations: int
    targets: int
    loss_before: float
    loss_after: float

    def to_facts(self) -> dict[str, dict[str, float]]:
        """Return them as a part of `Manifest.facts`, for `Draft.commit`."""
        return {FACT: asdict(self)}

    def __str__(self) -> str:
        """Say the losses and perplexities, and how they were obtained."""
        perplexity_before = compute_perplexity(self.loss_before)
        perplexity_after = compute_perplexity(self.loss_after)
        tokens = format_count(self.targets, "target token")
        demonstrations = format_count(self.demonstrations, "held-out demonstration")
        return (
            f"{self.loss_before:.3f} → {self.loss_after:.3f} nats a token, "
            f"perplexity {perplexity_before:.4g} → {perplexity_after:.4g} "
            f"({tokens} of {demonstrations})"
        )


def compute_perplexity(loss: float) -> float:
    """Compute the perplexity of a mean loss in nats; infinite where it is beyond a float."""
    # A model that diverged has losses above 709 nats, where Python's exponential ends.
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
