"""The base class of policy gradients: options, importance weights, a KL term, token weights.

`training/mini_batches.py` calls `advantages` once, before the first step. It also reads the options
`beta`, `kl_in`, `kl_estimator`, `mask_truncated_completions` and `dynamic_sampling` by name, and
decides by them which completions count: an algorithm cannot give these another meaning.
`training/policy_gradient.py` calls `loss` and `token_weights` in each step.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from tuneloop.algorithms import _terms
from tuneloop.algorithms._terms import Tensor


@dataclass(frozen=True, slots=True)
class Completions:
    """A batch of completions, for which advantages are computed.

    Attributes:
        rewards: float32 ``[completions]``; any value where not valid, so mask before every mean.
        groups: int64 ``[completions]``, 0 … G-1: completions of one prompt.
        valid: bool ``[completions]``, whether the reward is a score.
        lengths: int64 ``[completions]``, the tokens that were sampled.
        targets: int64 ``[completions]``, the tokens that the loss sees.
        kl: float32 ``[targets]``, an estimate for each token of the divergence from the reference;
            None unless `PolicyGradient.kl_in` is ``reward`` and `beta` is not 0.
    """

    rewards: Tensor
    groups: Tensor
    valid: Tensor
    lengths: Tensor
    targets: Tensor
    kl: Tensor | None = None

    def spread(self, values: Tensor) -> Tensor:
        """Give each token its completion's value: ``[completions]`` → ``[targets]``."""
        return values.repeat_interleave(self.targets)


@dataclass(frozen=True, slots=True)
class Tokens:
    """A micro-batch of whole completions; float32 ``[targets]`` each but `sequence`.

    Attributes:
        logprobs: of the policy being trained, with gradient.
        old: of the policy before the first step on these completions, by the trainer.
        advantages: the result of `PolicyGradient.advantages`.
        sequence: int64, 0 … n-1, the completion a token belongs to.
        engine: of the version that sampled the token, by the engine. `training/policy_gradient.py`
            always has it; None (in tests): no correction, and no metrics of it.
        reference: of the reference policy; None, where `beta` is 0: no KL term.

    A loss of another quantity needs it here, where `training/policy_gradient.py: _forward` fills it
    in, and from `training/fsdp/policy.py: logprobs`. Its entropy has no gradient, and the `aux_loss`
    of a model with experts is dropped there.
    """

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    sequence: Tensor
    engine: Tensor | None = None
    reference: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LossOutput:
    """What `PolicyGradient.loss` computes of a micro-batch.

    Attributes:
        per_token: float32 ``[targets]``, the loss of each token before `token_weights`.
        metrics: detached tensors by name, ``[targets]`` each; the mean over tokens is logged under
            each name. ``loss``, ``entropy`` and the names of `RESERVED_METRICS` in
            `training/policy_gradient.py` are taken. `runs/alarms.py` and the page
            (``ui/static/dom.js``: ``QUANTITIES``, ``run.js``: ``FIRST``) know metrics by name.
        batch_terms: auxiliary losses by name, float32 ``[]`` each, with gradient: the mean over the
            micro-batch's target tokens, not weighed by `token_weights`. The step adds each term in
            proportion to the micro-batch's share of the mini-batch's target tokens, so that the sum
            is the same however the mini-batch is cut. (A product of means, such as a router's
            balancing loss, would depend on the cut.) Each is logged under its name.
    """

    per_token: Tensor
    metrics: dict[str, Tensor]
    batch_terms: dict[str, Tensor] = field(default_factory=dict)


class PolicyGradient(BaseModel, frozen=True, extra="forbid"):
    """``Σ weight · (-w · surrogate + β · ratio · KL)``, with options that all algorithms share.

    `grpo` and the algorithms that extend it, `rloo` and `reinforce_plus_plus` inherit a field or a
    changed method from here, unless they override it.

    Attributes:
        needs_every_completion: a subclass sets it if its auxiliary losses are of completions
            without an advantage, too. By default these, such as those of a group of equal rewards,
            do not go through the model (`training/mini_batches.py`: `_mark_use`).
    """

    needs_every_completion: ClassVar[bool] = False

    epsilon: float = Field(0.2, gt=0, description="the ratio is clipped below 1 - epsilon")
    epsilon_high: float | None = Field(
        None, gt=0, description="and above 1 + epsilon_high; None: as epsilon"
    )
    delta: float | None = Field(
        None, gt=1, description="bounds the ratio where the advantage is negative"
    )
    importance_sampling_level: Literal["token", "sequence"] = Field(
        "token", description="sequence: the ratio is the geometric mean over a completion (GSPO)"
    )
    loss_agg_mode: _terms.Aggregation = Field(
        "token-mean", description="verl's names; TRL: dapo, grpo and dr_grpo"
    )
    max_completion_length: int = Field(
        0,
        ge=0,
        description="tokens by which seq-mean-token-sum-norm divides; it limits no completion, as "
        "rollout.max_tokens does",
    )
    # A subclass keeps the default 0: `argo/memory_estimate.py` counts the reference policy only
    # where a run sets `beta`, as the parameters of a stage have no defaults
    # (`training/algorithm_lookup.py`: `list_stage_parameters`).
    beta: float = Field(
        0.0, ge=0, description="weight of the KL divergence to the reference; 0: none"
    )
    kl_estimator: _terms.Estimator = Field(
        "k3", description="estimator of the divergence (joschu.net/blog/kl-approx.html)"
    )
    kl_in: Literal["loss", "reward"] = Field("loss", description="where the divergence is added")
    use_bias_correction_kl: bool = Field(
        True,
        description="in the loss: weigh it by the ratio, so that its gradient is that of KL "
        "(arXiv 2512.02556)",
    )
    vllm_importance_sampling_mode: _terms.Correction = Field(
        "token_truncate", description="how the gap between engine and trainer is corrected"
    )
    vllm_importance_sampling_clip_min: float | None = Field(
        None, ge=0, description="least weight of that correction; none: no bound"
    )
    vllm_importance_sampling_clip_max: float | None = Field(
        2.0, gt=0, description="greatest weight of that correction; none: no bound"
    )
    off_policy_mask_threshold: float | None = Field(
        None,
        ge=0,
        description="drop bad completions that drifted further than this KL "
        "(OPSM, arXiv 2512.02556)",
    )
    mask_truncated_completions: bool = Field(
        False, description="leave completions that reached the limit out"
    )
    dynamic_sampling: bool = Field(
        False, description="leave completions without advantage out of the mean"
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> "PolicyGradient":
        low = self.vllm_importance_sampling_clip_min
        high = self.vllm_importance_sampling_clip_max
        if low is not None and high is not None and low >= high:
            raise ValueError(
                f"vllm_importance_sampling_clip_min {low} must be below …_clip_max {high}"
            )
        if self.loss_agg_mode == "seq-mean-token-sum-norm" and not self.max_completion_length:
            raise ValueError("max_completion_length must be set: it divides the loss")
        return self

    def advantages(self, batch: Completions) -> Tensor:
        """Compute advantages: float32 ``[targets]``, exactly 0 where there is no gradient."""
        raise NotImplementedError

    def surrogate(self, ratio: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """Compute the surrogate objective of each token, and whether its gradient is clipped."""
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return _terms.clip_surrogate(ratio, tokens.advantages, self.epsilon, high, self.delta)

    def ratio(self, tokens: Tokens) -> Tensor:
        """Compute ``π/π_old`` of each token, or its geometric mean over the completion."""
        log_ratio = tokens.logprobs - tokens.old
        # A mean of logarithms is the logarithm of the geometric mean.
        if self.importance_sampling_level == "sequence":
            log_ratio = _terms.sequence_mean(log_ratio, tokens.sequence)
        return log_ratio.exp()

    def loss(self, tokens: Tokens) -> LossOutput:
        """Compute the loss of each token before `token_weights`, and metrics of each.

        Returns:
            The loss without auxiliary terms. Its metrics are ``ratio``, ``clip_fraction`` (0 or 1),
            and if their inputs are given ``kl``, ``logprob_gap`` (absolute difference of engine and
            trainer, in nats), ``importance_weight`` (ratio before bounds) and ``rejected`` (0 or
            1). `Tally` of `training/policy_gradient.py` computes two more of ``logprob_gap`` and
            ``importance_weight``: an override of this method has both or neither.
        """
        ratio = self.ratio(tokens)
        gain, outside = self.surrogate(ratio, tokens)
        values = -gain
        metrics = {"ratio": ratio.detach(), "clip_fraction": outside.float()}
        if self.off_policy_mask_threshold is not None:
            # The policy that sampled is the engine's, where it is known.
            behaviour = tokens.old if tokens.engine is None else tokens.engine
            # Only bad completions are dropped: to make a good one likelier does no harm.
            drift = _terms.sequence_mean(behaviour - tokens.logprobs.detach(), tokens.sequence)
            values = values * ((tokens.advantages >= 0) | (drift <= self.off_policy_mask_threshold))
        if tokens.engine is not None:
            gap = tokens.old - tokens.engine
            weight, raw = _terms.compute_importance_weights(
                gap,
                tokens.sequence,
                mode=self.vllm_importance_sampling_mode,
                low=self.vllm_importance_sampling_clip_min,
                high=self.vllm_importance_sampling_clip_max,
            )
            values = values * weight
            metrics |= {
                "logprob_gap": gap.abs(),
                "importance_weight": raw,
                "rejected": (weight == 0).float(),
            }
        if tokens.reference is not None:
            kl = _terms.estimate_kl(tokens.logprobs, tokens.reference, self.kl_estimator)
            metrics["kl"] = kl.detach()
            if self.kl_in == "loss":
                values = values + self.beta * kl * (ratio if self.use_bias_correction_kl else 1.0)
        return LossOutput(values, metrics)

    def token_weights(self, targets: Tensor) -> Tensor:
        """Compute the weight of each token of a completion in the mean over a mini-batch.

        Args:
            targets: int64 ``[completions]``, the number of target tokens of every completion of
                the mini-batch that counts (`training/mini_batches.py`: `_mark_use`), on all ranks.

        Returns:
            Float32 ``[completions]``.
        """
        ones = targets.new_ones(targets.shape).float()
        if self.loss_agg_mode == "token-mean":
            return ones / targets.sum()
        # Each completion counts the same: its sum is divided by its own tokens, or by a constant,
        # which does not make tokens of long completions count less.
        divisor = targets
        if self.loss_agg_mode == "seq-mean-token-sum-norm":
            divisor = self.max_completion_length * ones
        return ones / (divisor * len(targets))

    def shaped(self, batch: Completions) -> Tensor:
        """Return the rewards, float32 ``[completions]``.

        They are less ``β Σ KL`` over the completion, if the divergence is part of the reward.
        """
        if batch.kl is None or self.kl_in != "reward":
            return batch.rewards
        sums = [float(part.sum()) for part in batch.kl.split(batch.targets.tolist())]
        return batch.rewards - self.beta * batch.rewards.new_tensor(sums)
