"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: their options, and how to merge or disable them.

Engines never see adapters: a checkpoint's ``model/`` has them merged in (`tuneloop.training.checkpoint`)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from tuneloop.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

BASE, ADAPTER = ".base_layer.", ".lora_"
"""Parts of peft's parameter names: of the original layer, and of an adapter."""


class Lora(BaseModel, frozen=True, extra="forbid"):
    """Options under the names of peft's LoraConfig."""

    r: int = Field(16, ge=1, description="rank of an adapter")
    lora_alpha: float = Field(32.0, gt=0, description="adapters are scaled by lora_alpha / r")
    lora_dropout: float = Field(0.0, ge=0, lt=1)
    target_modules: str | tuple[str, ...] = Field(
        "all-linear",
        description="all-linear: every linear layer but the output layer; names, or a regular expression",
    )
    use_rslora: bool = Field(
        False, description="scale by lora_alpha / √r instead (arXiv 2312.03732)"
    )

    def inject(self, model: Any) -> None:
        """Freeze a model of transformers and give it adapters: A random from torch's own stream, B zero. Raises
        UserError: `target_modules` names nothing, or embeddings, which a tied output layer would share."""
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        targets = (
            self.target_modules
            if isinstance(self.target_modules, str)
            else list(self.target_modules)
        )
        task = "SEQ_CLS" if model.get_output_embeddings() is None else "CAUSAL_LM"
        config = LoraConfig(**{**self.model_dump(), "target_modules": targets}, task_type=task)
        known = sorted(
            {
                name.rpartition(".")[2]
                for name, part in model.named_modules()
                if not list(part.children())
            }
        )
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            remedy = f"names no layer that LoRA can adapt; this model has {', '.join(known)}"
            raise UserError("lora.target_modules", targets, remedy) from error
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            if isinstance(part, BaseTunerLayer):
                raise UserError(
                    "lora.target_modules", targets, "leave embeddings and the output layer out"
                )


def merge_adapters(model: Any) -> "Iterator[tuple[str, Tensor]]":
    """Yield the state of `model` with its adapters merged, whole or sharded, in the dtype of the sum."""
    import torch
    from peft.tuners.lora import LoraLayer

    layers: dict[str, Any] = {
        name: part for name, part in model.named_modules() if isinstance(part, LoraLayer)
    }
    for name, value in model.state_dict().items():
        owner, _, leaf = name.rpartition(BASE)
        if leaf == "weight" and owner in layers:
            with torch.no_grad():
                value = value.float() + layers[owner].get_delta_weight("default")
        if ADAPTER not in name:
            yield name.replace(BASE, "."), value


@contextmanager
def disable_adapters(model: Any) -> Iterator[None]:
    """Disable the adapters of `model` while the block runs, by a scale of 0. peft's own switch disables their
    gradients, and FSDP, which checks these only once, would find no parameter to train."""
    from peft.tuners.lora import LoraLayer

    layers = [(part, part.scaling) for part in model.modules() if isinstance(part, LoraLayer)]
    for layer, scaling in layers:
        layer.scaling = dict.fromkeys(scaling, 0.0)
    try:
        yield
    finally:
        for layer, scaling in layers:
            layer.scaling = scaling
