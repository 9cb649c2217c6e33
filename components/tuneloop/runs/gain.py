"""Whether a policy earns more than another on held-out prompts, by more than noise would show.

The scores are paired by prompt: what makes a prompt hard is the same for both policies, and drops
out of the difference. A policy is better if the lower bound of the mean difference is above 0.

The gate of KFP's model registry asks it (`kfp/register.py`). Promotions compare the means alone, by
minima (`runs/promotions.py: find_requirements`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist, mean, stdev

import pyarrow.parquet as pq

from tuneloop.core.artifacts import Artifact
from tuneloop.runs.cautions import FEWEST_ROWS

CONFIDENCE = 0.95
"""The share of repeated measurements whose lower bound is below the true difference. The setting
`gate` (`config/pipeline.py`) and docs/kfp.md state it as 95 %."""


@dataclass(frozen=True)
class Gain:
    """What one policy earns more than another.

    Attributes:
        prompts: that both were scored on.
        difference: the mean of the differences; 0 for fewer prompts than `FEWEST_ROWS`.
        bound: its lower confidence bound; negative infinity for fewer prompts.
    """

    prompts: int
    difference: float
    bound: float

    @property
    def is_certain(self) -> bool:
        """Whether noise alone would hardly show it."""
        return self.bound > 0

    def __str__(self) -> str:
        if self.prompts < FEWEST_ROWS:
            return f"{self.prompts} held-out prompts were scored twice: {FEWEST_ROWS} are needed"
        return (
            f"mean reward {self.difference:+.3f} on {self.prompts} held-out prompts, at least "
            f"{self.bound:+.3f} with a confidence of {CONFIDENCE:.0%}"
        )


def compare_scores(before: Mapping[str, float], after: Mapping[str, float]) -> Gain:
    """Compare the scores of two policies, each by prompt."""
    differences = [after[prompt] - before[prompt] for prompt in before if prompt in after]
    count = len(differences)
    # The mean of so few says little, whatever their spread is.
    if count < FEWEST_ROWS:
        return Gain(count, 0.0, -math.inf)
    # The normal quantile would be too small for a standard error that is estimated, too.
    error = stdev(differences) / math.sqrt(count)
    difference = mean(differences)
    return Gain(count, difference, difference - _find_quantile(count - 1) * error)


def _find_quantile(freedom: int) -> float:
    """Return the quantile `CONFIDENCE` of Student's distribution, to 1 % from 10 degrees of freedom
    on (Abramowitz and Stegun, 26.7.5, two terms).
    """
    normal = NormalDist().inv_cdf(CONFIDENCE)
    correction = (normal**3 + normal) / 4
    return normal + correction / freedom


def read_scores(reference: str) -> dict[str, float]:
    """Read prompt → score of an evaluation; without those that have no score.

    Args:
        reference: of what the stage `evaluate` has committed. The name of its file is
            `formats/rollouts.py: SAMPLES_FILE`.
    """
    # A fetched file stays as long as the artifact.
    artifact = Artifact(reference)
    file = artifact.part("samples.parquet")
    rows = pq.read_table(file, columns=["id", "score"]).to_pylist()
    return {row["id"]: row["score"] for row in rows if row["score"] is not None}
