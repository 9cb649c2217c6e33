"""Bytes a parameter of training in full precision: weights, gradients and Adam's two moments, as in
Rajbhandari et al., "ZeRO" (2020), §3.1.

What is estimated of pods (`argo/memory_estimate.py`), of sleeping trainers
(`extensions/sharing/colocation.py`) and of the store (`planning/checkpoint_size.py`) comes from
these figures. `config/choices.py: find_activation_budget`, which is below this layer, has 4 and 16
of its own. It holds for the trainer of `training/fsdp/`: weights and AdamW's moments in float32.
"""

WEIGHT_BYTES = 4
GRADIENT_BYTES = 4
MOMENTS_BYTES = 8
STATE_BYTES = WEIGHT_BYTES + MOMENTS_BYTES
"""Of a trainer that computes nothing: asleep in host memory, or written to the store."""
TRAINED_BYTES = STATE_BYTES + GRADIENT_BYTES


def compute_trainer_memory(parameters: int, width: int = WEIGHT_BYTES) -> tuple[int, int]:
    """Compute a sleeping trainer's bytes of host memory: weights, and Adam's two moments.

    Args:
        parameters: of the model.
        width: bytes of a number.
    """
    weights = parameters * width
    return weights, 2 * weights
