"""Tensors by name in torch's distributed checkpoint format (DCP): resharded on load, equal bytes for equal tensors."""

from __future__ import annotations

import warnings
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta


class _Writer(FileSystemWriter):
    """Leaves out what differs between two writings of one state: a random id and the path."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def save(tensors: dict[str, Tensor], directory: Path) -> None:
    """Write `tensors`, sharded or whole; called by all ranks with the same names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no process group is what no_dist says
        dcp.save(tensors, storage_writer=_Writer(directory, sync_files=False), no_dist=not dist.is_initialized())


def load(tensors: dict[str, Tensor], directory: Path) -> None:
    """Fill `tensors` in place, from whatever number of ranks wrote them; called by all ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=FileSystemReader(directory), no_dist=not dist.is_initialized())
