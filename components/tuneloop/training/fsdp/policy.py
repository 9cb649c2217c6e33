"""A causal language model of transformers, sharded by FSDP2 over the ranks of torchrun, or whole on
one.

A forward pass is a collective operation, and so is what "all ranks" call: a rank that leaves one
out, or takes another branch, makes the others wait for ever. Decisions that may differ between
ranks go through `Ranks.max` first. `training/fsdp/trainer.py` adds the optimizer,
`training/scorer.py` another head: it overrides `_open`, `_reopen`, `collate` and `load_masters`.
The gateway (`extensions/gateway/resident.py`) calls `Trainer` directly.

Tests: `tests/unit/training/test_fsdp.py`, `test_architectures.py`; sharded,
`tests/local/test_training.py` and `test_sharded_export.py`.
"""

import contextlib
import functools
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.utils.checkpoint import checkpoint

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.threads import map_ahead
from tuneloop.formats.architectures import get_context
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
from tuneloop.training.fsdp import attention
from tuneloop.training.fsdp.export import (
    gather_tensor,
    get_local,
    get_local_rows,
    list_stored_dtypes,
    make_empty_model,
    write_sharded_model,
)
from tuneloop.training.fsdp.loading import (
    attach_rows,
    detach_rows,
    open_model,
    replace_parameters,
)
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.fsdp.rounding import round_tensor
from tuneloop.training.lora import Lora
from tuneloop.training.options import GPU_LOGITS, LOGITS, Dtype, Packing

LOGIT_SCALES = ("final_logit_softcapping", "logit_scale")
"""Keys of a configuration by which a model changes its logits after the output layer. Such a model
gets all logits at once (`Policy._has_scaled_logits`); a key that is missing here would give wrong
log-probabilities.
"""


def compute_logprobs(logits: Tensor, labels: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Compute each label's log-probability, with gradient, and the entropy, without.

    Args:
        logits: ``[targets, vocabulary]``, of any floating dtype.
        labels: int64 ``[targets]``.
        temperature: divides the logits.

    Returns:
        Two tensors, float32 ``[targets]`` each; the entropy is in nats.
    """
    logits = logits.float() / temperature
    norm = logits.logsumexp(-1)
    with torch.no_grad():
        entropy = norm - ((logits - norm[:, None]).exp() * logits).sum(-1)
    return logits.gather(-1, labels[:, None])[:, 0] - norm, entropy


class Policy:
    """A language model that computes log-probabilities of target tokens.

    Attributes:
        ranks: the processes that hold it.
        dtype: the dtype of the computation; trained parameters are float32.
        layout: the attention and the form of rows that were chosen for ``auto``.
        max_length: tokens in a packed row under a dense mask. A kernel that takes documents'
            boundaries gets all documents in one row.
        model: the model of transformers.
        context: maximum length of a sequence, in tokens.
        vocab_size: the number of logits of a position.
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
        """Open the model of a Hugging Face directory; `TrainerOptions` describes the options, and
        `MODEL_OPTIONS` in `training/options.py` names those that stages pass on.

        With `lora` the model is frozen, and the layers under adapters are stored in `dtype`.

        Raises:
            UserError: the model cannot be loaded, or an option's requirement is missing.
        """
        _check_hardware(
            ranks,
            cpu_offload=cpu_offload,
            torch_compile=torch_compile,
            use_liger_kernel=use_liger_kernel,
        )
        self.ranks = ranks
        self.dtype: torch.dtype = getattr(torch, dtype)
        self.lora = lora
        self.max_length = max_length
        self._use_liger_kernel = use_liger_kernel
        self.layout = attention.choose_attention(
            model, ranks.device, dtype, attn_implementation, packing
        )
        self.model = self._open(model)
        text_config = self.model.config.get_text_config()
        self.context = get_context(self.model.config)
        self.vocab_size = int(text_config.vocab_size)
        # The positions whose logits the current forward pass computes; None: all.
        self._target_index: Tensor | None = None
        # The labels and the temperature of the current forward pass, where the output layer
        # computes log-probabilities in place of logits.
        self._prediction: tuple[Tensor, float] | None = None
        # The model that `export` fills again, as a new one takes time.
        self._exported_model: Any = None
        head = self.model.get_output_embeddings()
        head.register_forward_pre_hook(self._select_targets)
        self._has_scaled_logits = any(getattr(text_config, key, None) for key in LOGIT_SCALES)
        if not self._has_scaled_logits:
            head.forward = self._wrap_head(head.forward)
        if gradient_checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        if torch_compile:
            for layer in self._list_layers():
                # Else a second length would compile it again, with other bits.
                layer.compile(dynamic=True)
        self.model.train()
        self._place(CPUOffloadPolicy() if cpu_offload else OffloadPolicy())

    # The model

    def _open(self, directory: Path) -> Any:
        return self._adapt(
            open_model(directory, torch.float32, self.layout.attention, ranks=self.ranks)
        )

    def _adapt(self, model: Any) -> Any:
        """Put kernels and adapters into a model of transformers, and return it."""
        if self._use_liger_kernel:
            from liger_kernel.transformers import _apply_liger_kernel_to_instance

            # Its loss and output layer stay out: those are tuneloop's own.
            _apply_liger_kernel_to_instance(
                model=model, fused_linear_cross_entropy=False, cross_entropy=False
            )
        if self.lora:
            self.lora.inject(model)
            replace_parameters(model, self._convert_frozen)
        return model

    def _convert_frozen(self, name: str, tensor: Tensor) -> Tensor:
        """Convert a parameter under adapters to the dtype of the computation.

        Autocast would give the same result from float32, with twice the memory.
        """
        # The adapters of one part of fused experts are themselves below those of the other.
        is_frozen = lora.BASE in name and lora.ADAPTER not in name
        return tensor.to(self.dtype) if is_frozen else tensor

    def _list_layers(self) -> list[torch.nn.Module]:
        """List the layers, by transformers' names of the modules that must not be split."""
        names = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if type(module).__name__ in names]

    def _place(self, offload: OffloadPolicy) -> None:
        """Move the model to the device of the only rank, or shard it over all."""
        if self.ranks.mesh is None:
            self.model.to(self.ranks.device)
            return
        precision = MixedPrecisionPolicy()
        if self.dtype != torch.float32:
            # Gradients are summed in float32.
            precision = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32)
        rows = detach_rows(self.model)
        for module in [*self._list_layers(), self.model]:
            fully_shard(module, mesh=self.ranks.mesh, mp_policy=precision, offload_policy=offload)
            # A sum and not a mean: the loss is divided by the global count.
            module.set_gradient_divide_factor(1.0)
            # gloo supports no other operation.
            module.set_force_sum_reduction_for_comms(True)
        is_offloaded = isinstance(offload, CPUOffloadPolicy)
        attach_rows(self.model, rows, torch.device("cpu") if is_offloaded else self.ranks.device)

    def chosen(self) -> JsonObject:
        """Return the choices that were made for ``auto``, for people; they become facts of the
        stage's artifact.
        """
        choices = {
            "attention": self.layout.attention,
            "packing": "packed" if self.layout.packed else "padded",
            "dtype": str(self.dtype).removeprefix("torch."),
        }
        if self.layout.obstacle:
            choices["padded_because"] = self.layout.obstacle
        return choices

    # Forward passes

    def plan(self, lengths: Sequence[int], limit: int) -> list[list[int]]:
        """Plan this rank's micro-batches, at most `limit` examples in each, as indices.

        See `plan_micro_batches`.
        """
        cost = GPU_FORWARD_COST if self.ranks.device.type == "cuda" else FORWARD_COST
        plan = plan_micro_batches(lengths, limit, self.ranks.world, self.layout.packed, cost)
        return plan[self.ranks.rank]

    def collate(self, documents: Sequence[Document]) -> Batch:
        """Lay documents out for one forward pass."""
        capacity = self.max_length if self.layout.packed else None
        if self.layout.takes_boundaries:
            # One row holds all documents, so that no token is padding.
            capacity = max(1, sum(len(document.ids) for document in documents))
        return collate_documents(documents, self.ranks.device, capacity)

    def collate_ahead(
        self, documents: Sequence[Document], plan: Iterable[list[int]]
    ) -> Iterator[Batch]:
        """Yield each micro-batch of a plan; another thread lays it out while the caller uses the
        previous one.
        """
        return map_ahead(lambda indices: self.collate([documents[i] for i in indices]), plan)

    def logprobs(
        self, documents: Sequence[Document] | Batch, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probability and entropy of targets in one forward pass.

        Args:
            documents: may be collated already.
            temperature: divides the logits.

        Returns:
            Each target's log-probability under ``softmax(logits / temperature)``, with gradient,
            and that distribution's entropy in nats, without: float32 ``[targets]`` each, document
            by document.
        """
        batch = documents if isinstance(documents, Batch) else self.collate(documents)
        batch = batch.to(self.ranks.device)
        if self._has_scaled_logits:
            return compute_logprobs(self._logits(batch), batch.labels, temperature)
        self._prediction = (batch.labels, temperature)
        try:
            predictions = self._logits(batch)
        finally:
            self._prediction = None
        return predictions[:, 0], predictions[:, 1].detach()

    def _logits(self, batch: Batch) -> Tensor:
        """Return what the output layer computes for the targets: ``[targets, …]``."""
        autocast = torch.autocast(
            self.ranks.device.type,
            self.dtype,
            # FSDP casts the parameters itself.
            enabled=self.ranks.mesh is None and self.dtype != torch.float32,
        )
        boundaries: JsonObject = {}
        if self.layout.takes_boundaries or self.layout.attention == attention.VARLEN:
            boundaries = attention.list_boundary_arguments(batch)
        self._target_index = batch.index
        try:
            with autocast:
                output = self.model(
                    input_ids=batch.input_ids,
                    position_ids=batch.position_ids,
                    use_cache=False,
                    **boundaries,
                )
        finally:
            self._target_index = None
        return output.logits[0]

    def _select_targets(
        self, head: torch.nn.Module, inputs: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Keep only target positions before the output layer: logits of the others would not be
        used.
        """
        if self._target_index is None:
            return inputs
        return (inputs[0].flatten(0, -2)[self._target_index].unsqueeze(0),)

    def _wrap_head(self, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Wrap the output layer so that inside `logprobs` it returns log-probability and entropy,
        ``[1, targets, 2]``.

        So never are all logits in memory at once. It has to happen here, where the parameters of a
        sharded model are gathered. The backward pass computes each chunk's logits again.
        """

        def predict(hidden: Tensor, labels: Tensor, temperature: float) -> Tensor:
            return torch.stack(compute_logprobs(forward(hidden), labels, temperature), -1)

        def predict_in_chunks(hidden: Tensor) -> Tensor:
            if self._prediction is None:
                return forward(hidden)
            labels, temperature = self._prediction
            limit = GPU_LOGITS if self.ranks.device.type == "cuda" else LOGITS
            size = max(1, limit // self.vocab_size)
            if len(labels) <= size:
                return predict(hidden[0], labels, temperature).unsqueeze(0)
            recompute = functools.partial(checkpoint, predict, use_reentrant=False)
            chunks = [
                recompute(part, part_labels, temperature)
                for part, part_labels in zip(hidden[0].split(size), labels.split(size))
            ]
            return torch.cat(chunks).unsqueeze(0)

        return predict_in_chunks

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Turn gradients and dropout off while the block runs."""
        self.model.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.model.train()

    # Files

    def masters(self) -> dict[str, Tensor]:
        """Return the parameters of the model by name, adapters left out; tied ones once.

        The names are those of `Trainer._state`, as `Trainer.save` writes them.
        """
        return {
            f"model.{lora.get_merged_name(name)}": value.detach()
            for name, value in self.model.named_parameters()
            if lora.ADAPTER not in name
        }

    def load_masters(self, directory: Path) -> None:
        """Load the parameters that `Trainer.save` wrote."""
        distributed_checkpoint.load_tensors(self.masters(), directory)

    def _list_state(self) -> Iterable[tuple[str, Tensor]]:
        """List the model's own state as it lies on this rank, adapters merged in."""
        if self.lora:
            return lora.merge_adapters(self.model)
        return self.model.state_dict().items()

    def whole_state(self) -> dict[str, Tensor]:
        """Gather the model's own state, adapters merged in, on the first rank; called by all."""
        if self.lora:
            merged: dict[str, Tensor] = {}
            for name, value in self._list_state():
                # All ranks take part in the gathering, and the first one alone keeps the tensor.
                gathered = gather_tensor(value)
                if self.ranks.rank == 0:
                    merged[name] = gathered.cpu()
            return merged
        if self.ranks.mesh:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            return get_model_state_dict(self.model, options=options)
        return self.model.state_dict()

    def export(self, source: Path, target: Path, dtype: str) -> Any:
        """Write the model to `target` in Hugging Face layout; called by all ranks.

        Args:
            source: the directory of the policy before. Files are cut as its files are; the caller
                copies others, as the tokenizer's.
            target: the directory to write.
            dtype: torch's name of the dtype of the tensors, to which `rounding.round_tensor`
                rounds them.

        Returns:
            The model as written, on the CPU; None on all ranks but the first.
        """
        torch_dtype: torch.dtype = getattr(torch, dtype)
        shard_bytes = choose_shard_bytes(source, dtype)
        if self.ranks.mesh is not None:
            is_written = write_sharded_model(
                self.model,
                self._list_state(),
                torch_dtype,
                target,
                self.ranks,
                shard_bytes=shard_bytes,
            )
            if is_written:
                return self._reopen(target, torch_dtype) if self.ranks.rank == 0 else None
        weights = self.whole_state()
        if self.ranks.rank != 0:
            return None
        if self._exported_model is None or self._exported_model.dtype != torch_dtype:
            self._exported_model = self._reopen(source, torch_dtype)
        fill_rounded(self._exported_model, weights)
        self._exported_model.save_pretrained(target, max_shard_size=shard_bytes)
        return self._exported_model

    @contextlib.contextmanager
    def rounded(self, dtype: str) -> Iterator[None]:
        """Replace the model's numbers by those that `export` would write in `dtype`, while the block
        runs. Parameters that the model keeps in float32 stay as they are. What `export` changes is
        changed here, too: both round by `round_tensor` under the same names.

        With LoRA, the merged layers take the place of the frozen ones, and the adapters are zero.
        The replaced values are kept in the host's memory meanwhile. Called by all ranks.
        """
        if dtype == "float32":
            yield
            return
        copies: list[tuple[Tensor, Tensor]] = []
        try:
            self._free_gathered()
            self._round_parameters(getattr(torch, dtype), copies)
            yield
        finally:
            # Else the next step would compute with what was gathered of the rounded parameters.
            self._free_gathered()
            for target, value in copies:
                target.copy_(value)

    def _free_gathered(self) -> None:
        """Free the gathered parameters of sharded modules: FSDP2 keeps those of the outermost one
        after a forward pass.
        """
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    @torch.no_grad()
    def _round_parameters(self, dtype: torch.dtype, copies: list[tuple[Tensor, Tensor]]) -> None:
        """Round every parameter and every stored buffer in place, as it is stored.

        Args:
            copies: gets each tensor that changes on this rank, with a copy of what it was.
        """

        def replace(parameter: Tensor, value: Tensor | float) -> None:
            target = get_local(parameter)
            copies.append((target, target.to("cpu", copy=True)))
            target[...] = value

        parameters = {name: value.detach() for name, value in self.model.named_parameters()}
        tensors = parameters | dict(self.model.named_buffers())
        by_merged_name = {lora.get_merged_name(name): value for name, value in tensors.items()}
        stored_dtypes = list_stored_dtypes(make_empty_model(self.model, dtype), dtype)
        for merged_name, value in self._list_state():
            # The second name of tied parameters is not among them.
            if merged_name in by_merged_name:
                rows, first_row = get_local_rows(value.detach(), self.ranks)
                rounded = round_tensor(rows, stored_dtypes[merged_name], merged_name, first_row)
                replace(by_merged_name[merged_name], rounded)
        for name, parameter in parameters.items():
            if lora.ADAPTER in name:
                replace(parameter, 0.0)

    def _reopen(self, directory: Path, dtype: torch.dtype) -> Any:
        # What is written computes the canary, on a CPU, where other kernels than eager cannot run.
        implementation = "eager" if self.layout.attention == "eager" else "auto"
        return open_model(directory, dtype, implementation)


def fill_rounded(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Fill a model with the values of a state, rounded to the dtypes that its parameters have."""
    filled_addresses: set[int] = set()
    with torch.no_grad():
        for name, target in model.state_dict().items():
            # Tied parameters are rounded once, by their first name, which is the one in the file.
            if target.data_ptr() not in filled_addresses:
                filled_addresses.add(target.data_ptr())
                target.copy_(round_tensor(weights[name], target.dtype, name))


def _check_hardware(
    ranks: Ranks,
    *,
    cpu_offload: bool,
    torch_compile: bool,
    use_liger_kernel: bool,
) -> None:
    """Refuse an option whose device, package or compiler is missing. Raises UserError.

    `planning/limits.py: GPU_SETTINGS` refuses those that need a GPU before a run.
    """
    has_gpu = ranks.device.type == "cuda"
    if cpu_offload:
        if not has_gpu:
            remedy = "needs a GPU, and this trains on the CPU; leave it out"
            raise UserError("--cpu-offload", True, remedy)
        if ranks.world == 1:
            remedy = "needs FSDP, and one process has no shards; start several"
            raise UserError("--cpu-offload", True, remedy)
    if torch_compile:
        # torch compiles C++ for a CPU, and Triton's kernels for a GPU.
        compiler = os.environ.get("CXX", "g++")
        if not has_gpu and shutil.which(compiler) is None:
            remedy = f"needs a C++ compiler on a CPU: install {compiler}, or leave it out"
            raise UserError("--torch-compile", True, remedy)
        if has_gpu and not _has_package("triton"):
            remedy = "needs triton: install it, or leave it out"
            raise UserError("--torch-compile", True, remedy)
    if use_liger_kernel:
        if not has_gpu:
            remedy = "its kernels run on a GPU only, and this is a CPU; leave it out"
            raise UserError("--use-liger-kernel", True, remedy)
        if not _has_package("liger_kernel"):
            remedy = "needs the package: pip install liger-kernel"
            raise UserError("--use-liger-kernel", True, remedy)


def _has_package(name: str) -> bool:
    return importlib.util.find_spec(name) is not None
