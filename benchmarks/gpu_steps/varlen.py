"""Attention over packed rows by torch's kernel, beside the same by document in float32."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_steps.records import Step, find_device, measure_seconds
from tuneloop.training.fsdp import attention

CASES = {
    "as many heads": {"heads": 16, "kv_heads": 16, "head": 128, "window": None},
    "grouped heads": {"heads": 16, "kv_heads": 8, "head": 128, "window": None},
    "SmolLM2's heads": {"heads": 9, "kv_heads": 3, "head": 64, "window": None},
    "sliding window": {"heads": 16, "kv_heads": 8, "head": 128, "window": 100},
}


def attend(tensors: list[Tensor], boundaries: Tensor, longest: int, window: int | None) -> Tensor:
    output, _ = attention.compute_attention(
        torch.nn.Identity(),
        tensors[0],
        tensors[1],
        tensors[2],
        None,
        sliding_window=window,
        cu_seq_lens_q=boundaries,
        max_length_q=longest,
    )
    return output


def differentiate(tensors: list[Tensor], **how: Any) -> list[Tensor]:
    """Return the output, and the gradients of query, key and value."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    output = attend(leaves, **how)
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view_as(output)
    (output.float() * weights).sum().backward()
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    return [output.detach(), *gradients]


def compare(
    step: Step, name: str, heads: int, kv_heads: int, head: int, window: int | None
) -> None:
    device = find_device()
    lengths = [3, 17, 64] if step.small else [1, 33, 280, 512, 1000, 7, 222]
    boundaries = torch.tensor([0, *lengths], device=device).cumsum(0).int()
    total = sum(lengths)
    torch.manual_seed(0)
    tensors = [
        torch.randn(1, count, total, head, device=device).bfloat16()
        for count in (heads, kv_heads, kv_heads)
    ]
    how = {"boundaries": boundaries, "longest": max(lengths), "window": window}
    exact = differentiate([tensor.float() for tensor in tensors], **how)
    close = differentiate(tensors, **how)
    errors = {
        part: float((ours.float() - wanted).norm() / wanted.norm())
        for part, ours, wanted in zip(("output", "dq", "dk", "dv"), close, exact, strict=True)
    }
    step.record(case=name, relative_error=errors)
    if max(errors.values()) > 0.02:
        raise SystemExit(f"{name}: {errors}")


def measure_speed(step: Step) -> None:
    """Forward and backward over 16,384 tokens in documents of 256, in the shape of Qwen3-0.6B."""
    device = find_device()
    documents = 4 if step.small else 64
    length = 256
    torch.manual_seed(0)
    tensors = [
        torch.randn(1, count, documents * length, 128, device=device).bfloat16()
        for count in (16, 8, 8)
    ]
    boundaries = torch.arange(documents + 1, device=device, dtype=torch.int32) * length

    def packed() -> None:
        differentiate(tensors, boundaries=boundaries, longest=length, window=None)

    seconds = [measure_seconds(packed)[0] for _ in range(2 if step.small else 8)]
    step.record(tokens=documents * length, milliseconds=1e3 * statistics.median(seconds[1:]))


def run(step: Step) -> None:
    for name, case in CASES.items():
        compare(step, name, **case)  # type: ignore[arg-type]
    measure_speed(step)
