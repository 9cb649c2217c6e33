"""Write a sharded model as transformers would; each rank writes its own rows, and no tensor is
gathered.

FSDP2 gives each rank a range of rows of every parameter, which is a range of bytes in a safetensors
file. The first rank preallocates the files, with all headers and no data; every rank then writes
its rows, and the bytes equal those of `save_pretrained`. Machines that share no directory send
their rows to the first rank, one tensor at a time.

It does with private functions of transformers what `save_pretrained` does. After an upgrade of
transformers `tests/local/test_sharded_export.py` compares the bytes of both.
"""

import copy
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.training.fsdp.rounding import round_tensor
from tuneloop.weights import layout

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""torch's dtype → its name in a safetensors file. A tensor of another dtype is a KeyError."""


def write_sharded_model(
    model: Any,
    state: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    target: Path,
    ranks: Ranks,
    *,
    shard_bytes: int,
) -> bool:
    """Write a model of transformers that `fully_shard` has sharded on one mesh dimension.

    All ranks call this.

    Args:
        state: the model's names and values, sharded or (buffers) whole; tied ones are left out.
        dtype: of floating parameters in the files, but of those that the model keeps in float32.
        shard_bytes: at most so many in a file.

    Returns:
        False, with nothing written, if `save_pretrained` would change tensors: if it splits experts
        that were fused on loading.
    """
    # A model that is not of transformers' own class, as that of `training/scorer.py`, lacks it.
    if getattr(model, "_weight_conversions", True):
        return False
    directory = _ModelDirectory(model, dtype, target, shard_bytes)
    if ranks.rank == 0:
        directory.lay_out()
    ranks.barrier()
    sees_files = all(path.is_file() for path in directory.path_by_name.values())
    is_shared = ranks.sum([float(sees_files)])[0] == ranks.world
    if is_shared or ranks.rank == 0:
        directory.open()
    for name, value in state:
        if name not in directory.tensors:
            continue
        if is_shared:
            rows, first_row = get_local_rows(value, ranks)
            # A tensor that is not sharded is the same everywhere, so that one rank writes it.
            if ranks.rank == 0 or isinstance(value, DTensor):
                directory.write_rows(name, rows, first_row)
        else:
            rows = gather_tensor(value)
            if ranks.rank == 0:
                directory.write_rows(name, rows, 0)
    ranks.barrier()
    return True


def get_local_rows(value: Tensor, ranks: Ranks) -> tuple[Tensor, int]:
    """Return this rank's rows, and the index of the first one; all rows if the tensor is not
    sharded.
    """
    if not isinstance(value, DTensor):
        return value, 0
    rows = value.redistribute(placements=[Shard(0)]).to_local()
    own_rows = cut_rows(len(value), ranks.rank, ranks.world)
    assert len(rows) == len(own_rows)
    return rows, own_rows.start


def cut_rows(count: int, rank: int, world: int) -> range:
    """Return the rows of a tensor with `count` rows that FSDP2 gives to a rank."""
    # As torch.chunk does: all chunks have the same size, rounded up, but the last ones.
    chunk_size = -(-count // world)
    first_row = min(rank * chunk_size, count)
    return range(first_row, min(first_row + chunk_size, count))


def get_local(value: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor, which shares its memory; any other as it is."""
    return value.to_local() if isinstance(value, DTensor) else value


def gather_tensor(value: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank; return any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def make_empty_model(model: Any, dtype: torch.dtype) -> Any:
    """Make a model of transformers without data, of the class and the configuration of `model`, as
    it is before weights are loaded in `dtype`."""
    # `fully_shard` puts a class of its own before that of transformers.
    model_class: Any = next(
        base for base in type(model).__mro__ if not issubclass(base, FSDPModule)
    )
    with torch.device("meta"):
        return model_class._from_config(copy.deepcopy(model.config), dtype=dtype)


def list_stored_dtypes(empty_model: Any, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """List the dtype that each tensor has in a model that is loaded, and then written, in `dtype`.

    Some architectures keep modules in float32, such as routers and norms: by the list of their
    class, or because they make the parameter so. transformers' loader follows both.

    Args:
        empty_model: of `make_empty_model`, for the same `dtype`.

    Returns:
        Name of a tensor of the model's state → dtype.
    """
    from transformers.core_model_loading import build_glob_alternation

    dtypes = {name: tensor.dtype for name, tensor in empty_model.state_dict().items()}
    plan: dict[str, torch.dtype] = empty_model._get_dtype_plan(dtype)
    if not plan:
        return dtypes
    pattern, glob_by_group, _ = build_glob_alternation(list(plan))
    for name in dtypes:
        match = pattern.search(name)
        if match and match.lastgroup:
            dtypes[name] = plan[glob_by_group[match.lastgroup]]
    return dtypes


class _ModelDirectory:
    """A Hugging Face directory to write, planned from the model's configuration alone.

    Attributes:
        tensors: name → meta tensor of the shape and dtype that is written.
        path_by_name: name of a tensor → its file.
    """

    def __init__(self, model: Any, dtype: torch.dtype, target: Path, shard_bytes: int) -> None:
        from huggingface_hub import split_torch_state_dict_into_shards
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        self._empty_model = make_empty_model(model, dtype)
        self._generation_config = model.generation_config
        self._target = target
        ignored_names = self._empty_model._keys_to_ignore_on_save or ()
        stored_dtypes = list_stored_dtypes(self._empty_model, dtype)
        tensors = {
            name: tensor.to(stored_dtypes[name])
            for name, tensor in self._empty_model.state_dict().items()
            if name not in ignored_names
        }
        # As in `model`. The function below also sorts the names, as `save_pretrained` does.
        self._empty_model._weight_conversions = []
        tensors = remove_tied_weights_from_state_dict(tensors, self._empty_model)
        self.tensors: dict[str, Tensor] = revert_weight_conversion(self._empty_model, tensors)
        self._split = split_torch_state_dict_into_shards(
            self.tensors,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=shard_bytes,
        )
        self.path_by_name = {
            name: target / file for name, file in self._split.tensor_to_filename.items()
        }
        self._entries: dict[str, layout.Tensor] = {}

    def lay_out(self) -> None:
        """Write the directory without the bytes of the tensors."""
        self._target.mkdir(parents=True, exist_ok=True)
        config = self._empty_model.config
        config.dtype = str(self._empty_model.dtype).removeprefix("torch.")
        config.architectures = [type(self._empty_model).__name__]
        config.save_pretrained(self._target)
        self._generation_config.save_pretrained(self._target)
        if self._split.is_sharded:
            metadata = {"total_parameters": self._empty_model.num_parameters()}
            index = {
                "metadata": metadata | self._split.metadata,
                "weight_map": self._split.tensor_to_filename,
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self._target / "model.safetensors.index.json").write_text(text)
        for file, names in self._split.filename_to_tensors.items():
            entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
            for name in names:
                tensor = self.tensors[name]
                size = tensor.numel() * tensor.element_size()
                entries[name] = (DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), size)
            layout.preallocate_safetensors(self._target / file, entries, {"format": "pt"})

    def open(self) -> None:
        """Read the offsets of the tensors in the files."""
        for path in set(self.path_by_name.values()):
            self._entries |= layout.read_header(path).tensors

    def write_rows(self, name: str, rows: Tensor, first_row: int) -> None:
        """Write rows of a tensor, starting at the index `first_row`."""
        tensor = self.tensors[name]
        # A tensor without dimensions counts as one row of one number.
        row_bytes = math.prod(tensor.shape[1:]) * tensor.element_size()
        rounded = round_tensor(rows.detach(), tensor.dtype, name, first_row)
        data = rounded.cpu().contiguous().flatten()
        start = self._entries[name].start + first_row * row_bytes
        layout.write_bytes_at(self.path_by_name[name], start, data.view(torch.uint8).numpy())
