"""Train a causal language model of transformers, sharded by FSDP2 over the ranks of torchrun, or whole on one.

Parameters are float32 masters. With ``dtype="bfloat16"`` the forward and backward pass runs in bfloat16: autocast in
one process, FSDP's `MixedPrecisionPolicy` in several. A single process makes no process group: there is nothing to
shard, and start-up is faster. Gradients are *summed* over micro-batches and ranks, so a loss has to be divided by what
the whole batch counts; then every way of cutting a batch gives the same step.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from tuneloop.errors import UserError
from tuneloop.trainers import _dcp
from tuneloop.trainers._batch import Batch, Document, collate, plan

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
Packing = Literal["auto", "packed", "padded"]
Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True)
class Optimization:
    """AdamW, its schedule and clipping. Names and meanings are those of transformers' TrainingArguments.

    `max_steps` is where ``linear`` and ``cosine`` reach zero. Step 1 of a warm-up already has a rate above zero.
    """

    learning_rate: float
    lr_scheduler_type: Schedule
    warmup_steps: int
    max_steps: int
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    max_grad_norm: float

    def rate(self, step: int) -> float:
        """The learning rate of `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        if self.lr_scheduler_type == "constant":
            return self.learning_rate
        done = min(1.0, (step - 1 - self.warmup_steps) / max(1, self.max_steps - self.warmup_steps))
        return self.learning_rate * (
            1 - done if self.lr_scheduler_type == "linear" else (1 + math.cos(math.pi * done)) / 2
        )


class Ranks:
    """The processes that train together, and the device of this one.

    Args:
        device: ``auto`` takes CUDA where there is some.
        expected: how many processes there must be; asserted by counting them, not by reading the environment.

    Raises:
        UserError: no CUDA, or another number of processes.
    """

    def __init__(self, device: Device = "auto", expected: int | None = None) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise UserError(
                "--device", device, "torch sees no CUDA device here; give the pod a GPU, or say cpu or auto"
            )
        kind = "cuda" if device != "cpu" and torch.cuda.is_available() else "cpu"
        self.rank, self.world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")) if kind == "cuda" else None)
        self.mesh: DeviceMesh | None = None
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False
        if kind == "cuda":
            torch.cuda.set_device(self.device)
        if self.world > 1:
            if not dist.is_initialized():
                dist.init_process_group("nccl" if kind == "cuda" else "gloo")
                atexit.register(dist.destroy_process_group)
            self.mesh = init_device_mesh(kind, (self.world,))
        present = round(self.sum([1.0])[0])
        if expected is not None and present != expected:
            raise UserError("--expected-world-size", expected, f"{present} processes are training; mend the launcher")

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of `values` over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """The maxima of `values` over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def merge(self, own: dict[int, list[float]]) -> dict[int, list[float]]:
        """What all ranks hold, together."""
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


class Policy:
    """A language model that gives the log-probabilities of target tokens.

    Args:
        model: a Hugging Face model directory.
        ranks: who shares the work.
        dtype: of the computation; parameters are float32.
        attn_implementation: transformers' name, or ``auto``: FlashAttention 2 on CUDA if installed, else sdpa.
        packing: how documents are laid out. ``auto``: packed on CUDA; padded on CPU, which has no kernel for
            sequences of varying length, so that a block-diagonal mask costs more than padding cut by length.
        max_length: tokens in a packed row.

    Attributes:
        attention, packed: what was chosen.
        context: the longest sequence its positions reach.
        vocab_size: ids stay below it.

    Raises:
        UserError: the model can not be loaded.
    """

    def __init__(
        self,
        model: Path,
        ranks: Ranks,
        *,
        dtype: Dtype = "float32",
        attn_implementation: str = "auto",
        packing: Packing = "auto",
        max_length: int = 1024,
    ) -> None:
        self.ranks, self.dtype = ranks, getattr(torch, dtype)
        cuda = ranks.device.type == "cuda"
        flash = cuda and importlib.util.find_spec("flash_attn") is not None
        self.attention = (
            ("flash_attention_2" if flash else "sdpa") if attn_implementation == "auto" else attn_implementation
        )
        self.packed = cuda if packing == "auto" else packing == "packed"
        self.max_length = max_length
        self.model = self._open(model)
        text = self.model.config.get_text_config()
        self.context, self.vocab_size = int(getattr(text, "max_position_embeddings", 1 << 30)), int(text.vocab_size)
        self._index: Tensor | None = None
        self._written: Any = None  # by `export`; making one anew costs more than filling it
        self.model.get_output_embeddings().register_forward_pre_hook(self._only_targets)
        self.model.train()
        self._place()

    def _open(self, directory: Path) -> Any:
        return open_model(directory, torch.float32, self.attention)

    def _place(self) -> None:
        if self.ranks.mesh is None:
            self.model.to(self.ranks.device)
            return
        low = self.dtype if self.dtype != torch.float32 else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        names = set(self.model._no_split_modules or ())
        blocks = [module for module in self.model.modules() if type(module).__name__ in names]
        for module in [*blocks, self.model]:
            fully_shard(module, mesh=self.ranks.mesh, mp_policy=policy)
            module.set_gradient_divide_factor(1.0)  # a sum, not a mean: the loss is divided by the global count
            module.set_force_sum_reduction_for_comms(True)  # gloo knows no other

    def _only_targets(self, head: torch.nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Before the output layer: logits of any other position would be thrown away."""
        return inputs if self._index is None else (inputs[0].flatten(0, -2)[self._index].unsqueeze(0),)

    def chosen(self) -> dict[str, str]:
        """What ``auto`` came to, for people."""
        form = "packed" if self.packed else "padded"
        return {"attention": self.attention, "packing": form, "dtype": str(self.dtype).removeprefix("torch.")}

    def plan(self, documents: Sequence[Document], limit: int) -> list[list[int]]:
        """This rank's micro-batches of `documents`, at most `limit` in each, as indices; see `_batch.plan`."""
        return plan([len(d.ids) for d in documents], limit, self.ranks.world, self.packed)[self.ranks.rank]

    def logprobs(self, documents: Sequence[Document], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """One forward pass.

        Returns:
            Float32 ``[targets]`` each, document by document: the log-probability of each target under
            ``softmax(logits / temperature)``, with gradient; and that distribution's entropy in nats, without.
        """
        batch = self.collate(documents)
        logits = self._logits(batch).float() / temperature
        norm = logits.logsumexp(-1)
        with torch.no_grad():
            entropy = norm - ((logits - norm[:, None]).exp() * logits).sum(-1)
        return logits.gather(-1, batch.labels[:, None])[:, 0] - norm, entropy

    def collate(self, documents: Sequence[Document]) -> Batch:
        """The documents in this policy's layout."""
        return collate(documents, self.ranks.device, self.max_length if self.packed else None)

    def _logits(self, batch: Batch) -> Tensor:
        single = self.ranks.mesh is None
        low = torch.autocast(self.ranks.device.type, self.dtype, enabled=single and self.dtype != torch.float32)
        self._index = batch.index
        try:
            with low:
                output = self.model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False)
        finally:
            self._index = None
        return output.logits[0]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """No gradients, no dropout."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    def masters(self) -> dict[str, Tensor]:
        """The parameters by name; tied ones once."""
        return {f"model.{name}": parameter.detach() for name, parameter in self.model.named_parameters()}

    def load_masters(self, directory: Path) -> None:
        """Take the parameters that `Trainer.save` wrote."""
        _dcp.load(self.masters(), directory)

    def whole_state(self) -> dict[str, Tensor]:
        """The model's own state, gathered on the first rank; called by all."""
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return get_model_state_dict(self.model, options=whole) if self.ranks.mesh else self.model.state_dict()

    def export(self, source: Path, target: Path, dtype: str) -> Any:
        """Write ``target`` in Hugging Face layout with parameters in `dtype`; called by all ranks.

        Every other file of the directory `source`, tokenizer first of all, is taken from there by the caller.

        Returns:
            The model as written, on the CPU; None on all ranks but the first.
        """
        weights = self.whole_state()
        if self.ranks.rank != 0:
            return None
        if self._written is None or self._written.dtype != getattr(torch, dtype):
            self._written = open_model(source, getattr(torch, dtype), "sdpa")
        self._written.load_state_dict(weights)
        self._written.save_pretrained(target)
        return self._written


class Trainer(Policy):
    """A policy and its optimizer.

    Attributes:
        step: optimizer steps taken, also by those whose state was loaded.
    """

    def __init__(self, model: Path, ranks: Ranks, optimization: Optimization, **about: Any) -> None:
        super().__init__(model, ranks, **about)
        self.optimization, self.step = optimization, 0
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            lr=optimization.learning_rate,
            betas=(optimization.adam_beta1, optimization.adam_beta2),
            weight_decay=optimization.weight_decay,
            fused=True,
        )

    def update(self) -> tuple[float, float]:
        """Clip the gradients that have been summed up, and take one step.

        Returns:
            The norm of the whole gradient before clipping, and the learning rate.
        """
        self.step += 1
        rate = self.optimization.rate(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        limit = self.optimization.max_grad_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), limit)
        whole = float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
        if not math.isfinite(whole):
            raise ArithmeticError(f"step {self.step}: the gradient's norm is {whole}; lower the learning rate")
        self.optimizer.step()
        self.optimizer.zero_grad()
        return whole, rate

    def save(self, directory: Path) -> None:
        """Write parameters and moments; `step` is the caller's to keep. Called by all ranks."""
        _dcp.save(self._state(), directory)

    def load(self, directory: Path, step: int) -> None:
        """Go on from what `save` wrote after `step`, with any number of ranks."""
        _dcp.load(self._state(), directory)
        self.step = step
        for parameter in self.model.parameters():
            self.optimizer.state[parameter]["step"].fill_(step)

    def _state(self) -> dict[str, Tensor]:
        """Every tensor that training changes. Moments that no step has made yet are zeros."""
        state = self.masters()
        for name, parameter in self.model.named_parameters():
            own = self.optimizer.state[parameter]
            if not own:
                place = self.ranks.device if self.ranks.device.type == "cuda" else None
                own["step"] = torch.tensor(float(self.step), device=place)
                own["exp_avg"], own["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state |= {f"{moment}.{name}": own[moment] for moment in ("exp_avg", "exp_avg_sq")}
        return state


def open_model(directory: Path, dtype: torch.dtype, attention: str) -> Any:
    """A causal language model of transformers.

    Raises:
        UserError: the directory's model, or this way of attention, is none that can be loaded.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        return AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except (ImportError, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError("policy", str(directory), f"can not be loaded with {attention} attention ({reason})") from error
