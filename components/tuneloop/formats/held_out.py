"""What a checkpoint says of the loss on held-out demonstrations: ``facts.held_out``."""

import math
from dataclasses import asdict, dataclass

FACT = "held_out"


@dataclass(frozen=True)
class HeldOutFacts:
    """The loss on held-out demonstrations before and after training.

    Attributes:
        demonstrations: how many were held out.
        targets: their target tokens, over which a loss is the mean.
        loss_before, loss_after: mean negative log-probability of a target, in nats.
    """

    demonstrations: int
    targets: int
    loss_before: float
    loss_after: float

    def to_facts(self) -> dict[str, dict[str, float]]:
        """Return them as the facts of a manifest."""
        return {FACT: asdict(self)}

    def __str__(self) -> str:
        """Say the losses and perplexities, and how they were obtained."""
        perplexity_before = compute_perplexity(self.loss_before)
        perplexity_after = compute_perplexity(self.loss_after)
        return (
            f"{self.loss_before:.3f} → {self.loss_after:.3f} nats a token, "
            f"perplexity {perplexity_before:.4g} → {perplexity_after:.4g} "
            f"({self.targets:,} target tokens of {self.demonstrations:,} held-out demonstrations)"
        )


def compute_perplexity(loss: float) -> float:
    """Compute the perplexity of a mean loss in nats; infinite where it is beyond a float."""
    # A model that diverged has losses above 709 nats, where Python's exponential ends.
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
