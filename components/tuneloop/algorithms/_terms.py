"""The mathematics that objectives share. Tensors are float32 over target tokens, ``[targets]``, unless said otherwise.

`sequence`, int64 ``[targets]``, is the completion that each token belongs to. No algorithm imports torch at the head of
its file, so that its options can be checked where torch is not installed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

EPSILON = 1e-4  # added to a standard deviation, as TRL does
LOG_LIMIT = 20.0  # log-ratios beyond this are clamped before exp

Estimator = Literal["k1", "k2", "k3"]
Correction = Literal[
    "none",
    "token_truncate",
    "token_mask",
    "sequence_truncate",
    "sequence_mask",
    "geometric_truncate",
    "geometric_mask",
]
Scale = Literal["group", "batch", "none"]
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def sequence_sum(values: Tensor, sequence: Tensor) -> Tensor:
    """Give each token the sum over its completion."""
    count = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(count).index_add(0, sequence, values)[sequence]


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """Give each token the mean over its completion's target tokens."""
    return sequence_sum(values, sequence) / sequence_sum(values.new_ones(values.shape), sequence)


def group_relative(rewards: Tensor, groups: Tensor, valid: Tensor, scale: Scale) -> Tensor:
    """Compute ``(R - mean of the group) / (std + 1e-4)``, by the unbiased deviation of the group, the batch, or none.

    Float32 ``[completions]``: 0 where not valid, and exactly 0 in groups of one and where a group's rewards are equal.

    Args:
        rewards: float32 ``[completions]``; ignored where not valid.
        groups: int64 ``[completions]``, 0 … G-1.
        valid: bool ``[completions]``: whether the reward is a score; only these enter means and deviations.
        scale: GRPO (arXiv 2402.03300) by ``group``; ``batch`` is arXiv 2508.08221; ``none`` Dr. GRPO, arXiv 2503.20783.
    """
    result = rewards.new_zeros(rewards.shape)
    overall = rewards[valid].std() if int(valid.sum()) > 1 else 0.0
    for members in _groups(rewards, groups, valid):
        own = rewards[members]
        by = {"group": own.std() + EPSILON, "batch": overall + EPSILON, "none": 1.0}[scale]
        result[members] = (own - own.mean()) / by
    return result


def leave_one_out(rewards: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """Compute ``R_i - mean of the group's others`` (RLOO, arXiv 2402.14740); arguments as of `group_relative`."""
    result = rewards.new_zeros(rewards.shape)
    for members in _groups(rewards, groups, valid):
        own = rewards[members]
        result[members] = own - (own.sum() - own) / (len(own) - 1)
    return result


def _groups(rewards: Tensor, groups: Tensor, valid: Tensor) -> list[Tensor]:
    """Return masks of the groups whose valid rewards differ."""
    masks = (valid & (groups == group) for group in groups[valid].unique())
    return [mask for mask in masks if rewards[mask].min() != rewards[mask].max()]


def estimate_kl(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(π, π_ref) from tokens that π sampled (Schulman); with ``x = log π - log π_ref``:

    k1 is ``x``, without bias and of high variance; k2 is ``x²/2``, whose gradient is that of KL; k3 is
    ``exp(-x) - 1 + x``, without bias, never negative, with another gradient (that of KL(π_ref, π))."""
    x = logprobs - reference
    return {"k1": lambda: x, "k2": lambda: x.square() / 2, "k3": lambda: (-x).exp() - 1 + x}[
        estimator
    ]()


def clip_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, delta: float | None
) -> tuple[Tensor, Tensor]:
    """Compute PPO's ``min(r A, clip(r, 1 - low, 1 + high) A)``, and whether clipping removes the gradient. `delta`
    bounds r itself for A < 0, where the minimum does not bound it (two-sided clipping, arXiv 2505.07291)."""
    outside = ((ratio < 1 - low) & (advantages < 0)) | ((ratio > 1 + high) & (advantages > 0))
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    return (bounded * advantages).minimum(ratio.clamp(1 - low, 1 + high) * advantages), outside


def compute_importance_weights(
    gap: Tensor, sequence: Tensor, mode: Correction, low: float | None, high: float | None
) -> tuple[Tensor, Tensor]:
    """Compute detached weights that correct for an engine μ other than the policy π_old, and the ratio before bounds.

    ``gap = log π_old - log μ``; each token's μ is the version that sampled it, so completions of several versions need
    nothing else. The ratio is the token's ``exp(gap)``, the completion's ``exp(Σ gap)``, or its geometric mean
    ``exp(mean gap)``. ``*_truncate`` clamps it to [low, high] (TIS, arXiv 2505.24298); ``token_mask`` and
    ``sequence_mask`` keep it inside and give 0 outside (IcePop, MIS); ``geometric_mask`` gives 1 inside, 0 outside."""
    gap = gap.detach()
    if mode.startswith("sequence"):
        gap = sequence_sum(gap, sequence)
    elif mode.startswith("geometric"):
        gap = sequence_mean(gap, sequence)
    ratio = gap.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    if mode == "none":
        return ratio.new_ones(ratio.shape), ratio
    if mode.endswith("truncate"):
        return ratio.clamp(min=low, max=high), ratio
    inside = (ratio >= (0.0 if low is None else low)) & (
        ratio <= (math.inf if high is None else high)
    )
    return inside.float() if mode == "geometric_mask" else ratio.where(inside, 0.0), ratio


def soft_overlong(lengths: Tensor, limit: int, cache: int) -> Tensor:
    """Punish length as DAPO does (arXiv 2503.14476, eq. 13): 0 up to ``limit - cache`` tokens, then falling to -1 at
    `limit`. `lengths`: int64 ``[completions]``, tokens."""
    return -((lengths - (limit - cache)) / cache).clamp(0.0, 1.0)


def whiten_values(values: Tensor) -> Tensor:
    """Shift and scale `values` to mean 0 and (biased) variance 1 over all of them (REINFORCE++, arXiv 2501.03262). They
    are exactly 0 if all are equal, as the rounding error of their mean would otherwise become a large advantage."""
    if not len(values) or values.min() == values.max():
        return values.new_zeros(values.shape)
    return (values - values.mean()) * (values.var(correction=0) + 1e-8).rsqrt()
