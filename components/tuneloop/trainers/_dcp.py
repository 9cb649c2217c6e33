"""Tensors by name in torch's distributed checkpoint format (DCP): resharded on load, equal bytes for equal tensors."""

from __future__ import annotations

import pickle
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult


class _Writer(FileSystemWriter):
    """Leaves out what differs between two writings of one state: a random id, the path, and Python's patch release."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        with Path(self.path, ".metadata").open("wb") as file:
            _Pickler(file, protocol=4).dump(metadata)


class _Pickler(pickle.Pickler):
    """Enums by value: Python 3.11.2 and 3.11.7 pickle them in different words."""

    def reducer_override(self, obj: Any) -> Any:
        return (type(obj), (obj.value,)) if isinstance(obj, Enum) else NotImplemented


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
