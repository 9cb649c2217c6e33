"""Open a model of transformers: whole, or on each of several ranks the rows that this rank holds.

A rank of several reads its rows from the safetensors files by their ranges of bytes, and converts
one tensor after another. No rank holds the whole model. transformers' own loader does that for
parameters that are DTensors. So names, ties, fused experts, modules that stay in float32, new heads
and buffers are those of a model that it loads whole.

`fully_shard` takes parameters that are whole, or that have no data. So the rows are detached from
the model before it, and attached after it. Adapters come between: they are made whole, from the
same random numbers on every rank, and `fully_shard` cuts them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from tuneloop.core.errors import UserError
from tuneloop.formats.architectures import choose_dense_attention, find_model_class
from tuneloop.training.fsdp import attention
from tuneloop.training.fsdp.export import DTYPE_NAMES, cut_rows, get_local
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.weights import layout
from tuneloop.weights.versions import INDEX

WEIGHTS = "model.safetensors"
"""The file of a model that has only one."""
DTYPE_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""Name in a safetensors file → torch's dtype."""


def open_model(
    directory: Path,
    dtype: torch.dtype,
    implementation: str,
    head: str = "CausalLM",
    ranks: Ranks | None = None,
    **config: Any,
) -> Any:
    """Open a causal language model of transformers, or one with another `head`.

    Args:
        implementation: transformers' name of the attention; ``auto`` is one that a CPU has.
        ranks: the processes that share the model. With several, its parameters are DTensors that
            hold this rank's rows, except where `explain_whole_loading` has a reason. All ranks call
            this then.
        config: values that replace those of the model's configuration.

    Raises:
        UserError: it cannot be loaded.
    """
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    attention.register_varlen()
    if implementation == "auto":
        implementation = choose_dense_attention(find_model_class(directory))
    opener = getattr(transformers, f"AutoModelFor{head}")
    try:
        if ranks is not None and ranks.world > 1:
            model = _make_empty_model(opener, directory, dtype, implementation, config)
            if not explain_whole_loading(model, directory, ranks):
                return _fill_rows(model, directory, dtype, ranks)
        return opener.from_pretrained(
            directory,
            dtype=dtype,
            attn_implementation=implementation,
            local_files_only=True,
            **config,
        )
    except (ImportError, OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            "policy", str(directory), f"cannot be loaded with {implementation} attention ({reason})"
        ) from error


def explain_whole_loading(empty_model: Any, directory: Path, ranks: Ranks) -> str:
    """Say why every rank has to load the whole of a model; empty if each reads its rows alone."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    if getattr(empty_model.config, "quantization_config", None):
        return "its weights are quantized"
    if not _list_weight_files(directory):
        return "its weights are in no safetensors file"
    # How transformers puts together parameters that the files hold in parts.
    operations: list[Any] = []
    for conversion in get_model_conversion_mapping(empty_model):
        if isinstance(conversion, WeightConverter):
            operations += conversion.operations
    for operation in operations:
        # Experts are stacked in the order of their numbers, so that a row is an expert.
        is_by_row = isinstance(operation, MergeModulelist) and operation.dim == 0
        is_within_row = isinstance(operation, Concatenate) and operation.dim > 0
        if not is_by_row and not is_within_row:
            return f"{type(operation).__name__} puts parts of several rows into one"
    for name, parameter in empty_model.named_parameters():
        # The loader cannot stack the experts of a rank that has none.
        is_fused = bool(operations) and parameter.ndim > 2
        if is_fused and not cut_rows(len(parameter), ranks.world - 1, ranks.world):
            return f"{name} has too few experts for {ranks.world} ranks"
    return ""


def detach_rows(model: Any) -> dict[str, Tensor]:
    """Replace every sharded parameter of a model by a whole one without data.

    Returns:
        The rows of each on this rank, by the parameter's name; nothing of a model that was loaded
        whole. `attach_rows` puts them back.
    """
    rows: dict[str, Tensor] = {}

    def detach(name: str, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        rows[name] = get_local(tensor)
        return _make_empty(tensor)

    replace_parameters(model, detach)
    return rows


@torch.no_grad()
def attach_rows(model: Any, rows: dict[str, Tensor], device: torch.device) -> None:
    """Give the parameters of a model that `fully_shard` has sharded their rows, on `device`.

    Args:
        rows: what `detach_rows` returned; it is empty afterwards.
    """
    name_by_parameter = {parameter: name for name, parameter in model.named_parameters()}

    def fill(tensor: Tensor) -> Tensor:
        name = name_by_parameter.get(tensor)
        # Tied parameters come twice.
        if name not in rows:
            return tensor
        filled = torch.empty_like(tensor, device=device)
        get_local(filled).copy_(rows.pop(name))
        return filled

    model._apply(fill)


@torch.no_grad()
def replace_parameters(model: Any, convert: Callable[[str, Tensor], Tensor]) -> None:
    """Replace the parameters of a model one after another; tied ones stay tied.

    Args:
        convert: gets the first name of a parameter and its data. It returns new data, or the same
            tensor where the parameter is to stay.
    """
    names_by_parameter: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_by_parameter.setdefault(parameter, []).append(name)
    while names_by_parameter:
        # Nothing else refers to its data, which are freed before the next one's are made.
        parameter, names = names_by_parameter.popitem()
        data = parameter.detach()
        converted = convert(names[0], data)
        if converted is data:
            continue
        replacement = Parameter(converted, parameter.requires_grad)
        for name in names:
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, replacement)


def _make_empty(tensor: Tensor) -> Tensor:
    """Make a tensor without data, of the whole shape of another one."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _make_empty_model(
    opener: Any,
    directory: Path,
    dtype: torch.dtype,
    implementation: str,
    changes: dict[str, Any],
) -> Any:
    """Make the model of a directory without data."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(directory, local_files_only=True, **changes)
    with torch.device("meta"):
        return opener.from_config(config, dtype=dtype, attn_implementation=implementation)


def _fill_rows(model: Any, directory: Path, dtype: torch.dtype, ranks: Ranks) -> Any:
    """Load this rank's rows into a model without data, and return it, as `from_pretrained` would."""
    from transformers import GenerationConfig
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import LoadStateDictConfig

    # The rows lie in the host's memory until `attach_rows`.
    mesh = init_device_mesh("cpu", (ranks.world,))

    def shard(name: str, tensor: Tensor) -> Tensor:
        # FSDP refuses such a parameter, and says why.
        if tensor.ndim == 0:
            return tensor
        own_rows = cut_rows(len(tensor), ranks.rank, ranks.world)
        return DTensor.from_local(
            tensor[own_rows.start : own_rows.stop],
            mesh,
            [Shard(0)],
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )

    replace_parameters(model, shard)
    loading = LoadStateDictConfig(
        pretrained_model_name_or_path=str(directory),
        dtype=dtype,
        dtype_plan=model._get_dtype_plan(dtype),
        weight_mapping=get_model_conversion_mapping(model),
    )
    # Headers alone are read here; the loader reads each tensor when its turn has come.
    tensors: dict[str, StoredTensor] = {}
    for path in _list_weight_files(directory):
        for name, entry in layout.read_header(path).tensors.items():
            tensors[name] = StoredTensor(path, entry)
    information, _ = model._load_pretrained_model(model, tensors, None, loading)
    missing_names = information.missing_and_mismatched()

    def unshard_missing(name: str, tensor: Tensor) -> Tensor:
        # A new head is made whole, from the same random numbers on every rank.
        return _make_empty(tensor) if name in missing_names else tensor

    replace_parameters(model, unshard_missing)
    model._finalize_model_loading(model, loading, information)
    model.eval()
    if model.can_generate() and (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def _list_weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a model, as transformers chooses them."""
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    index = directory / INDEX
    if not index.is_file():
        return []
    file_by_tensor: dict[str, str] = json.loads(index.read_text())["weight_map"]
    return [directory / file for file in sorted(set(file_by_tensor.values()))]


class StoredTensor:
    """A tensor in a safetensors file; an index reads the rows that it names, and no other bytes.

    It stands for a slice of the library safetensors, whose two ways to read do not suit: pages of
    mapped files count as memory of the process, and its ``pread`` reads whole tensors.
    """

    def __init__(self, path: Path, entry: layout.Tensor) -> None:
        self._path = path
        self._entry = entry

    def get_shape(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """Return the dtype, by its name in the file."""
        return self._entry.dtype

    def __getitem__(self, index: Any) -> Tensor:
        """Read a part of the tensor: ``...``, or a slice for each of the first dimensions."""
        shape = self._entry.shape
        indices = index if isinstance(index, tuple) else (index,)
        if not shape or indices[0] is Ellipsis:
            # A tensor without dimensions has one number, and no rows.
            return self._read(shape, self._entry.start)
        first, last, _ = indices[0].indices(shape[0])
        row_count = max(0, last - first)
        row_bytes = (self._entry.end - self._entry.start) // max(1, shape[0])
        # A range of rows is a range of bytes.
        rows = self._read((row_count, *shape[1:]), self._entry.start + first * row_bytes)
        return rows[(slice(None), *indices[1:])]

    def _read(self, shape: tuple[int, ...], start: int) -> Tensor:
        """Read a tensor whose bytes begin at `start`."""
        tensor = torch.empty(shape, dtype=DTYPE_BY_NAME[self._entry.dtype])
        data = tensor.flatten().view(torch.uint8).numpy()
        layout.read_bytes_at(self._path, start, data)
        return tensor
