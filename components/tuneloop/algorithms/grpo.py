"""Group relative policy optimization (arXiv 2402.03300), clipped higher above than below (DAPO, arXiv 2503.14476).

All tensors are float32 over tokens, ``[tokens]``, unless they are said to be over completions.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-4  # added to a standard deviation, as TRL does
LOG_LIMIT = 20.0  # log-ratios beyond this are clamped before exp


def advantages(rewards: Tensor, groups: Tensor, valid: Tensor, *, scale_rewards: str = "group") -> Tensor:
    """How much better each completion is than its group.

    ``(R - mean of the group) / (std + 1e-4)``, where std is the unbiased estimate over the group, over the batch, or
    left out. Groups whose rewards are all equal give exact zeros, and so do groups of one.

    Args:
        rewards: float32 ``[completions]``; ignored where not valid, so anything may stand there.
        groups: int64 ``[completions]``, 0 … G-1.
        valid: bool ``[completions]``: whether the reward is a score; only these enter means and deviations.
        scale_rewards: ``group``, ``batch`` (arXiv 2508.08221) or ``none`` (Dr. GRPO, arXiv 2503.20783).

    Returns:
        Float32 ``[completions]``, 0 where not valid.
    """
    result = torch.zeros_like(rewards)
    overall = rewards[valid].std() if int(valid.sum()) > 1 else torch.tensor(0.0)
    for group in groups[valid].unique():
        members = valid & (groups == group)
        own = rewards[members]
        if own.min() == own.max():
            continue
        scale = {"group": own.std() + EPSILON, "batch": overall + EPSILON, "none": 1.0}[scale_rewards]
        result[members] = (own - own.mean()) / scale
    return result


def loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    engine_logprobs: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
    epsilon: float = 0.2,
    epsilon_high: float = 0.28,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    importance_sampling_cap: float = 2.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """``-w min(r A, clip(r, 1 - ε, 1 + ε_high) A) + β r k3`` for each token.

    With ``r = π/π_old``; ``w = min(π_old/μ, C)``, the truncated importance weight between the trainer's policy and the
    engine's μ that sampled, never differentiated; ``k3 = exp(log π_ref/π) - log π_ref/π - 1`` (Schulman). The factor r
    before it makes its gradient that of the KL divergence (DeepSeek-V3.2, arXiv 2512.02556), which k3's alone is not.

    Args:
        logprobs: of the policy being trained, with gradient.
        old_logprobs: of the policy before the first step on these completions, by the trainer.
        advantages: each token's completion's.
        engine_logprobs: as sampled; None leaves the correction and its measures out.
        reference_logprobs: None leaves the KL term out.
        use_bias_correction_kl: False leaves r out of the KL term.
        importance_sampling_cap: C; 0 leaves the correction out, not its measures.

    Returns:
        The loss of each token, and measures of each token, detached: ``ratio``, ``clip_fraction`` (0 or 1), and where
        their inputs are given ``kl``, ``logprob_gap`` (absolute difference of engine and trainer) and
        ``importance_weight`` (before truncation).
    """
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - epsilon, 1 + epsilon_high)
    tokens = -torch.min(ratio * advantages, clipped * advantages)
    outside = ((ratio < 1 - epsilon) & (advantages < 0)) | ((ratio > 1 + epsilon_high) & (advantages > 0))
    measures = {"ratio": ratio.detach(), "clip_fraction": outside.float()}
    if engine_logprobs is not None:
        gap = (old_logprobs - engine_logprobs).detach()
        weight = gap.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
        measures |= {"logprob_gap": gap.abs(), "importance_weight": weight}
        if importance_sampling_cap:
            tokens = tokens * weight.clamp(max=importance_sampling_cap)
    if reference_logprobs is not None:
        away = reference_logprobs - logprobs
        divergence = away.exp() - away - 1
        tokens = tokens + beta * divergence * (ratio if use_bias_correction_kl else 1.0)
        measures["kl"] = divergence.detach()
    return tokens, measures
