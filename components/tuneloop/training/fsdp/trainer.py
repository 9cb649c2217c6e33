"""A policy with its optimizer: steps, their cost, and the state that is written to a checkpoint."""

import contextlib
import math
import os
import resource
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import xxhash
from torch import Tensor
from torch.autograd import DeviceType
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile

from tuneloop.core.artifacts import Artifact
from tuneloop.training import distributed_checkpoint, lora
from tuneloop.training.batching import Batch
from tuneloop.training.devices import find_device
from tuneloop.training.fsdp import export
from tuneloop.training.fsdp.policy import Policy
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.options import Optimization

Item = TypeVar("Item")


class Trainer(Policy):
    """A policy and its optimizer.

    Attributes:
        step: optimizer steps taken, including those of a state that was loaded.
        trainable: the parameters that it changes, by name: all, or those of adapters.
        base: the checkpoint of the frozen parameters under adapters, set by the caller.
        since: reference of the checkpoint whose files its state was last read from, set by the caller.
    """

    base: Artifact
    since: str

    def __init__(self, model: Path, ranks: Ranks, optimization: Optimization, **about: Any) -> None:
        super().__init__(model, ranks, **about)
        self.optimization, self.step = optimization, 0
        self._traffic: dict[str, float] = {}
        self._homes: dict[int, torch.device] | None = (
            None  # while the trainer sleeps: address on the host → device
        )
        self.trainable = {
            name: value for name, value in self.model.named_parameters() if value.requires_grad
        }
        self.optimizer = torch.optim.AdamW(
            self.trainable.values(),
            lr=optimization.learning_rate,
            betas=(optimization.adam_beta1, optimization.adam_beta2),
            weight_decay=optimization.weight_decay,
            fused=True,
        )

    def count(self) -> int:
        return sum(parameter.numel() for parameter in self.trainable.values())

    def chosen(self) -> dict[str, Any]:
        return super().chosen() | ({"trainable_parameters": self.count()} if self.lora else {})

    def is_unchanged(self) -> bool:
        """Return whether it trains adapters, and no adapter changes its layer: every B is still
        zero. Called by all ranks."""
        if not self.lora:
            return False
        matrices = [value for name, value in self.trainable.items() if lora.SECOND in name]
        changed = any(bool(_local(value.detach()).any()) for value in matrices)
        return self.ranks.max([float(changed)]) == [0.0]

    def accumulate(self, micro_batches: Sequence[Item]) -> Iterator[Item]:
        """Yield `micro_batches` in order; ranks exchange gradients only in the last one's backward pass."""
        for number, micro in enumerate(micro_batches, start=1):
            if self.ranks.mesh is not None:
                self.model.set_requires_gradient_sync(number == len(micro_batches))
            yield micro

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Measure the part of a step that is spent in collectives, for `efficiency`; does nothing in one process."""
        return (
            measure_collectives(self._traffic) if self.ranks.world > 1 else contextlib.nullcontext()
        )

    def efficiency(self, tokens_per_s: float) -> dict[str, float | None]:
        """Compute the efficiency at `tokens_per_s` over all ranks.

        ``flops_per_s``: 4 for each parameter and token, 2 more if it is trained, without attention; ``mfu``, only for
        bfloat16 on a GPU whose peak is known, else None; ``peak_memory_bytes``, the maximum of all ranks; and with
        several ranks, ``communication_s`` and ``step_s`` of the step that was `watched`, the maximum of all ranks."""
        everything = sum(parameter.numel() for parameter in self.model.parameters())
        flops = tokens_per_s * (4.0 * everything + 2.0 * self.count())
        found: dict[str, float | None] = {"flops_per_s": flops, "mfu": None}
        if self.ranks.device.type == "cuda":
            known = (
                find_device(torch.cuda.get_device_name()) if self.dtype == torch.bfloat16 else None
            )
            found |= {"mfu": flops / (known.flops * self.ranks.world)} if known else {}
            memory = float(torch.cuda.max_memory_allocated())
        else:
            memory = (
                resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
            )  # of the process, on Linux
        names, values = zip(("peak_memory_bytes", memory), *self._traffic.items())
        return found | dict(zip(names, self.ranks.max(values)))

    def update(self) -> tuple[float, float]:
        """Clip the summed gradients, take one step; return the whole gradient's norm before, and the learning rate."""
        self._be_awake()
        self.step += 1
        rate = self.optimization.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        limit = self.optimization.max_grad_norm or math.inf
        whole = float(
            export.gather_tensor(torch.nn.utils.clip_grad_norm_(self.trainable.values(), limit))
        )
        if not math.isfinite(whole):
            raise ArithmeticError(
                f"step {self.step}: the gradient's norm is {whole}; lower the learning rate"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return whole, rate

    def sleep(self) -> None:
        """Move parameters, gradients and the optimizer's state to the host's memory, so that others can use the device.

        `wake` returns every tensor, including buffers, to its own device: a state on another device than its parameter
        would fail at the next step, or train on unnoticed. Copies of CUDA tensors are pinned, for the full speed of the
        bus. On a CPU tensors only move within the host's memory, which frees nothing."""
        self._be_awake("the trainer sleeps already")
        homes = self._homes = {}

        def put_out(tensor: Tensor) -> Tensor:
            if (
                _address(tensor) in homes or tensor.device.type != self.ranks.device.type
            ):  # moved already, or offloaded
                return tensor
            if tensor.device.type == "cuda" and not isinstance(tensor, DTensor):
                host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(
                    tensor.detach(), non_blocking=True
                )
            else:
                host = tensor.detach().to("cpu", copy=True)
            homes[_address(host)] = tensor.device
            return host

        self._move(put_out)

    def wake(self) -> None:
        """Undo `sleep`: every tensor is back on its own device, with the same bits."""
        if (homes := self._homes) is None:
            raise RuntimeError("the trainer does not sleep")

        def put_back(tensor: Tensor) -> Tensor:
            home = homes.pop(_address(tensor), None)
            return tensor if home is None else tensor.detach().to(home, copy=True)

        self._move(put_back)
        self._homes = None

    def _move(self, how: Callable[[Tensor], Tensor]) -> None:
        self.model._apply(how)  # parameters stay the same objects, which the optimizer refers to
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = how(value)
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _logits(self, batch: Batch) -> Tensor:
        self._be_awake()
        return super()._logits(batch)

    def _be_awake(self, otherwise: str = "the trainer sleeps: wake it first") -> None:
        if self._homes is not None:
            raise RuntimeError(otherwise)

    def save(self, directory: Path) -> None:
        """Write the trained parameters and their moments, without `step`, which the caller keeps; for all ranks."""
        distributed_checkpoint.save_tensors(self._state(), directory)

    def load(self, directory: Path, step: int) -> None:
        """Continue from the state that `save` wrote after `step`, with any number of ranks."""
        distributed_checkpoint.load_tensors(self._state(), directory)
        self._set_step(step)

    def copy_state(self, other: "Trainer") -> None:
        """Continue from the state of another trainer of the same parameters on the same ranks."""
        theirs = other._state()
        for name, value in self._state().items():
            value.copy_(theirs[name])
        self._set_step(other.step)

    def compute_state_digest(self) -> str:
        """Compute the xxh3-128 of the state that `save` would write, as sharded on these ranks; called by all ranks."""
        own = xxhash.xxh3_128()
        for tensor in self._state().values():
            own.update(_local(tensor).cpu().contiguous().flatten().view(torch.uint8).numpy())
        parts = self.ranks.merge({self.ranks.rank: own.hexdigest()})
        return xxhash.xxh3_128_hexdigest("".join(parts[rank] for rank in sorted(parts)).encode())

    def _set_step(self, step: int) -> None:
        self.step = step
        for parameter in self.trainable.values():
            self.optimizer.state[parameter]["step"].fill_(step)

    def _state(self) -> dict[str, Tensor]:
        """Return every tensor that training changes. Before the first step, moments are zeros."""
        state = {f"model.{name}": parameter.detach() for name, parameter in self.trainable.items()}
        for name, parameter in self.trainable.items():
            own = self.optimizer.state[parameter]
            if not own:
                place = parameter.device if parameter.device.type == "cuda" else None
                own["step"] = torch.tensor(float(self.step), device=place)
                own["exp_avg"], own["exp_avg_sq"] = (
                    torch.zeros_like(parameter),
                    torch.zeros_like(parameter),
                )
            state |= {f"{moment}.{name}": own[moment] for moment in ("exp_avg", "exp_avg_sq")}
        return state


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _address(tensor: Tensor) -> int:
    return _local(tensor).data_ptr()


@contextlib.contextmanager
def measure_collectives(found: dict[str, float]) -> Iterator[None]:
    """Set ``communication_s``, this rank's seconds in collectives with waits, and ``step_s``, the block's seconds."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it logs an error on a machine without a GPU
    activities = [
        ProfilerActivity.CPU,
        *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
    ]
    with profile(activities=activities) as seen:
        start = time.perf_counter()
        yield
        elapsed = time.perf_counter() - start
    spans = [
        (event.time_range.start, event.time_range.end)
        for event in seen.events() or ()
        if event.name.startswith("gloo:")
        or ("nccl" in event.name.lower() and event.device_type == DeviceType.CUDA)
    ]
    found |= {"communication_s": compute_union_length(spans) / 1e6, "step_s": elapsed}


def compute_union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Compute the length of the union of intervals, as collectives overlap."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
