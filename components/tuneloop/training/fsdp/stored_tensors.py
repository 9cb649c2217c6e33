"""Tensors in the safetensors files of a model, read in part: a rank's rows are a range of bytes.

They stand for slices of the library safetensors where transformers loads a model. The library has
two ways to read, and neither suits. Pages of mapped files count as memory of the process, and its
``pread`` reads whole tensors.
"""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tuneloop.training.fsdp.export import DTYPE_NAMES
from tuneloop.weights import layout
from tuneloop.weights.versions import INDEX

WEIGHTS = "model.safetensors"
"""The file of a model that has only one."""
DTYPE_BY_NAME = {name: dtype for dtype, name in DTYPE_NAMES.items()}
"""Name in a safetensors file → torch's dtype."""


class StoredTensor:
    """A tensor in a safetensors file; an index reads the rows that it names, and no other bytes."""

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
        """Read the part of the tensor that `index` selects of it."""
        dtype = DTYPE_BY_NAME[self._entry.dtype]
        # Without data, torch computes which numbers are meant.
        whole = torch.empty(self._entry.shape, dtype=dtype, device="meta")
        selection = whole[index]
        # A range of rows is a range of bytes.
        if selection.is_contiguous():
            return self._read(selection)
        return self._read(whole)[index]

    def _read(self, selection: Tensor) -> Tensor:
        """Read a contiguous selection, which has no data itself."""
        start = self._entry.start + selection.storage_offset() * selection.element_size()
        tensor = torch.empty(selection.shape, dtype=selection.dtype)
        data = tensor.flatten().view(torch.uint8)
        layout.read_bytes_at(self._path, start, data.numpy())
        return tensor


def list_stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """List the tensors of a model by name; only the headers of its files are read."""
    tensors: dict[str, StoredTensor] = {}
    for path in list_weight_files(directory):
        for name, entry in layout.read_header(path).tensors.items():
            tensors[name] = StoredTensor(path, entry)
    return tensors


def list_weight_files(directory: Path) -> list[Path]:
    """List the safetensors files of a model, as transformers chooses them."""
    if (directory / WEIGHTS).is_file():
        return [directory / WEIGHTS]
    index = directory / INDEX
    if not index.is_file():
        return []
    content = json.loads(index.read_text())
    files = set(content["weight_map"].values())
    return [directory / file for file in sorted(files)]
