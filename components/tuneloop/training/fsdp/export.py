"""Write a sharded model as transformers would; each rank writes its own rows, and no tensor is gathered.

FSDP2 gives each rank a range of rows of every parameter, which is a range of bytes in a safetensors file. The first
rank preallocates the files, with all headers and no data; every rank then writes its rows, and the bytes equal those of
`save_pretrained`. Machines that share no directory send their rows to the first rank, one tensor at a time."""

import copy
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from tuneloop.training.fsdp.ranks import Ranks
from tuneloop.weights import layout


def write_sharded_model(
    model: Any,
    state: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    target: Path,
    ranks: Ranks,
    *,
    shard_bytes: int,
) -> bool:
    """Write a model of transformers, under `fully_shard` on one mesh dimension, with floating parameters in `dtype`,
    and at most `shard_bytes` in a file.

    All ranks call this. `state` has the model's names and values, sharded or (buffers) whole; tied ones are left out.
    Return False, with nothing written, if `save_pretrained` would change tensors: if it splits experts that were fused
    on loading, or keeps modules in float32."""
    if getattr(model, "_weight_conversions", True) or getattr(model, "_keep_in_fp32_modules", None):
        return False
    plan = _Plan(model, dtype, target, shard_bytes)
    if ranks.rank == 0:
        plan.lay_out()
    ranks.barrier()
    seen = all(
        path.is_file() for path in plan.files.values()
    )  # whether this rank sees the first rank's files
    shared = ranks.sum([float(seen)])[0] == ranks.world
    if shared or ranks.rank == 0:
        plan.open()
    for name, value in state:
        if name in plan.wanted:
            part, row = _own_rows(value, ranks) if shared else (gather_tensor(value), 0)
            if ranks.rank == 0 or (shared and isinstance(value, DTensor)):
                plan.fill(name, part, row)
    ranks.barrier()
    return True


def _own_rows(value: Tensor, ranks: Ranks) -> tuple[Tensor, int]:
    """Return this rank's rows, and the index of the first one; all rows if the tensor is not sharded."""
    if not isinstance(value, DTensor):
        return value, 0
    local = value.redistribute(placements=[Shard(0)]).to_local()
    first = min(ranks.rank * -(-len(value) // ranks.world), len(value))  # as torch.chunk cuts
    assert len(local) == min(-(-len(value) // ranks.world), len(value) - first)
    return local, first


def gather_tensor(value: Tensor) -> Tensor:
    """Gather a sharded tensor on every rank; return any other as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


class _Plan:
    """The place of each tensor, from the model's configuration alone; `wanted`: name → meta tensor as written."""

    def __init__(self, model: Any, dtype: torch.dtype, target: Path, shard_bytes: int) -> None:
        from huggingface_hub import split_torch_state_dict_into_shards
        from transformers.core_model_loading import revert_weight_conversion
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        kind: Any = next(k for k in type(model).__mro__ if not issubclass(k, FSDPModule))
        with torch.device("meta"):
            self.empty = kind._from_config(copy.deepcopy(model.config), dtype=dtype)
        self.generation_config, self.target = model.generation_config, target
        wanted = {
            n: v
            for n, v in self.empty.state_dict().items()
            if n not in (kind._keys_to_ignore_on_save or ())
        }
        self.empty._weight_conversions = []  # as in `model`; it still sorts the names
        wanted = remove_tied_weights_from_state_dict(wanted, self.empty)
        self.wanted: dict[str, Tensor] = revert_weight_conversion(self.empty, wanted)
        self.split = split_torch_state_dict_into_shards(
            self.wanted, filename_pattern="model{suffix}.safetensors", max_shard_size=shard_bytes
        )
        self.files = {name: target / file for name, file in self.split.tensor_to_filename.items()}
        self.places: dict[str, layout.Tensor] = {}

    def lay_out(self) -> None:
        """Write the directory without the bytes of the tensors."""
        self.target.mkdir(parents=True, exist_ok=True)
        config = self.empty.config
        config.dtype, config.architectures = (
            str(self.empty.dtype).removeprefix("torch."),
            [type(self.empty).__name__],
        )
        config.save_pretrained(self.target)
        self.generation_config.save_pretrained(self.target)
        if self.split.is_sharded:
            about = {"total_parameters": self.empty.num_parameters(), **self.split.metadata}
            index = {"metadata": about, "weight_map": self.split.tensor_to_filename}
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (self.target / "model.safetensors.index.json").write_text(text)
        for file, names in self.split.filename_to_tensors.items():
            tensors = {name: self.wanted[name] for name in names}
            entries = {
                n: (_DTYPES[v.dtype], tuple(v.shape), v.numel() * v.element_size())
                for n, v in tensors.items()
            }
            layout.preallocate_safetensors(self.target / file, entries, {"format": "pt"})

    def open(self) -> None:
        """Read the offsets of the tensors in the files."""
        for path in set(self.files.values()):
            self.places |= layout.read_header(path).tensors

    def fill(self, name: str, part: Tensor, row: int) -> None:
        """Write rows of a tensor, starting at the index `row`."""
        want = self.wanted[name]
        width = want[:1].numel() * want.element_size() if want.ndim else want.element_size()
        data = part.detach().to("cpu", want.dtype).contiguous().flatten().view(torch.uint8).numpy()
        layout.write_bytes_at(self.files[name], self.places[name].start + row * width, data)


_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.uint8: "U8", torch.bool: "BOOL"},
}
"""torch's dtype → its name in a safetensors file."""
