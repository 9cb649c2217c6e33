"""A causal language model of transformers, sharded by FSDP2 over the ranks of torchrun, or whole on one."""

import contextlib
import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

from tuneloop.core.errors import UserError
from tuneloop.core.threads import map_ahead
from tuneloop.formats.architectures import choose_dense_attention, find_model_class
from tuneloop.formats.model_files import choose_shard_bytes
from tuneloop.formats.token_files import Document
from tuneloop.training import distributed_checkpoint, lora
from tuneloop.training.batching import (
    FORWARD_COST,
    GPU_FORWARD_COST,
    Batch,
    collate_documents,
    plan_micro_batches,
)
from tuneloop.training.fsdp import attention, export
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.lora import Lora
from tuneloop.training.options import GPU_LOGITS, LOGITS, Dtype, Packing


def compute_logprobs(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute each label's log-probability, with gradient, and the entropy, without: float32 ``[targets]`` each."""
    logits = logits.float() / temperature
    norm = logits.logsumexp(-1)
    with torch.no_grad():
        entropy = norm - ((logits - norm[:, None]).exp() * logits).sum(-1)
    return logits.gather(-1, labels[:, None])[:, 0] - norm, entropy


class Policy:
    """A language model that computes log-probabilities of target tokens; `TrainerOptions` has the options.

    `model` is a Hugging Face directory. `attention.choose_attention` says what ``auto`` chooses.
    Under a dense mask a packed row has `max_length` tokens; a kernel that takes documents' boundaries
    gets them all in one row. With `lora` the model is frozen, and the layers under adapters are stored
    in `dtype`. Raises UserError if the model cannot be loaded, or an option's requirement is missing.

    Attributes:
        layout: the attention and the form of rows that were chosen for ``auto``.
        context: maximum length of a sequence, in tokens.
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
        gradient_checkpointing: bool = False,
        lora: Lora | None = None,
        cpu_offload: bool = False,
        torch_compile: bool = False,
        use_liger_kernel: bool = False,
    ) -> None:
        _check_hardware(ranks, cpu_offload, torch_compile, use_liger_kernel)
        self.ranks, self.dtype, self.lora, self._liger = (
            ranks,
            getattr(torch, dtype),
            lora,
            use_liger_kernel,
        )
        self.layout = attention.choose_attention(
            model, ranks.device, dtype, attn_implementation, packing
        )
        self.max_length = max_length
        self.model = self._open(model)
        text = self.model.config.get_text_config()
        self.context, self.vocab_size = (
            int(getattr(text, "max_position_embeddings", 1 << 30)),
            int(text.vocab_size),
        )
        self._index: Tensor | None = None
        self._predict: tuple[Tensor, float] | None = None
        self._written: Any = None  # the model that `export` fills again: a new one costs more
        head = self.model.get_output_embeddings()
        head.register_forward_pre_hook(self._only_targets)
        self._scaled = any(
            getattr(text, name, None) for name in ("final_logit_softcapping", "logit_scale")
        )
        if not self._scaled:
            head.forward = self._head(head.forward)
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if torch_compile:
            for block in self._blocks():
                block.compile(
                    dynamic=True
                )  # else a second length would compile it again, with other bits
        self.model.train()
        self._place(CPUOffloadPolicy() if cpu_offload else OffloadPolicy())

    def _open(self, directory: Path) -> Any:
        return self._adapt(open_model(directory, torch.float32, self.layout.attention))

    def _adapt(self, model: Any) -> Any:
        """Put kernels and adapters into a model of transformers, and return it."""
        if self._liger:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            # never its loss or output layer, which are tuneloop's own
            _apply_liger_kernel_to_instance(
                model=model, fused_linear_cross_entropy=False, cross_entropy=False
            )
        if self.lora:
            self.lora.inject(model)
            for name, parameter in model.named_parameters():
                if lora.BASE in name:  # autocast would give the same result with twice the memory
                    parameter.data = parameter.data.to(self.dtype)
        return model

    def _blocks(self) -> list[torch.nn.Module]:
        """Return the layers, by transformers' names of the modules that must not be split."""
        names = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if type(module).__name__ in names]

    def _place(self, offload: OffloadPolicy) -> None:
        if self.ranks.mesh is None:
            self.model.to(self.ranks.device)
            return
        low = self.dtype if self.dtype != torch.float32 else None
        policy = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32 if low else None)
        for module in [*self._blocks(), self.model]:
            fully_shard(module, mesh=self.ranks.mesh, mp_policy=policy, offload_policy=offload)
            module.set_gradient_divide_factor(
                1.0
            )  # a sum, not a mean: the loss is divided by the global count
            module.set_force_sum_reduction_for_comms(True)  # gloo supports no other operation

    def _only_targets(
        self, head: torch.nn.Module, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Keep only target positions before the output layer: logits of the others would not be used."""
        return (
            inputs if self._index is None else (inputs[0].flatten(0, -2)[self._index].unsqueeze(0),)
        )

    def chosen(self) -> dict[str, Any]:
        """Return the choices that were made for ``auto``, for people."""
        chosen = {
            "attention": self.layout.attention,
            "packing": "packed" if self.layout.packed else "padded",
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        if self.layout.obstacle:
            chosen["padded_because"] = self.layout.obstacle
        return chosen

    def plan(self, lengths: Sequence[int], limit: int) -> list[list[int]]:
        """Plan this rank's micro-batches, at most `limit` examples in each, as indices; see `plan_micro_batches`."""
        cost = GPU_FORWARD_COST if self.ranks.device.type == "cuda" else FORWARD_COST
        plan = plan_micro_batches(lengths, limit, self.ranks.world, self.layout.packed, cost)
        return plan[self.ranks.rank]

    def logprobs(
        self, documents: Sequence[Document] | Batch, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probability and entropy of targets in one forward pass; `documents` may be collated already.

        Both are float32 ``[targets]``, document by document: each target's log-probability under
        ``softmax(logits / temperature)``, with gradient; that distribution's entropy in nats, without."""
        batch = (documents if isinstance(documents, Batch) else self.collate(documents)).to(
            self.ranks.device
        )
        if self._scaled:  # the model scales or caps its logits
            return compute_logprobs(self._logits(batch), batch.labels, temperature)
        self._predict = batch.labels, temperature
        try:
            found = self._logits(batch)
        finally:
            self._predict = None
        return found[:, 0], found[:, 1].detach()

    def _head(self, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Wrap the output layer to return ``[1, targets, 2]`` inside `logprobs`, never all logits at once. Only here
        are a sharded model's parameters gathered. The backward pass computes each chunk's logits again."""

        def chunk(hidden: Tensor, labels: Tensor, temperature: float) -> Tensor:
            return torch.stack(compute_logprobs(forward(hidden), labels, temperature), -1)

        def chunked(hidden: Tensor) -> Tensor:
            if self._predict is None:
                return forward(hidden)
            labels, temperature = self._predict
            most = GPU_LOGITS if self.ranks.device.type == "cuda" else LOGITS
            size = max(1, most // self.vocab_size)
            if len(labels) <= size:
                return chunk(hidden[0], labels, temperature).unsqueeze(0)
            parts = zip(hidden[0].split(size), labels.split(size))
            again = functools.partial(checkpoint, chunk, use_reentrant=False)
            return torch.cat(
                [again(part, wanted, temperature) for part, wanted in parts]
            ).unsqueeze(0)

        return chunked

    def collate(self, documents: Sequence[Document]) -> Batch:
        capacity = self.max_length if self.layout.packed else None
        if self.layout.takes_boundaries:
            # One row holds all documents, so that no token is padding.
            capacity = max(1, sum(len(document.ids) for document in documents))
        return collate_documents(documents, self.ranks.device, capacity)

    def collate_ahead(
        self, documents: Sequence[Document], plan: Iterable[list[int]]
    ) -> Iterator[Batch]:
        """Yield each micro-batch of a plan; another thread lays it out while the caller uses the previous one."""
        return map_ahead(lambda micro: self.collate([documents[i] for i in micro]), plan)

    def _logits(self, batch: Batch) -> Tensor:
        single = self.ranks.mesh is None
        low = torch.autocast(
            self.ranks.device.type, self.dtype, enabled=single and self.dtype != torch.float32
        )
        boundaries = {}
        if self.layout.takes_boundaries or self.layout.attention == attention.VARLEN:
            boundaries = attention.list_boundary_arguments(batch)
        self._index = batch.index
        try:
            with low:
                output = self.model(
                    input_ids=batch.input_ids,
                    position_ids=batch.position_ids,
                    use_cache=False,
                    **boundaries,
                )
        finally:
            self._index = None
        return output.logits[0]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Turn gradients and dropout off while the block runs."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    def masters(self) -> dict[str, Tensor]:
        """Return the parameters of the model by name, adapters left out; tied ones once."""
        own = (
            (name, value)
            for name, value in self.model.named_parameters()
            if lora.ADAPTER not in name
        )
        return {f"model.{name.replace(lora.BASE, '.')}": value.detach() for name, value in own}

    def load_masters(self, directory: Path) -> None:
        """Load the parameters that `Trainer.save` wrote."""
        distributed_checkpoint.load_tensors(self.masters(), directory)

    def whole_state(self) -> dict[str, Tensor]:
        """Gather the model's own state, adapters merged in, on the first rank; called by all."""
        if self.lora:
            gathered = (
                (name, export.gather_tensor(value))
                for name, value in lora.merge_adapters(self.model)
            )
            return {name: value.cpu() for name, value in gathered if self.ranks.rank == 0}
        whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
        return (
            get_model_state_dict(self.model, options=whole)
            if self.ranks.mesh
            else self.model.state_dict()
        )

    def _reopen(self, directory: Path, dtype: torch.dtype) -> Any:
        # What is written computes the canary, on a CPU, where other kernels than eager cannot run.
        implementation = "eager" if self.layout.attention == "eager" else "auto"
        return open_model(directory, dtype, implementation)

    def export(self, source: Path, target: Path, dtype: str) -> Any:
        """Write the model to `target` in Hugging Face layout, in `dtype`; called by all ranks. Its files are cut as
        those of `source` are. The caller copies other files of `source`, as the tokenizer's. Return the model as
        written, on the CPU, or None on all other ranks."""
        kind = getattr(torch, dtype)
        shard_bytes = choose_shard_bytes(source, dtype)
        if self.ranks.mesh is not None:
            state = (
                lora.merge_adapters(self.model) if self.lora else self.model.state_dict().items()
            )
            if export.write_sharded_model(
                self.model, state, kind, target, self.ranks, shard_bytes=shard_bytes
            ):
                return self._reopen(target, kind) if self.ranks.rank == 0 else None
        weights = self.whole_state()
        if self.ranks.rank != 0:
            return None
        if self._written is None or self._written.dtype != kind:
            self._written = self._reopen(source, kind)
        self._written.load_state_dict(weights)
        self._written.save_pretrained(target, max_shard_size=shard_bytes)
        return self._written


def open_model(
    directory: Path, dtype: torch.dtype, implementation: str, head: str = "CausalLM", **more: Any
) -> Any:
    """Open a causal language model of transformers, or with another `head`. The attention ``auto`` is one that a CPU
    has. Raises UserError: it cannot be loaded."""
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    attention.register_varlen()
    if implementation == "auto":
        implementation = choose_dense_attention(find_model_class(directory))
    about = {
        "dtype": dtype,
        "attn_implementation": implementation,
        "local_files_only": True,
        **more,
    }
    try:
        return getattr(transformers, f"AutoModelFor{head}").from_pretrained(directory, **about)
    except (ImportError, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            "policy", str(directory), f"cannot be loaded with {implementation} attention ({reason})"
        ) from error


def _check_hardware(
    ranks: Ranks, cpu_offload: bool, torch_compile: bool, use_liger_kernel: bool
) -> None:
    """Refuse an option whose device, package or compiler is missing."""
    cuda, compiler = ranks.device.type == "cuda", os.environ.get("CXX", "g++")
    built = cuda or shutil.which(compiler) is not None
    for flag, chosen, fits, remedy in (
        ("cpu-offload", cpu_offload, cuda, "needs a GPU, and this trains on the CPU; leave it out"),
        (
            "cpu-offload",
            cpu_offload,
            ranks.world > 1,
            "needs FSDP, and one process has no shards; start several",
        ),
        (
            "torch-compile",
            torch_compile,
            built,
            f"needs a C++ compiler on a CPU: install {compiler}, or leave it out",
        ),
        (
            "torch-compile",
            torch_compile,
            not cuda or _has("triton"),
            "needs triton: install it, or leave it out",
        ),
        (
            "use-liger-kernel",
            use_liger_kernel,
            cuda,
            "its kernels run on a GPU only, and this is a CPU; leave it out",
        ),
        (
            "use-liger-kernel",
            use_liger_kernel,
            _has("liger_kernel"),
            "needs the package: pip install liger-kernel",
        ),
    ):
        if chosen and not fits:
            raise UserError(f"--{flag}", True, remedy)


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None
