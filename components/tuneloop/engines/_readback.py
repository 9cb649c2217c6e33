"""What a running vLLM engine holds, compared with the files it was loaded from: evidence, not trust.

On a CPU vLLM keeps linear layers packed for its kernels and drops the weights. Such a layer is asked for a column of
its weights by multiplying it with a unit vector, which is exact; only the sign of a zero can not be told that way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Readback:
    """How many of `tensors` in the files were found `identical`; the names of the others.

    Attributes:
        different: the engine holds something else.
        unread: the engine keeps it in a form that this module does not know.
    """

    tensors: int
    identical: int
    different: list[str]
    unread: list[str]


def read_back(engine: Any, model: Path, every: int = 1) -> Readback:
    """Compare all tensors below `model` with those in `engine`, as loaded: cast to the engine's dtype.

    Args:
        every: of packed layers, look at one column in so many.
    """
    (compared,) = engine.collective_rpc(compare, args=(str(model), every))[:1]
    different = sorted(name for name, same in compared.items() if same is False)
    unread = sorted(name for name, same in compared.items() if same is None)
    return Readback(len(compared), len(compared) - len(different) - len(unread), different, unread)


def compare(worker: Any, model: str, every: int) -> dict[str, bool | None]:
    """Tensor name → whether the engine holds it; None where it can not be read. Runs in vLLM's worker."""
    from safetensors import safe_open

    module = worker.get_model()
    found: dict[str, bool | None] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            for name in shapes:
                found[name] = _holds(module, name, file.get_tensor(name), shapes, every)
    return found


def _holds(model: Any, name: str, want: Tensor, shapes: dict[str, list[int]], every: int) -> bool | None:
    place, leaf = name.rpartition(".")[::2]
    owner, attribute = place.rpartition(".")[::2]
    first = 0
    for fused, parts in getattr(model, "packed_modules_mapping", {}).items():
        if attribute in parts and fused != attribute:
            before = parts[: parts.index(attribute)]
            siblings = [f"{owner}.{part}.{leaf}" for part in before]
            if not all(sibling in shapes for sibling in siblings):
                return None
            first, place = sum(shapes[sibling][0] for sibling in siblings), f"{owner}.{fused}"
    try:
        layer = model.get_submodule(place)
        held = getattr(layer, leaf)
    except AttributeError:
        return None
    answers = list(_views(layer, leaf, held, want, first, every))
    return all(answers) if answers else None


def _views(layer: Any, leaf: str, held: Tensor, want: Tensor, first: int, every: int) -> Iterator[bool]:
    """Each way in which the layer holds the tensor, and whether it agrees."""
    import torch

    rows = slice(first, first + want.shape[0]) if want.ndim else ...
    want = want.to(held.dtype)
    if held.numel():
        part = held[rows].cpu()
        yield part.shape == want.shape and torch.equal(part.view(torch.uint8), want.view(torch.uint8))
    if leaf == "weight" and want.ndim == 2 and hasattr(layer, "cpu_linear"):
        columns = torch.arange(0, want.shape[1], every)
        units = torch.zeros(len(columns), want.shape[1], dtype=want.dtype)
        units[torch.arange(len(columns)), columns] = 1
        answer = layer.cpu_linear(units, layer.weight, None)[:, rows]
        yield torch.equal(answer, want[:, columns].t())
