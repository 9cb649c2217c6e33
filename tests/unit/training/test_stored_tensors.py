from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tuneloop.core.errors import Corrupt
from tuneloop.training.fsdp.stored_tensors import list_stored_tensors
from tuneloop.weights import layout


def test_a_part_is_what_torch_selects(tmp_path: Path) -> None:
    tensors = {
        "matrix": torch.randn(7, 5).to(torch.bfloat16),
        "experts": torch.randn(4, 3, 2),
        "number": torch.tensor(3),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    stored = list_stored_tensors(tmp_path)
    assert stored.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert stored[name].get_shape() == list(tensor.shape)
        assert torch.equal(stored[name][...], tensor)
    for index in (
        slice(2, 5),
        (slice(5, 9), slice(0, 5)),
        (slice(0, 0), slice(0, 5)),
        (slice(1, 7), slice(2, 4)),
    ):
        part = stored["matrix"][index]
        assert part.dtype == torch.bfloat16
        assert torch.equal(part, tensors["matrix"][index])
    assert torch.equal(stored["experts"][1:3, :, :1], tensors["experts"][1:3, :, :1])


def test_a_file_that_is_cut_off_later_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"matrix": torch.zeros(64, 64)}, path)
    stored = list_stored_tensors(tmp_path)
    path.write_bytes(path.read_bytes()[:-100])
    assert stored["matrix"][:63].sum() == 0
    with pytest.raises(Corrupt, match=r"model.safetensors.*ends at byte"):
        stored["matrix"][...]


def test_bytes_are_read_from_where_they_begin(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    data = torch.zeros(5, dtype=torch.uint8).numpy()
    layout.read_bytes_at(path, 90, data)
    assert data.tolist() == [90, 91, 92, 93, 94]
