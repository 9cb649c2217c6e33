"""The processes that train together, and their collective operations."""

import atexit
import contextlib
import os
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tuneloop.core.errors import UserError
from tuneloop.core.processor import check_processor
from tuneloop.training.options import Device

Value = TypeVar("Value")


class Ranks:
    """The processes that train together, and the device of this one; ``auto`` is CUDA if available. Raises UserError
    without CUDA, or if there are not `expected` processes; these are counted, not read from the environment."""

    def __init__(self, device: Device = "auto", expected: int | None = None) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "--device",
                device,
                "torch sees no CUDA device; give the pod a GPU, or say cpu or auto",
            )
        kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
        if kind == "cpu":
            check_processor()
        self.rank, self.world = (
            int(os.environ.get("RANK", "0")),
            int(os.environ.get("WORLD_SIZE", "1")),
        )
        self.device = torch.device(
            kind, int(os.environ.get("LOCAL_RANK", "0")) if kind == "cuda" else None
        )
        self.mesh: DeviceMesh | None = None
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        if self.world > 1:
            if not dist.is_initialized():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
                )  # gloo for offloaded shards
                atexit.register(_leave_group)
            self.mesh = init_device_mesh(kind, (self.world,))
        present = round(self.sum([1.0])[0])
        if expected is not None and present != expected:
            raise UserError(
                "--expected-world-size",
                expected,
                f"{present} processes are training; fix the launcher",
            )

    def sum(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        return self._reduce(values, dist.ReduceOp.MAX)

    def merge(self, own: dict[int, Value]) -> dict[int, Value]:
        """Merge the dictionaries of all ranks."""
        parts: list[Any] = [own]
        if self.world > 1:
            parts = [None] * self.world
            dist.all_gather_object(parts, own)
        return {key: value for part in parts for key, value in part.items()}

    def barrier(self) -> None:
        if self.world > 1:
            dist.barrier()

    def _reduce(self, values: Sequence[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, how)
        return tensor.tolist()


def _leave_group() -> None:
    """Leave the process group at the end of this process, whether or not the other ranks are still there."""
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
