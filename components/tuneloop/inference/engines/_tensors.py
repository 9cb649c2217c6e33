"""What an engine's tensors are compared with, and what the comparison found.

Engines that can be read back return a `TensorProof`, by which `inference/proof.py` decides. The
tests are `tests/unit/inference/test_readback.py` and `tests/unit/inference/test_transformers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tuneloop.inference.engines import TensorProof
from tuneloop.weights.delta import compute_checksums
from tuneloop.weights.layout import Checkpoint
from tuneloop.weights.versions import digest_weights

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Readback:
    """A comparison of an engine with the files of a model.

    Attributes:
        tensors: how many the files have.
        identical: how many of these the engine holds bit for bit, but for the sign of a zero in
            layers that it packs.
        different: the names of those that differ in at least one worker.
        unread: the names of those that the engine keeps in a form unknown to us.
    """

    tensors: int
    identical: int
    different: list[str]
    unread: list[str]

    def without(self, opaque: frozenset[str]) -> Readback:
        """Count the tensors in `opaque` as unread where they differ."""
        unread = set(self.unread) | (set(self.different) & opaque)
        different = [name for name in self.different if name not in opaque]
        return replace(self, different=different, unread=sorted(unread))

    def summarize(self, digest: str, dtype: str) -> TensorProof:
        """Count, for a client or a manifest: a mixture of experts has thousands of names."""
        return TensorProof(
            digest=digest,
            dtype=dtype,
            tensors=self.tensors,
            identical=self.identical,
            unread=len(self.unread),
            different=len(self.different),
            example=self.different[0] if self.different else "",
        )


def digest_model(model: Path) -> str:
    """Compute the xxh3-128 of all tensors of a model directory, with their names and shapes.

    Server and stage compute it each (`inference/http_api.py`,
    `inference/proof.py: compare_tensors`): with another computation a server of an earlier release
    counts as stale.
    """
    checkpoint = Checkpoint(model)
    return digest_weights(checkpoint.headers, compute_checksums(checkpoint))


def compare_state(state: Mapping[str, Tensor], model: Path) -> Readback:
    """Compare a state with the files below `model`, in the state's dtypes.

    Args:
        state: name → tensor, by the names of the files.
        model: a model directory.
    """
    unread: list[str] = []
    different: list[str] = []
    tensors = 0
    for name, expected in read_tensors(model):
        tensors += 1
        tensor = state.get(name)
        # transformers fuses some layers while it loads them, so that the state lacks their names, or
        # has another tensor under the name of one of them.
        if tensor is None or tensor.shape != expected.shape:
            unread.append(name)
        elif not is_same(tensor.cpu(), expected.to(tensor.dtype)):
            different.append(name)
    identical = tensors - len(unread) - len(different)
    return Readback(tensors, identical, different, unread)


def read_tensors(model: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a model directory by name, one at a time.

    Raises:
        FileNotFoundError: the directory has no safetensors files.
    """
    from safetensors import safe_open

    paths = sorted(model.glob("*.safetensors"))
    if not paths:
        raise FileNotFoundError(f"{model} has no safetensors files")
    for path in paths:
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)


def is_same(tensor: Tensor, expected: Tensor) -> bool:
    """Compare two tensors of one dtype bit for bit."""
    import torch

    if tensor.shape != expected.shape:
        return False
    # The bytes: a NaN equals itself, and a zero differs from a negative one.
    flat = tensor.reshape(-1).view(torch.uint8)
    return torch.equal(flat, expected.reshape(-1).view(torch.uint8))
