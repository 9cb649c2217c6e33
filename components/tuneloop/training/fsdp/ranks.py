"""The processes that train together, and their collective operations.

A stage opens it once, by `checkpoint.open_ranks`, before it loads a model; the gateway's worker by
itself (`extensions/gateway/worker.py`). It also makes torch deterministic in this process.
"""

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
    """The processes that train together, and the device of this one.

    Attributes:
        rank: the number of this process, from 0.
        world: the number of processes.
        device: the device that this process computes on.
        mesh: all processes in one dimension; None if there is only one.
    """

    def __init__(self, device: Device = "auto", expected: int | None = None) -> None:
        """Join the processes that torchrun's environment names; ``auto`` is CUDA if available.

        Raises:
            UserError: there is no CUDA, or there are not `expected` processes. These are counted,
                and not read from the environment.
        """
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "--device",
                device,
                "torch sees no CUDA device; give the pod a GPU, or say cpu or auto",
            )
        has_gpu = device != "cpu" and torch.cuda.is_available()
        if not has_gpu:
            check_processor()
        self.rank = int(os.environ.get("RANK", "0"))
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device("cpu")
        if has_gpu:
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        self.mesh: DeviceMesh | None = None
        # cuBLAS is deterministic only with a workspace of a fixed size (torch's documentation of
        # use_deterministic_algorithms).
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        # By default torch then fills every new tensor, which finds reads of memory that was never
        # written, and takes time.
        torch.utils.deterministic.fill_uninitialized_memory = False
        if has_gpu:
            torch.cuda.set_device(self.device)
        if self.world > 1:
            if not dist.is_initialized():
                # Shards that are offloaded to the host are exchanged by gloo.
                dist.init_process_group("cpu:gloo,cuda:nccl" if has_gpu else "gloo")
                atexit.register(_leave_group)
            self.mesh = init_device_mesh(self.device.type, (self.world,))
        processes = round(self.sum([1.0])[0])
        if expected is not None and processes != expected:
            raise UserError(
                "--expected-world-size",
                expected,
                f"{processes} processes are training; fix the launcher",
            )

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each of `values` over all ranks, in float64."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Return the maximum of each of `values` over all ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def merge(self, entries: dict[int, Value]) -> dict[int, Value]:
        """Merge the dictionaries of all ranks; of a key that several have, the highest rank's
        value."""
        if self.world == 1:
            return dict(entries)
        parts: list[Any] = [None] * self.world
        dist.all_gather_object(parts, entries)
        return {key: value for part in parts for key, value in part.items()}

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.world > 1:
            dist.barrier()

    def _reduce(
        self,
        values: Sequence[float],
        operation: dist.ReduceOp.RedOpType,
    ) -> list[float]:
        if self.world == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, operation)
        return tensor.tolist()


def _leave_group() -> None:
    """Leave the process group at the end of this process, whether or not the others still run."""
    with contextlib.suppress(RuntimeError):
        dist.destroy_process_group()
