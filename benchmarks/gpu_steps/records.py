"""What a step of `benchmarks.on_gpu` is given, and the file that its figures are appended to."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

Result = TypeVar("Result")


@dataclass(frozen=True)
class Step:
    """A step that runs.

    Attributes:
        name: its name in the list.
        results: the JSON Lines file of all leases.
        work: an empty directory.
        model: the directory of the pretrained model SmolLM2-135M-Instruct in bfloat16.
        small: whether this is a rehearsal, of sizes for a CPU.
    """

    name: str
    results: Path
    work: Path
    model: Path
    small: bool

    def record(self, **figures: Any) -> None:
        """Append figures to the file at once: what a step had before its time was over is kept."""
        append_record(self.results, {"step": self.name, "figures": figures})


def append_record(results: Path, record: dict[str, Any]) -> None:
    line = json.dumps({"time": round(time.time(), 1), **record})
    with results.open("a") as file:
        file.write(line + "\n")
    print(line, flush=True)


def read_records(results: Path) -> list[dict[str, Any]]:
    if not results.exists():
        return []
    return [json.loads(line) for line in results.read_text().splitlines()]


def find_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_seconds(call: Callable[[], Result]) -> tuple[float, Result]:
    """Return the seconds until the GPU has done what `call` asks for, and what it returns."""
    synchronize()
    start = time.perf_counter()
    result = call()
    synchronize()
    return time.perf_counter() - start, result


def release_memory() -> None:
    """Give back what no object holds any more, and count the peak of memory anew."""
    import gc

    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def measure_peak_bytes() -> int:
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
