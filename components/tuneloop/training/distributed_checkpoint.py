"""Tensors by name in torch's distributed checkpoint (DCP), in its safetensors layout.

They are resharded on load by any number of ranks; equal tensors give equal bytes; nothing is a
pickle.
DCP's default layout pickles each tensor by itself, which for a small model takes four times as long
to write and six times to read.

`Trainer.save` and `Trainer.load` are its callers, and ``trainer/`` of a checkpoint is what it
writes; `Policy.load_masters` reads the parameters alone. The names of tensors are thereby stored: a
renamed parameter cannot be read from older checkpoints. `stages/export.py: read_adapters` reads the
files without torch. It relies on their order by rank, on shards of whole rows and on the prefix
``model.`` of parameters.
"""

import json
import warnings
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint._hf_utils import CUSTOM_METADATA_KEY, SAVED_OFFSETS_KEY
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tuneloop.core.json_types import JsonObject


class _Writer(HuggingFaceStorageWriter):
    """A writer with one entry of metadata, since safetensors writes the parent's several entries in
    varying order.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shards into a file, with the offset of each in the whole tensor."""
        shards: dict[str, Tensor] = {}
        offsets: dict[str, JsonObject] = {}
        for item in plan.items:
            name = item.index.fqn
            # Only tensors are saved, no bytes.
            assert item.tensor_data is not None
            shard = planner.resolve_data(item)
            assert isinstance(shard, Tensor)
            shards[name] = shard.detach().cpu().contiguous()
            offsets[name] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
        metadata = {CUSTOM_METADATA_KEY: json.dumps(offsets)}
        save_file(shards, _name_file(Path(self.path), dist.get_rank()), metadata)
        # The files themselves say what is in them.
        results: Future[list[WriteResult]] = Future()
        results.set_result([])
        return results


def _name_file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.safetensors"


def save_tensors(tensors: dict[str, Tensor], directory: Path) -> None:
    """Write `tensors`, sharded or whole; called by all ranks with the same names."""
    if dist.is_initialized():
        dcp.save(tensors, storage_writer=_Writer(directory))
    else:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, _name_file(directory, 0))


def load_tensors(tensors: dict[str, Tensor], directory: Path) -> None:
    """Fill `tensors` in place, from whatever number of ranks wrote them; called by all ranks."""
    with warnings.catch_warnings():
        # It warns that there is no process group, as `no_dist` already says.
        warnings.simplefilter("ignore")
        dcp.load(
            tensors,
            storage_reader=HuggingFaceStorageReader(str(directory)),
            no_dist=not dist.is_initialized(),
        )
