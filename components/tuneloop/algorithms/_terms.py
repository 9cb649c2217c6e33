"""The mathematics that objectives share.

Tensors are float32 over target tokens, ``[targets]``, unless stated otherwise. `sequence`, int64
``[targets]``, is the completion that each token belongs to. No algorithm imports torch at the head
of its file, so that its options can be checked where torch is not installed.

A term that is used by two algorithms belongs here. A change of one changes the results of every run
that is continued with the new code. `estimate_kl` is also called by `training/mini_batches.py`,
`clip_surrogate` by `extensions/gateway/resident.py`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

EPSILON = 1e-4
"""Added to each standard deviation that divides, as TRL does, here and in `algorithms/rloo.py`."""
LOG_LIMIT = 20.0
"""In nats: `compute_importance_weights` clamps log-ratios of trainer and engine to ± this."""

# A further value of the types below needs a branch in the function that reads it, which takes
# unknown values for the last one that it knows: `estimate_kl`, `compute_importance_weights` (by the
# first and the last word of the name), `group_relative`, and `PolicyGradient.token_weights` of
# `algorithms/_objective.py`.
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
    sums = values.new_zeros(count).index_add(0, sequence, values)
    return sums[sequence]


def sequence_mean(values: Tensor, sequence: Tensor) -> Tensor:
    """Give each token the mean over its completion's target tokens."""
    lengths = sequence_sum(values.new_ones(values.shape), sequence)
    return sequence_sum(values, sequence) / lengths


def group_relative(rewards: Tensor, groups: Tensor, valid: Tensor, scale: Scale) -> Tensor:
    """Compute ``(R - mean of the group) / (std + 1e-4)``.

    Args:
        rewards: float32 ``[completions]``; ignored where not valid.
        groups: int64 ``[completions]``, 0 … G-1.
        valid: bool ``[completions]``: whether the reward is a score; only these enter means and
            deviations.
        scale: whose unbiased deviation divides. GRPO (arXiv 2402.03300) has that of the ``group``,
            arXiv 2508.08221 that of the ``batch``, and Dr. GRPO (arXiv 2503.20783) ``none``.

    Returns:
        Float32 ``[completions]``: 0 where not valid, and exactly 0 in groups of one and where a
        group's rewards are equal.
    """
    result = rewards.new_zeros(rewards.shape)
    divisor: Tensor | float = 1.0
    if scale == "batch":
        # A single reward has no unbiased deviation.
        deviation = rewards[valid].std() if int(valid.sum()) > 1 else 0.0
        divisor = deviation + EPSILON
    for members in _list_groups(rewards, groups, valid):
        group = rewards[members]
        if scale == "group":
            divisor = group.std() + EPSILON
        result[members] = (group - group.mean()) / divisor
    return result


def leave_one_out(rewards: Tensor, groups: Tensor, valid: Tensor) -> Tensor:
    """Compute ``R_i - mean of the group's others`` (RLOO, arXiv 2402.14740).

    Arguments and result are as of `group_relative`.
    """
    result = rewards.new_zeros(rewards.shape)
    for members in _list_groups(rewards, groups, valid):
        group = rewards[members]
        baseline = (group.sum() - group) / (len(group) - 1)
        result[members] = group - baseline
    return result


def _list_groups(rewards: Tensor, groups: Tensor, valid: Tensor) -> list[Tensor]:
    """Return masks, bool ``[completions]``, of the groups whose valid rewards differ.

    The rounding error of a mean would become an advantage where all rewards are equal.
    """
    masks: list[Tensor] = []
    for group in groups[valid].unique():
        mask = valid & (groups == group)
        if rewards[mask].min() != rewards[mask].max():
            masks.append(mask)
    return masks


def estimate_kl(logprobs: Tensor, reference: Tensor, estimator: Estimator) -> Tensor:
    """Estimate KL(π, π_ref) from tokens that π sampled (Schulman, "Approximating KL Divergence").

    Args:
        logprobs: ``log π``.
        reference: ``log π_ref``.
        estimator: with ``x = log π - log π_ref``, k1 is ``x``, without bias and of high variance.
            k2 is ``x²/2``, whose gradient is that of KL. k3 is ``exp(-x) - 1 + x``, without bias
            and never negative, with another gradient (that of KL(π_ref, π)).
    """
    log_ratio = logprobs - reference
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    return (-log_ratio).exp() - 1 + log_ratio


def clip_surrogate(
    ratio: Tensor,
    advantages: Tensor,
    low: float,
    high: float,
    delta: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute PPO's ``min(r A, clip(r, 1 - low, 1 + high) A)``.

    Args:
        ratio: r.
        advantages: A.
        low, high: how far the ratio may go from 1.
        delta: bounds r itself for A < 0, where the minimum does not bound it (two-sided clipping,
            arXiv 2505.07291); None: no bound.

    Returns:
        The surrogate, and whether clipping removes its gradient (bool).
    """
    # The minimum takes the clipped side only where the ratio has already gone the way that the
    # advantage pulls it.
    is_too_low = (ratio < 1 - low) & (advantages < 0)
    is_too_high = (ratio > 1 + high) & (advantages > 0)
    bounded = ratio if delta is None else ratio.clamp(max=delta)
    clipped = ratio.clamp(1 - low, 1 + high) * advantages
    return (bounded * advantages).minimum(clipped), is_too_low | is_too_high


def compute_importance_weights(
    gap: Tensor,
    sequence: Tensor,
    mode: Correction,
    low: float | None,
    high: float | None,
) -> tuple[Tensor, Tensor]:
    """Compute weights that correct for an engine μ other than the policy π_old.

    Args:
        gap: ``log π_old - log μ``. Each token's μ is the version that sampled it, so completions of
            several versions need nothing else.
        sequence: the completion of each token.
        mode: which ratio, and what the bounds do. The ratio is the token's ``exp(gap)``, the
            completion's ``exp(Σ gap)``, or its geometric mean ``exp(mean gap)``. ``*_truncate``
            clamps it to [low, high] (TIS, arXiv 2505.24298). ``token_mask`` and ``sequence_mask``
            keep it inside and give 0 outside (IcePop, MIS). ``geometric_mask`` gives 1 inside and 0
            outside.
        low, high: the bounds of the ratio; None: none on that side.

    Returns:
        The weights, and the ratio before bounds; both detached.
    """
    # The weight corrects the expectation; it is no part of what is differentiated.
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
    lowest = 0.0 if low is None else low
    highest = math.inf if high is None else high
    is_inside = (ratio >= lowest) & (ratio <= highest)
    # The geometric mean says whether a completion is trusted, and is no weight of its tokens.
    if mode == "geometric_mask":
        return is_inside.float(), ratio
    return ratio.where(is_inside, 0.0), ratio


def soft_overlong(lengths: Tensor, limit: int, cache: int) -> Tensor:
    """Punish length as DAPO does (arXiv 2503.14476, eq. 13).

    Args:
        lengths: int64 ``[completions]``, tokens.
        limit: tokens from which on the punishment is -1.
        cache: tokens before `limit` over which it falls from 0.
    """
    excess = lengths - (limit - cache)
    return -(excess / cache).clamp(0.0, 1.0)


def whiten_values(values: Tensor) -> Tensor:
    """Shift and scale `values` to mean 0 and (biased) variance 1 over all of them.

    This is the normalization of REINFORCE++ (arXiv 2501.03262).
    """
    # The rounding error of the mean of equal values would become a large advantage.
    if not len(values) or values.min() == values.max():
        return values.new_zeros(values.shape)
    centered = values - values.mean()
    # The constant keeps the root of a tiny variance finite.
    return centered * (values.var(correction=0) + 1e-8).rsqrt()
