"""The losses of `forward_backward`: sums over tokens, as Tinker has them (tinker-docs.thinkingmachines.ai/losses)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tuneloop.algorithms._terms import clip_surrogate
from tuneloop.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SAMPLED = ("logprobs", "advantages")
INPUTS: dict[str, tuple[str, ...]] = {
    "cross_entropy": ("weights",),
    "importance_sampling": SAMPLED,
    "ppo": SAMPLED,
    "cispo": SAMPLED,
}
"""What each needs of every position, beside ``target_tokens``."""
THRESHOLDS: dict[str, dict[str, float]] = {
    "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
    "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
}
"""Options and their defaults: bounds of the ratio."""


def check_options(name: str, config: Mapping[str, float]) -> dict[str, float]:
    """Check the options of the loss `name`, and return them with defaults. Raises UserError at one that is unknown."""
    if name not in INPUTS:
        raise UserError("loss_fn", name, f"unknown; known: {', '.join(INPUTS)}")
    known = THRESHOLDS.get(name, {})
    for option in config.keys() - known.keys():
        raise UserError(f"loss_fn_config.{option}", config[option], f"{name} has {', '.join(known) or 'no options'}")
    return {**known, **config}


def compute_loss(name: str, logprobs: Tensor, inputs: Mapping[str, Tensor], config: Mapping[str, float]) -> Tensor:
    """Compute the loss of each target token; with ``r = exp(logprobs - sampled logprobs)`` and A the advantages:

    cross_entropy ``-w logprobs``; importance_sampling ``-r A``; ppo ``-min(r A, clip(r) A)``; cispo
    ``-clip(r) A logprobs`` where no gradient goes through the clipped ratio.

    Args:
        logprobs: float32 ``[targets]``, with gradient.
        inputs: float32 ``[targets]`` each, those that `INPUTS` names.
        config: what `check_options` gave.
    """
    if name == "cross_entropy":
        return -inputs["weights"] * logprobs
    ratio, advantages = (logprobs - inputs["logprobs"]).exp(), inputs["advantages"]
    if name == "importance_sampling":
        return -ratio * advantages
    low, high = config["clip_low_threshold"], config["clip_high_threshold"]
    if name == "ppo":
        return -clip_surrogate(ratio, advantages, 1 - low, high - 1, None)[0]
    return -ratio.detach().clamp(low, high) * advantages * logprobs
