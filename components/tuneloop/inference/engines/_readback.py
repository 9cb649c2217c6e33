"""Change the weights of a running vLLM engine, and compare its tensors with the files.

On a CPU vLLM keeps linear layers packed for its kernels and drops the weights. Multiplying such a
layer by a unit vector gives a column of its weights exactly, except for the sign of a zero. Experts
are packed by a function that can be called again: the files' tensors are packed by it, too, and
compared.

Under tensor parallelism each worker compares its own part of every tensor. The sizes of its layers
tell that part; they are checked against the files, so that the parts together are the whole.

`inference/engines/vllm.py` calls it on the thread that owns the engine. It uses vLLM's private
parts, so a new release of vLLM is tried first against `tests/local/test_vllm.py` and
`tests/local/test_architectures.py`. `tests/unit/inference/test_readback.py` compares a plain module
in vLLM's place, and does not reload.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuneloop.core.errors import UserError
from tuneloop.inference.engines._tensors import Readback, is_same, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

# Experts of models whose files have other names, or one tensor for all, are compared as other
# layers are: where vLLM has no layer of such a name they count as unread.
EXPERT = re.compile(
    r"^(?P<layer>.+\.experts)\.(?P<expert>\d+)\.(?P<projection>gate|up|down)_proj\.weight$"
)
UNKNOWN_LAYOUT = (AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a layer that lacks what is asked of it may raise. Its tensors count as unread then: a fault
of this module shows only as the proof "tensors, in part" (`inference/proof.py`), or as a version
that a server that follows refuses (`inference/follower.py: prove_tensors`).
"""


def reload_weights(engine: Any, model: Path) -> None:
    """Change a running vLLM engine to the weights below `model`, in place, between two of its steps.

    Also drop the prefix cache; running requests compute their keys and values again.
    """
    engine.collective_rpc(_reload, args=(str(model),))
    # vLLM's reload keeps the keys and values of the old weights.
    reset_prefix_cache(engine)


def reset_prefix_cache(engine: Any) -> None:
    """Drop all cached keys and values; requests that run compute theirs again."""
    if not engine.reset_prefix_cache(reset_running_requests=True):
        raise RuntimeError("vLLM did not drop its prefix cache")


def _reload(worker: Any, model: str) -> None:
    """Reload in vLLM's worker, and repack the weights that layers multiply by on a CPU.

    The reload does not repack all of them.
    """
    for module in worker.get_model().modules():
        # Where a kernel exists already, the reload leaves experts unpacked, but the kernel wants
        # them packed.
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
    """Check that vLLM's reload changed the experts of a model.

    Raises:
        UserError: it left them as they were, as it does if their loader copies into them, such as
            that of gpt-oss.
    """
    for module in worker.get_model().modules():
        method: Any = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel") and method.moe_kernel is None:
            name = type(worker.get_model()).__name__
            remedy = f"cannot change the experts of {name} in place; take the engine transformers"
            raise UserError("engine", "vllm", remedy)


def _repack_head(worker: Any) -> None:
    """Renew the packed weights of an output head that is tied to the embedding.

    vLLM's reload skips them.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in worker.get_model().modules():
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def read_back(engine: Any, model: Path, every: int = 1) -> Readback:
    """Compare the tensors of an engine with the files below `model`, in the engine's dtype.

    Args:
        engine: vLLM's.
        model: a model directory.
        every: of layers that are packed for a CPU, one column in so many is read.
    """
    answers = engine.collective_rpc(compare_tensors, args=(str(model), every))
    names = sorted(answers[0])
    different: list[str] = []
    unread: list[str] = []
    for name in names:
        verdicts = [answer[name] for answer in answers]
        # A worker whose part differs decides, even if another worker cannot read its part.
        if False in verdicts:
            different.append(name)
        elif None in verdicts:
            unread.append(name)
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
        layer = _find_module(module, f"{match['layer']}.routed_experts") if match else None
        if not match or layer is None:
            identical[name] = _compare(module, name, expected, every)
            continue
        identical[name] = None
        with suppress(*UNKNOWN_LAYOUT):
            layer_experts = experts.setdefault(match["layer"], _Experts(layer))
            layer_experts.add(name, int(match["expert"]), match["projection"], expected)
    for layer_experts in experts.values():
        with suppress(*UNKNOWN_LAYOUT):
            identical |= layer_experts.compare()
    return identical


def _compare(model: Any, name: str, expected: Tensor, every: int) -> bool | None:
    """Compare one tensor of the files with the layer that it belongs to.

    Returns None if the layer is of a kind that this module does not know.
    """
    # Such a layer may lack anything that is asked of it.
    with suppress(*UNKNOWN_LAYOUT):
        identical = _holds(model, name, expected, every)
        if identical is not None:
            return identical
        # The language model of a multimodal class has another prefix in vLLM than in the files.
        renamed = model.hf_to_vllm_mapper._map_name(name)
        return _holds(model, renamed, expected, every)
    return None


def _find_module(model: Any, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _holds(model: Any, name: str, expected: Tensor, every: int) -> bool | None:
    """Return whether the layer with this name holds this worker's part of a tensor.

    Returns None if there is no such layer, or its sizes do not determine the part.
    """
    path, _, leaf = name.rpartition(".")
    parent, _, attribute = path.rpartition(".")
    part = 0
    parts = 1
    # vLLM fuses some layers, such as the projections of queries, keys and values.
    for fused, names in getattr(model, "packed_modules_mapping", {}).items():
        if attribute in names and fused != attribute:
            part = names.index(attribute)
            parts = len(names)
            path = f"{parent}.{fused}"
    layer = _find_module(model, path)
    tensor = getattr(layer, leaf, None)
    sizes = getattr(layer, "output_partition_sizes", [None])
    if tensor is None or len(sizes) != parts:
        return None
    shard = _cut_shard(layer, expected, sizes[part])
    if shard is None:
        return None
    rows: Any = ...
    if shard.ndim:
        # The parts of a fused layer stand one above the other.
        first = sum(sizes[:part])
        rows = slice(first, first + shard.shape[0])
    verdicts = list(_compare_forms(layer, leaf, tensor, shard, rows, every))
    return all(verdicts) if verdicts else None


def _cut_shard(layer: Any, tensor: Tensor, rows: int | None) -> Tensor | None:
    """Cut this worker's part out of a tensor of the files.

    Args:
        layer: of vLLM.
        tensor: the whole one.
        rows: of the part; None if the layer does not say.

    Returns:
        A view of the part, or None if the sizes of the layer do not determine it.
    """
    vocabulary = getattr(layer, "shard_indices", None)
    if vocabulary:
        # The last worker's part of a vocabulary is shorter.
        return tensor[vocabulary.org_vocab_start_index : vocabulary.org_vocab_end_index]
    sizes = [rows]
    if tensor.ndim == 2:
        sizes.append(getattr(layer, "input_size_per_partition", None))
    for dim, size in enumerate(sizes):
        if size is None or tensor.shape[dim] == size:
            continue
        blocks, remainder = divmod(tensor.shape[dim], size)
        if remainder or not blocks:
            return None
        # The heads of keys and values may be fewer than workers, which then hold copies.
        copies, odd = divmod(layer.tp_size, blocks)
        if odd:
            return None
        tensor = tensor.narrow(dim, layer.tp_rank // copies * size, size)
    return tensor


def _compare_forms(
    layer: Any,
    leaf: str,
    tensor: Tensor,
    expected: Tensor,
    rows: Any,
    every: int,
) -> Iterator[bool]:
    """Yield for each form in which the layer holds a tensor whether it agrees.

    Args:
        layer: of vLLM.
        leaf: ``weight`` or another name of the layer's tensor.
        tensor: that the layer holds, empty if it was dropped for a packed form.
        expected: this worker's part of the files' tensor.
        rows: where the part stands in the layer.
        every: one column in so many is read from a packed form.
    """
    import torch

    expected = expected.to(tensor.dtype)
    if tensor.numel():
        yield is_same(tensor[rows].cpu(), expected)
    if leaf == "weight" and expected.ndim == 2 and hasattr(layer, "cpu_linear"):
        width = expected.shape[1]
        columns = torch.arange(0, width, every)
        units = torch.zeros(len(columns), width, dtype=expected.dtype)
        units[torch.arange(len(columns)), columns] = 1
        products = layer.cpu_linear(units, layer.weight, None)[:, rows]
        yield torch.equal(products, expected[:, columns].t())


@dataclass(frozen=True)
class _Matrix:
    """This worker's part of one matrix of an expert.

    Attributes:
        expert: its number in the layer.
        projection: ``gate``, ``up`` or ``down``.
        tensor: output × input.
    """

    expert: int
    projection: str
    tensor: Tensor


@dataclass
class _Experts:
    """A layer's experts, which vLLM keeps in two tensors.

    One has gate and up, one above the other, the other has down.

    Attributes:
        layer: of vLLM.
        matrices: name in the files → the matrix.
    """

    layer: Any
    matrices: dict[str, _Matrix] = field(default_factory=dict)

    def add(self, name: str, expert: int, projection: str, tensor: Tensor) -> None:
        """Take this worker's part of one expert's matrix."""
        size = self.layer.intermediate_size_per_partition
        # The inner size is the input of down, and the output of gate and up.
        dim = 1 if projection == "down" else 0
        config = self.layer.moe_config
        if tensor.shape[dim] == size * config.tp_size:
            shard = tensor.narrow(dim, size * config.tp_rank, size)
            # A copy, as the view would keep the whole tensor in memory until the layer is complete.
            self.matrices[name] = _Matrix(expert, projection, shard.clone())

    def compare(self) -> dict[str, bool | None]:
        """Return name → whether the layer holds it.

        Names are absent if experts are distributed among the workers, or packed with padding.
        """
        layer = self.layer
        size = layer.intermediate_size_per_partition
        experts = layer.local_num_experts
        identical: dict[str, bool | None] = {}
        identical |= self._compare_stack(
            layer.w13_weight,
            (experts, 2 * size, layer.hidden_size),
            {"gate": 0, "up": size},
        )
        identical |= self._compare_stack(
            layer.w2_weight,
            (experts, layer.hidden_size, size),
            {"down": 0},
        )
        return identical

    def _compare_stack(
        self,
        stack: Tensor,
        shape: tuple[int, int, int],
        first_rows: Mapping[str, int],
    ) -> dict[str, bool]:
        """Compare one of the two tensors.

        Args:
            stack: that the layer holds.
            shape: experts × rows × columns, as it is without padding.
            first_rows: projection → its first row.
        """
        experts = shape[0]
        matrices: dict[str, _Matrix] = {}
        for name, matrix in self.matrices.items():
            if matrix.projection in first_rows:
                matrices[name] = matrix
        is_complete = len(matrices) == experts * len(first_rows)
        is_distributed = self.layer.global_num_experts != experts
        if stack.shape != shape or not is_complete or is_distributed:
            return {}
        expected = stack.new_empty(shape)
        for matrix in matrices.values():
            first = first_rows[matrix.projection]
            last = first + matrix.tensor.shape[0]
            expected[matrix.expert, first:last] = matrix.tensor
        isa = getattr(self.layer.quant_method.moe_kernel.fused_experts, "isa", None)
        if isa is not None:
            # The engine's are packed as the kernel that this layer chose wants them.
            from vllm._custom_ops import cpu_prepack_moe_weight

            expected = cpu_prepack_moe_weight(expected, isa)
        verdicts: list[bool] = []
        for held_by_layer, from_files in zip(stack, expected):
            verdicts.append(is_same(held_by_layer.cpu(), from_files.cpu()))
        return {name: verdicts[matrix.expert] for name, matrix in matrices.items()}
