"""Open a model of transformers: whole, or on each of several ranks the rows that this rank holds.

A rank of several reads its rows from the safetensors files by their ranges of bytes, and converts
one tensor after another. No rank holds the whole model. transformers' own loader does that for
parameters that are DTensors. So names, ties, fused experts, modules that stay in float32, new heads
and buffers are those of a model that it loads whole.

`fully_shard` takes parameters that are whole, or that have no data. So the rows are detached from
the model before it, and attached after it. Adapters come between: they are made whole, from the
same random numbers on every rank, and `fully_shard` cuts them.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn import Parameter

from tuneloop.core.errors import UserError, print_diagnostic
from tuneloop.formats.architectures import choose_dense_attention, find_model_class
from tuneloop.training.fsdp import attention
from tuneloop.training.fsdp.export import cut_rows, get_local
from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.fsdp.stored_tensors import list_stored_tensors, list_weight_files


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
            reason = explain_whole_loading(model, directory, ranks)
            if not reason:
                return _fill_rows(model, directory, dtype, ranks)
            if ranks.rank == 0:
                print_diagnostic(f"load: each rank loads the whole model: {reason}", 0)
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
    if not list_weight_files(directory):
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
        # `from_local` would move them to the mesh's device, where offloaded ones do not belong.
        return DTensor(rows.pop(name).to(device), tensor._spec, requires_grad=False)

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
    tensors = list_stored_tensors(directory)
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
