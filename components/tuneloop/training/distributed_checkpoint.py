"""Tensors by name in torch's distributed checkpoint (DCP), in its safetensors layout: resharded on load by any number
of ranks, equal bytes for equal tensors, no pickles. DCP's default layout pickles each tensor by itself, which for a
small model takes four times as long to write and six times to read."""

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


class _Writer(HuggingFaceStorageWriter):
    """A writer with one entry of metadata, since safetensors writes the parent's several entries in varying order."""

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        own, places = {}, {}
        for item in plan.items:
            assert item.tensor_data is not None  # bytes are not among `tensors`
            own[item.index.fqn] = planner.resolve_data(item).detach().cpu().contiguous()  # type: ignore[union-attr]
            places[item.index.fqn] = {SAVED_OFFSETS_KEY: list(item.tensor_data.chunk.offsets)}
        save_file(
            own, _file(Path(self.path), dist.get_rank()), {CUSTOM_METADATA_KEY: json.dumps(places)}
        )
        written: Future[list[WriteResult]] = Future()
        written.set_result([])  # the files themselves say what is in them
        return written


def _file(directory: Path, rank: int) -> Path:
    return directory / f"rank-{rank:05d}.safetensors"


def save_tensors(tensors: dict[str, Tensor], directory: Path) -> None:
    """Write `tensors`, sharded or whole; called by all ranks with the same names."""
    if dist.is_initialized():
        dcp.save(tensors, storage_writer=_Writer(directory))
    else:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(tensors, _file(directory, 0))


def load_tensors(tensors: dict[str, Tensor], directory: Path) -> None:
    """Fill `tensors` in place, from whatever number of ranks wrote them; called by all ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # it warns that there is no process group, as no_dist already says
        dcp.load(
            tensors,
            storage_reader=HuggingFaceStorageReader(str(directory)),
            no_dist=not dist.is_initialized(),
        )
