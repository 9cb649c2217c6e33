"""Change the weights of a running vLLM engine, and compare the tensors that it holds with the files.

On a CPU vLLM keeps linear layers packed for its kernels and drops the weights. Multiplying such a layer by a unit
vector gives a column of its weights exactly, except for the sign of a zero. Experts are packed by a function that can
be called again: the files' tensors are packed by it, too, and compared.

Under tensor parallelism each worker compares its own part of every tensor. The sizes of its layers tell that part; they
are checked against the files, so that the parts together are the whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuneloop.core.errors import UserError
from tuneloop.inference.engines._tensors import Readback, is_same, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

EXPERT = re.compile(
    r"^(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<which>gate|up|down)_proj\.weight$"
)
UNKNOWN_LAYOUT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a layer that lacks what is asked of it may raise."""


def reload_weights(engine: Any, model: Path) -> None:
    """Change a running vLLM engine to the weights below `model`, in place, between two of its steps. Also drop the
    prefix cache, as vLLM's reload keeps the old weights' keys and values; running requests compute theirs again."""
    engine.collective_rpc(_reload, args=(str(model),))
    reset_prefix_cache(engine)


def reset_prefix_cache(engine: Any) -> None:
    """Drop all cached keys and values; requests that run compute theirs again."""
    if not engine.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("vLLM did not drop its prefix cache")


def _reload(worker: Any, model: str) -> None:
    """Reload in vLLM's worker, and repack the weights that layers multiply by on a CPU, as the reload does not."""
    for module in worker.get_model().modules():
        # Where a kernel exists already, the reload leaves experts unpacked, but the kernel wants them packed.
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if hasattr(getattr(kernel, "fused_experts", None), "isa"):
            module.quant_method.moe_kernel = None
    try:
        worker.reload_weights(weights_path=model)
    except Exception:
        _abandon_reload(worker)
        raise
    _check_experts(worker)
    _repack_head(worker)


def _abandon_reload(worker: Any) -> None:
    """Drop the tensors that a failed reload had read, so that the next one begins with its own.

    vLLM keeps them beside each unfinished layer, and would load them into it again.
    """
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in worker.get_model().modules():
        unfinished = get_layerwise_info(layer)
        unfinished.load_numel = 0
        unfinished.loaded_weights.clear()
    # A layer of which nothing was read gets back the tensors that it had.
    finalize_layerwise_reload(worker.get_model(), worker.model_config)


def _check_experts(worker: Any) -> None:
    """Refuse a model whose experts vLLM's reload left as they were, as it does where their loader copies into them.
    Raises UserError: it is one, such as gpt-oss."""
    for module in worker.get_model().modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel") and method.moe_kernel is None:
            name = type(worker.get_model()).__name__
            remedy = f"cannot change the experts of {name} in place; take the engine transformers"
            raise UserError("engine", "vllm", remedy)


def _repack_head(worker: Any) -> None:
    """Renew the packed weights of an output head that is tied to the embedding: vLLM's reload skips them."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in worker.get_model().modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def read_back(engine: Any, model: Path, every: int = 1) -> Readback:
    """Compare `engine`'s tensors with those below `model` in its dtype; of packed layers, one column in `every`."""
    ranks = engine.collective_rpc(compare_tensors, args=(str(model), every))
    names = sorted(ranks[0])
    different = [name for name in names if any(rank[name] is False for rank in ranks)]
    unread = [
        name
        for name in names
        if any(rank[name] is None for rank in ranks) and name not in different
    ]
    identical = len(names) - len(different) - len(unread)
    return Readback(len(names), identical, different, unread)


def compare_tensors(worker: Any, model: str, every: int) -> dict[str, bool | None]:
    """Map each tensor to whether this worker holds its part; None where it cannot be read.

    Runs in vLLM's worker.
    """
    module = worker.get_model()
    identical: dict[str, bool | None] = {}
    experts: dict[str, _Experts] = {}
    for name, expected in read_tensors(Path(model)):
        match = EXPERT.match(name)
        layer = _module(module, f"{match['layer']}.routed_experts") if match else None
        if match and layer is not None:
            identical[name] = None
            with suppress(*UNKNOWN_LAYOUT):
                experts.setdefault(match["layer"], _Experts(layer)).add(name, match, expected)
        else:
            identical[name] = _compare(module, name, expected, every)
    for layer_experts in experts.values():
        with suppress(*UNKNOWN_LAYOUT):
            identical |= layer_experts.held()
    return identical


def _compare(model: Any, name: str, expected: Tensor, every: int) -> bool | None:
    """Compare one tensor. A layer of a kind that this module does not know may lack anything that is
    asked of it: its tensors cannot be read."""
    with suppress(*UNKNOWN_LAYOUT):
        identical = _holds(model, name, expected, every)
        if identical is not None:
            return identical
        # The language model of a multimodal class has another prefix in vLLM than in the files.
        renamed = model.hf_to_vllm_mapper._map_name(name)
        return _holds(model, renamed, expected, every)
    return None


def _module(model: Any, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _holds(model: Any, name: str, want: Tensor, every: int) -> bool | None:
    place, leaf = name.rpartition(".")[::2]
    owner, attribute = place.rpartition(".")[::2]
    part = 0
    parts = 1
    for fused, names in getattr(model, "packed_modules_mapping", {}).items():
        if attribute in names and fused != attribute:
            part = names.index(attribute)
            parts = len(names)
            place = f"{owner}.{fused}"
    layer = _module(model, place)
    tensor = getattr(layer, leaf, None)
    sizes = getattr(layer, "output_partition_sizes", [None])
    if tensor is None or len(sizes) != parts:
        return None
    shard = _cut_shard(layer, want, sizes[part])
    if shard is None:
        return None
    # The parts of a fused layer stand one above the other.
    first = sum(sizes[:part]) if part else 0
    rows = slice(first, first + shard.shape[0]) if shard.ndim else ...
    answers = list(_views(layer, leaf, tensor, shard, rows, every))
    return all(answers) if answers else None


def _cut_shard(layer: Any, want: Tensor, rows: int | None) -> Tensor | None:
    """Cut out this worker's part of a tensor; None if the sizes of the layer do not determine it."""
    vocabulary = getattr(layer, "shard_indices", None)
    if vocabulary:
        # The last worker's part of a vocabulary is shorter.
        return want[vocabulary.org_vocab_start_index : vocabulary.org_vocab_end_index]
    width = getattr(layer, "input_size_per_partition", None) if want.ndim == 2 else None
    for dim, size in ((0, rows), (1, width)):
        if size is not None and want.shape[dim] != size:
            blocks, rest = divmod(want.shape[dim], size)
            # The heads of keys and values may be fewer than workers, which then hold copies.
            copies, odd = divmod(layer.tp_size, max(blocks, 1))
            if rest or odd or not blocks:
                return None
            want = want.narrow(dim, layer.tp_rank // copies * size, size)
    return want


def _views(
    layer: Any, leaf: str, tensor: Tensor, want: Tensor, rows: Any, every: int
) -> Iterator[bool]:
    """Yield for each way in which the layer holds the tensor whether it agrees."""
    import torch

    want = want.to(tensor.dtype)
    if tensor.numel():
        yield is_same(tensor[rows].cpu(), want)
    if leaf == "weight" and want.ndim == 2 and hasattr(layer, "cpu_linear"):
        columns = torch.arange(0, want.shape[1], every)
        units = torch.zeros(len(columns), want.shape[1], dtype=want.dtype)
        units[torch.arange(len(columns)), columns] = 1
        answer = layer.cpu_linear(units, layer.weight, None)[:, rows]
        yield torch.equal(answer, want[:, columns].t())


@dataclass
class _Experts:
    """A layer's experts, which vLLM keeps in two tensors: gate and up, one above the other, and down."""

    layer: Any
    parts: dict[str, tuple[int, str, Tensor]] = field(default_factory=dict)

    def add(self, name: str, place: re.Match[str], want: Tensor) -> None:
        """Take this worker's part of one expert's matrix."""
        size = self.layer.intermediate_size_per_partition
        dim = 1 if place["which"] == "down" else 0
        if want.shape[dim] == size * self.layer.moe_config.tp_size:
            own = want.narrow(dim, size * self.layer.moe_config.tp_rank, size).clone()
            self.parts[name] = int(place["expert"]), place["which"], own

    def held(self) -> dict[str, bool | None]:
        """Return name → whether the layer holds it; all None if experts are distributed, or packed with padding."""
        identical: dict[str, bool | None] = {}
        size = self.layer.intermediate_size_per_partition
        whole = self.layer.local_num_experts
        for attribute, rows in (
            ("w13_weight", {"gate": 0, "up": size}),
            ("w2_weight", {"down": 0}),
        ):
            packed = getattr(self.layer, attribute)
            mine = {name: part for name, part in self.parts.items() if part[1] in rows}
            if attribute == "w13_weight":
                shape = (whole, len(rows) * size, self.layer.hidden_size)
            else:
                shape = (whole, self.layer.hidden_size, size)
            if (
                packed.shape != shape
                or len(mine) != whole * len(rows)
                or self.layer.global_num_experts != whole
            ):
                continue
            want = packed.new_empty(shape)
            for expert, which, part in mine.values():
                want[expert, rows[which] : rows[which] + part.shape[0]] = part
            isa = getattr(self.layer.quant_method.moe_kernel.fused_experts, "isa", None)
            if isa is not None:
                # The engine's are packed as the kernel that this layer chose wants them.
                from vllm._custom_ops import cpu_prepack_moe_weight

                want = cpu_prepack_moe_weight(want, isa)
            same = [is_same(a.cpu(), b.cpu()) for a, b in zip(packed, want)]
            identical |= {name: same[expert] for name, (expert, _, _) in mine.items()}
        return identical
