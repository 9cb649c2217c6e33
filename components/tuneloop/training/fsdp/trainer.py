"""A policy with its optimizer: steps, their cost, and the state that is written to a checkpoint.

`training/epochs.py` drives it for stages over examples, `training/policy_gradient.py` for rollouts,
and the gateway's sessions by themselves (`extensions/gateway/resident.py`). The order of a step is:
`accumulate`, a backward pass for each micro-batch, `update`.

Tests: `tests/unit/training/test_fsdp.py`, `test_sleep.py`, `test_traffic.py`, `test_lora.py`, and
`tests/local/test_training.py` on two ranks.
"""

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
from tuneloop.core.json_types import JsonObject
from tuneloop.training import distributed_checkpoint, lora
from tuneloop.training.batching import Batch
from tuneloop.training.devices import find_device
from tuneloop.training.fsdp.export import gather_tensor, get_local
from tuneloop.training.fsdp.policy import Policy
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.options import Optimization

Item = TypeVar("Item")
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments of a parameter, by torch's names. `argo/training_memory.py` and
`config/choices.py: find_activation_budget` count their bytes, and
`training/state_sources.py: explain_fresh_state` decides whether a committed state fits."""


class Trainer(Policy):
    """A policy and its optimizer.

    Attributes:
        step: optimizer steps taken, including those of a state that was loaded.
        trainable: the parameters that it changes, by name: all, or those of adapters.
        base: the checkpoint of the frozen parameters under adapters; `epochs.new_trainer` and
            the gateway set it.
        since: reference of the checkpoint whose files its state was last read from; only
            `policy_update` and `training/state_sources.py` set it, and only ``state_as="facts"`` of
            `checkpoint.write_checkpoint` reads it.
    """

    base: Artifact
    since: str

    def __init__(
        self,
        model: Path,
        ranks: Ranks,
        optimization: Optimization,
        **model_options: Any,
    ) -> None:
        """Open the model of a Hugging Face directory, with the keyword arguments of `Policy`."""
        super().__init__(model, ranks, **model_options)
        self.optimization = optimization
        self.step = 0
        # Figures of the step that was `watched`.
        self._traffic: dict[str, float] = {}
        # While the trainer sleeps: the address of each tensor on the host → its own device.
        self._devices_by_address: dict[int, torch.device] | None = None
        self.trainable = {
            name: value for name, value in self.model.named_parameters() if value.requires_grad
        }
        # The gateway sets betas, eps and weight decay anew before each step.
        self.optimizer = torch.optim.AdamW(
            self.trainable.values(),
            lr=optimization.learning_rate,
            betas=(optimization.adam_beta1, optimization.adam_beta2),
            weight_decay=optimization.weight_decay,
            fused=True,
        )

    def count(self) -> int:
        """Count the numbers that training changes."""
        return sum(parameter.numel() for parameter in self.trainable.values())

    def chosen(self) -> JsonObject:
        """Return the choices that were made for ``auto``, and how much adapters train."""
        choices = super().chosen()
        if self.lora:
            choices["trainable_parameters"] = self.count()
        return choices

    def is_unchanged(self) -> bool:
        """Tell whether it trains adapters, and no adapter changes its layer: every B is still zero.

        Called by all ranks.
        """
        if not self.lora:
            return False
        matrices = [value for name, value in self.trainable.items() if lora.SECOND in name]
        is_changed = any(bool(get_local(value.detach()).any()) for value in matrices)
        return self.ranks.max([float(is_changed)]) == [0.0]

    # Steps

    def accumulate(self, micro_batches: Sequence[Item]) -> Iterator[Item]:
        """Yield `micro_batches` in order; ranks exchange gradients in the last one's backward pass
        alone.
        """
        for number, micro_batch in enumerate(micro_batches, start=1):
            if self.ranks.mesh is not None:
                self.model.set_requires_gradient_sync(number == len(micro_batches))
            yield micro_batch

    def watched(self) -> contextlib.AbstractContextManager[None]:
        """Measure the part of a step that is spent in collectives, for `efficiency`; does nothing
        in one process.
        """
        if self.ranks.world == 1:
            return contextlib.nullcontext()
        return measure_collectives(self._traffic)

    def efficiency(self, tokens_per_s: float) -> dict[str, float | None]:
        """Compute the efficiency at `tokens_per_s` over all ranks, for ``notes.efficiency``, which
        `ui/static/run.js` shows by these names.

        Returns:
            ``flops_per_s``: 4 for each parameter and token, 2 more if it is trained, without
            attention. ``mfu``: only for bfloat16 on a GPU whose peak is known, else None.
            ``peak_memory_bytes``: the maximum of all ranks. With several ranks ``communication_s``
            and ``step_s`` of the step that was `watched`, the maximum of all ranks.
        """
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        flops = tokens_per_s * (4.0 * parameters + 2.0 * self.count())
        figures: dict[str, float | None] = {"flops_per_s": flops, "mfu": None}
        if self.ranks.device.type == "cuda":
            device = None
            if self.dtype == torch.bfloat16:
                device = find_device(torch.cuda.get_device_name())
            if device:
                figures["mfu"] = flops / (device.flops * self.ranks.world)
            memory = float(torch.cuda.max_memory_allocated())
        else:
            # Of the whole process; Linux counts in KiB.
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        rank_figures = {"peak_memory_bytes": memory} | self._traffic
        maxima = self.ranks.max(list(rank_figures.values()))
        return figures | dict(zip(rank_figures, maxima))

    def update(self) -> tuple[float, float]:
        """Clip the gradients, which are sums over the ranks (`Policy._place`), and take one step.

        Returns:
            The norm of the whole gradient before it was clipped, and the learning rate.

        Raises:
            ArithmeticError: the norm is not finite.
        """
        self._check_awake()
        self.step += 1
        rate = self.optimization.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        limit = self.optimization.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.trainable.values(), limit)
        whole_norm = float(gather_tensor(norm))
        if not math.isfinite(whole_norm):
            raise ArithmeticError(
                f"step {self.step}: the gradient's norm is {whole_norm}; lower the learning rate"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        return whole_norm, rate

    # Sleep

    def sleep(self) -> None:
        """Move parameters, gradients and the optimizer's state to the host's memory, so that others
        can use the device.

        `wake` returns every tensor, including buffers, to its own device: a state on another device
        than its parameter would fail at the next step, or train on unnoticed. Copies of CUDA
        tensors are pinned, for the full speed of the bus. On a CPU tensors only move within the
        host's memory, which frees nothing.
        """
        self._check_awake("the trainer sleeps already")
        devices: dict[int, torch.device] = {}
        self._devices_by_address = devices

        def move_to_host(tensor: Tensor) -> Tensor:
            is_moved = _get_address(tensor) in devices
            is_offloaded = tensor.device.type != self.ranks.device.type
            if is_moved or is_offloaded:
                return tensor
            if tensor.device.type == "cuda" and not isinstance(tensor, DTensor):
                host = torch.empty_like(tensor, device="cpu", pin_memory=True)
                host.copy_(tensor.detach(), non_blocking=True)
            else:
                host = tensor.detach().to("cpu", copy=True)
            devices[_get_address(host)] = tensor.device
            return host

        self._replace_tensors(move_to_host)

    def wake(self) -> None:
        """Undo `sleep`: every tensor is back on its own device, with the same bits."""
        devices = self._devices_by_address
        if devices is None:
            raise RuntimeError("the trainer does not sleep")

        def move_back(tensor: Tensor) -> Tensor:
            device = devices.pop(_get_address(tensor), None)
            return tensor if device is None else tensor.detach().to(device, copy=True)

        self._replace_tensors(move_back)
        self._devices_by_address = None

    def _replace_tensors(self, move: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor of the model and the optimizer by what `move` returns for it."""
        # Parameters stay the same objects, which the optimizer refers to.
        self.model._apply(move)
        for state in self.optimizer.state.values():
            for name, value in state.items():
                if isinstance(value, Tensor):
                    state[name] = move(value)
        if self.ranks.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def _logits(self, batch: Batch) -> Tensor:
        self._check_awake()
        return super()._logits(batch)

    def _check_awake(self, problem: str = "the trainer sleeps: wake it first") -> None:
        if self._devices_by_address is not None:
            raise RuntimeError(problem)

    # State

    def save(self, directory: Path) -> None:
        """Write the trained parameters and their moments, without `step`, which the caller keeps.

        Called by all ranks.
        """
        distributed_checkpoint.save_tensors(self._state(), directory)

    def load(self, directory: Path, step: int) -> None:
        """Continue from the state that `save` wrote after `step`, with any number of ranks."""
        distributed_checkpoint.load_tensors(self._state(), directory)
        self._set_step(step)

    def copy_state(self, other: "Trainer") -> None:
        """Continue from the state of another trainer of the same parameters on the same ranks."""
        source = other._state()
        for name, value in self._state().items():
            value.copy_(source[name])
        self._set_step(other.step)

    def compute_state_digest(self) -> str:
        """Compute the xxh3-128 of the state that `save` would write, as sharded on these ranks.

        Called by all ranks.
        """
        digest = xxhash.xxh3_128()
        for tensor in self._state().values():
            data = get_local(tensor).cpu().contiguous().flatten()
            digest.update(data.view(torch.uint8).numpy())
        digest_by_rank = self.ranks.merge({self.ranks.rank: digest.hexdigest()})
        joined = "".join(digest_by_rank[rank] for rank in sorted(digest_by_rank))
        return xxhash.xxh3_128_hexdigest(joined.encode())

    def _set_step(self, step: int) -> None:
        self.step = step
        for parameter in self.trainable.values():
            self.optimizer.state[parameter]["step"].fill_(step)

    def _state(self) -> dict[str, Tensor]:
        """Return every tensor that training changes. Before the first step, moments are zeros.

        Names and order are stored: `load` of an older checkpoint needs every name, and the order is
        part of `compute_state_digest`, by which replayed updates are verified.
        """
        state = {f"model.{name}": parameter.detach() for name, parameter in self.trainable.items()}
        for name, parameter in self.trainable.items():
            moments = self.optimizer.state[parameter]
            if not moments:
                # As torch's fused AdamW makes them: on a GPU the step lies on the device, too.
                device = parameter.device if parameter.device.type == "cuda" else None
                moments["step"] = torch.tensor(float(self.step), device=device)
                for moment in MOMENTS:
                    moments[moment] = torch.zeros_like(parameter)
            for moment in MOMENTS:
                state[f"{moment}.{name}"] = moments[moment]
        return state


def _get_address(tensor: Tensor) -> int:
    return get_local(tensor).data_ptr()


@contextlib.contextmanager
def measure_collectives(figures: dict[str, float]) -> Iterator[None]:
    """Set ``communication_s``, this rank's seconds in collectives with waits, and ``step_s``, the
    block's seconds.
    """
    # Without this the profiler logs an error on a machine without a GPU.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as recording:
        start = time.perf_counter()
        yield
        elapsed = time.perf_counter() - start
    spans: list[tuple[float, float]] = []
    for event in recording.events() or ():
        # A call of NCCL returns before its kernel has run, so the kernels are counted.
        is_kernel = "nccl" in event.name.lower() and event.device_type == DeviceType.CUDA
        if is_kernel or event.name.startswith("gloo:"):
            spans.append((event.time_range.start, event.time_range.end))
    figures["communication_s"] = compute_union_length(spans) / 1e6
    figures["step_s"] = elapsed


def compute_union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Compute the length of the union of intervals, as collectives overlap."""
    total = 0.0
    covered_until = float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered_until))
        covered_until = max(covered_until, end)
    return total
