"""A trainer's state in the host's memory while another run uses the device.

Parameters, gradients, buffers and the optimizer's state move tensor by tensor, each back to where it came from: a
state that comes back to another device than its parameter's fails at the next step, or worse, trains on. On CUDA the
host's copies are pinned, so that the copy goes at the speed of the bus. On a CPU they move from one place of the
host's memory to another: a stand-in, with the real accounting, that gives back nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Moved:
    """What a move took.

    Attributes:
        tensors, bytes: of this rank.
        seconds: copies included, until the device has done them.
        stand_in: nothing was given back, for the state lies in the host's memory anyway.
    """

    tensors: int
    bytes: int
    seconds: float
    stand_in: bool


class Bed:
    """Where a trainer's state lies while it sleeps."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self.model, self.optimizer, self.device = model, optimizer, device
        self._homes: dict[int, torch.device] = {}  # address on the host → device
        self._bytes = 0

    def take(self) -> Moved:
        """Move the state to the host."""
        return self._move(self._out)

    def give(self) -> Moved:
        """Move the state back."""
        return self._move(self._back)

    def _move(self, how: Callable[[Tensor], Tensor]) -> Moved:
        start, self._bytes = time.perf_counter(), 0
        count = len(self._homes)
        self.model._apply(how)  # parameters stay the same objects, for the optimizer knows them by identity
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = how(value)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        moved = abs(len(self._homes) - count)
        return Moved(moved, self._bytes, time.perf_counter() - start, self.device.type == "cpu")

    def _out(self, tensor: Tensor) -> Tensor:
        if _address(tensor) in self._homes:  # tied to one that has moved
            return tensor
        if tensor.device.type != self.device.type:  # offloaded as it is
            return tensor
        host = _on_host(tensor)
        self._homes[_address(host)] = tensor.device
        self._bytes += _local(tensor).nbytes
        return host

    def _back(self, tensor: Tensor) -> Tensor:
        home = self._homes.pop(_address(tensor), None)
        if home is None:
            return tensor
        self._bytes += _local(tensor).nbytes
        return tensor.detach().to(home, copy=True)


def _on_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cuda" and not isinstance(tensor, DTensor):
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor.detach(), non_blocking=True)
    return tensor.detach().to("cpu", copy=True)


def _local(tensor: Tensor) -> Tensor:
    found: Any = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return found


def _address(tensor: Tensor) -> int:
    return _local(tensor).data_ptr()
