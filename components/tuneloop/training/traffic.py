"""How long ranks spend in collectives, waiting for one another included: by torch's profiler, over one step."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile


@contextmanager
def measure_collectives(found: dict[str, float]) -> Iterator[None]:
    """Set ``communication_s``, the time in collectives of this rank, and ``step_s``, that of the whole block."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it calls a machine without a GPU an error
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as seen:
        start = time.perf_counter()
        yield
        elapsed = time.perf_counter() - start
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if event.name.startswith("gloo:") or ("nccl" in event.name.lower() and event.device_type == DeviceType.CUDA)
    ]
    found |= {"communication_s": compute_union_length(spans) / 1e6, "step_s": elapsed}


def compute_union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Compute the length of the union of intervals, as collectives overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
