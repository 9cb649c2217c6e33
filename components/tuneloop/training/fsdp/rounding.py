"""Stochastic rounding of a policy's float32 parameters to the dtype in which its model is written.

AdamW changes a parameter by about the learning rate in a step. Full fine-tuning at 2e-5 changes it
by some 1e-4 in all, and two bfloat16 numbers near 0.05 are 2.4e-4 apart: rounded to the nearest,
most parameters are written as they were before training. SmolLM2-135M after six steps had a
held-out loss of 0.58 nats in float32 and of 2.27 in bfloat16 (3.12 before training). Rounded up
with a probability that is the distance to the lower neighbour, the mean change stays: 0.58.

The probabilities are decided by numbers that depend on a parameter's name and place alone. So equal
parameters give equal bytes, on any device and with any number of processes; a number that the dtype
has is written as it is; and a parameter that grows from version to version is written anew only
where it passes its own threshold, so that the deltas of published versions stay sparse.

Whoever writes a model, or measures what would be written, rounds by this function under the names
of the model without adapters (`training/fsdp/export.py`, `training/fsdp/policy.py`). Other
thresholds give other bytes: the next delta of a run would be nearly a whole model, and a replay
would not give the model that was committed.

Source: Gupta et al., Deep Learning with Limited Numerical Precision (2015), section 3.1, with a
fixed threshold in place of a new random number.
"""

import functools
import math
import zlib

import torch
from torch import Tensor

PERIOD = (1 << 20) + 7
"""How many thresholds there are; they repeat. It is a prime, so that the rows of a matrix, whose
lengths are multiples of small numbers, begin at different thresholds.
"""
DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""The bits of a float32 number's mantissa that a dtype does not have; at most 16, as thresholds
have no more. A dtype that is not here is rounded to the nearest.
"""


def round_tensor(value: Tensor, dtype: torch.dtype, name: str, first_row: int = 0) -> Tensor:
    """Round a parameter, or some of its rows.

    Args:
        value: float32, of any shape; another dtype is only converted.
        dtype: the result's. Numbers that are subnormal in float16 are rounded to the nearest.
        name: the parameter's name in the model.
        first_row: index in the parameter of the first row of `value`.

    Returns:
        The numbers in `dtype`, in the shape of `value`, on its device.
    """
    bits = DROPPED_BITS.get(dtype)
    if bits is None or value.dtype != torch.float32:
        return value.to(dtype)
    thresholds = _make_thresholds(value.device)
    numbers = value.detach().contiguous().flatten()
    rounded = torch.empty_like(numbers, dtype=dtype)
    first_number = first_row * math.prod(value.shape[1:])
    offset = (zlib.crc32(name.encode()) + first_number) % PERIOD
    position = 0
    while position < len(numbers):
        part = numbers[position : position + PERIOD - offset]
        threshold = thresholds[offset : offset + len(part)] >> (16 - bits)
        # The bits of sign, exponent and mantissa are one integer, whose carry goes on into the
        # exponent; the sign is apart, so that negative numbers are rounded as positive ones.
        raised = (part.view(torch.int32) + threshold) & -(1 << bits)
        # An infinity or a NaN would become another number.
        result = torch.where(part.isfinite(), raised.view(torch.float32), part)
        rounded[position : position + len(part)] = result
        position += len(part)
        offset = 0
    return rounded.view(value.shape)


@functools.cache
def _make_thresholds(device: torch.device) -> Tensor:
    """Make the thresholds: int32 ``[PERIOD]``, uniform in 0 … 65535, the same on every machine."""
    # SplitMix64 (Steele et al., 2014), whose multiplications wrap.
    state = torch.arange(1, PERIOD + 1, dtype=torch.int64) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        state = (state ^ _shift_right(state, shift)) * factor
    state ^= _shift_right(state, 31)
    return _shift_right(state, 48).to(device, torch.int32)


def _shift_right(value: Tensor, count: int) -> Tensor:
    """Shift int64 numbers right as unsigned ones."""
    return (value >> count) & ((1 << (64 - count)) - 1)
