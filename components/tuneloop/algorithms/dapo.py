"""DAPO (arXiv 2503.14476): clipped higher above than below, dynamic sampling, overlong punishment.

Its loss is the mean over tokens. It extends `algorithms/grpo.py` by other defaults and by the
punishment. What `dynamic_sampling` does is in `training/mini_batches.py: _mark_use`, over-sampling
in `training/samples.py: select_groups`.
"""

from dataclasses import replace

from pydantic import Field, model_validator

from tuneloop.algorithms import _terms, grpo
from tuneloop.algorithms._objective import Completions
from tuneloop.algorithms._terms import Tensor


class Algorithm(grpo.Algorithm):
    """GRPO with DAPO's clipping, sampling and punishment.

    TRL has it as ``loss_type="dapo"``, and `max_completion_len` and `soft_punish_cache` as those of
    its `get_soft_overlong_punishment`. Dynamic sampling leaves groups of equal rewards out of the
    loss and its mean; `rollout --oversampled-prompts` replaces them by others, chosen by scores
    before the punishment. The punishment is added here, since `reward` sees text and no tokens. It
    counts the tokens that the policy sampled in all turns of an episode, without the replies.
    """

    epsilon_high: float | None = Field(0.28, gt=0)
    dynamic_sampling: bool = True
    max_completion_len: int = Field(
        0,
        ge=0,
        description="tokens of a completion from which on it is punished by -1; TRL's name, beside "
        "max_completion_length, which divides the loss; 0: no punishment",
    )
    soft_punish_cache: int = Field(
        0, ge=0, description="tokens before that over which it grows from 0"
    )

    @model_validator(mode="after")
    def _check_overlong(self) -> "Algorithm":
        if bool(self.max_completion_len) != bool(self.soft_punish_cache):
            raise ValueError("max_completion_len and soft_punish_cache must be set together")
        return self

    def advantages(self, batch: Completions) -> Tensor:
        if self.max_completion_len:
            punishment = _terms.soft_overlong(
                batch.lengths, self.max_completion_len, self.soft_punish_cache
            )
            batch = replace(batch, rewards=batch.rewards + punishment)
        return super().advantages(batch)
