"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: their options, and how to merge or disable
them.

Engines never see adapters: a checkpoint's ``model/`` has them merged in
(`tuneloop.training.checkpoint`). `stages/export.py: write_adapter` writes them for peft.

A merged weight is taken for the base's plus `get_delta_weight`. An option for which it is more, as
of DoRA, changes `merge_adapters`, `disable_adapters`, `fsdp/trainer.py: is_unchanged` and
`stages/export.py: read_adapters`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, Field

from tuneloop.core.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

BASE = ".base_layer."
"""The part of peft's names that stands for the original layer."""
ADAPTER = ".lora_"
"""The part of peft's names that stands for an adapter."""
SECOND = ".lora_B."
"""The matrix of an adapter that begins at zero, so that the adapter changes nothing.
`training/merged.py` looks for it in files of peft.
"""


class Lora(BaseModel, frozen=True, extra="forbid"):
    """Options under the names of peft's LoraConfig."""

    # All go to peft, and into the trainer's state and the parameters of a stage. There the options
    # are compared as a whole: with one more, a checkpoint of an earlier release begins with fresh
    # adapters (`state_sources.explain_fresh_state`), and its stage is not resumed
    # (`core/component.py: Component._check_same_origin`). `argo/memory_estimate.py:
    # count_adapter_parameters` counts by `r` and `target_modules`.
    r: int = Field(16, ge=1, description="rank of an adapter")
    lora_alpha: float = Field(32.0, gt=0, description="adapters are scaled by lora_alpha / r")
    lora_dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout before the adapters, in training"
    )
    target_modules: str | tuple[str, ...] = Field(
        "all-linear",
        description=(
            "all-linear: every linear layer but the output layer; names, or a regular expression"
        ),
    )
    use_rslora: bool = Field(
        False,
        description="scale by lora_alpha / √r instead (arXiv 2312.03732)",
    )

    def inject(self, model: Any) -> None:
        """Freeze a model of transformers and give it adapters: A random from torch's own stream, B
        zero.

        Raises UserError: `target_modules` names nothing, or embeddings, which a tied output layer
        would share.
        """
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.tuners_utils import BaseTunerLayer

        options = self.model_dump()
        targets = options["target_modules"]
        if not isinstance(targets, str):
            # peft takes a list and no tuple.
            targets = list(targets)
        options["target_modules"] = targets
        self.check_names(model)
        # A reward model has no output layer over a vocabulary.
        task = "SEQ_CLS" if model.get_output_embeddings() is None else "CAUSAL_LM"
        config = LoraConfig(**options, task_type=task)
        try:
            inject_adapter_in_model(config, model)
        except ValueError as error:
            leaves = ", ".join(list_linears(model))
            remedy = f"names no layer that LoRA can adapt; this model has {leaves}"
            if isinstance(targets, str):
                remedy += "; a text is a regular expression over whole names, a list has names"
            raise UserError("lora.target_modules", targets, remedy) from error
        # A regular expression may match these, too.
        for part in (model.get_input_embeddings(), model.get_output_embeddings()):
            if isinstance(part, BaseTunerLayer):
                raise UserError(
                    "lora.target_modules",
                    targets,
                    "leave embeddings and the output layer out",
                )

    def check_names(self, model: Any) -> None:
        """Refuse a list in which a name is of no module: peft passes over it where another matches.
        Raises UserError."""
        if isinstance(self.target_modules, str):
            return
        modules = [f".{name}" for name, _ in model.named_modules()]
        for target in self.target_modules:
            if not any(module.endswith(f".{target}") for module in modules):
                leaves = ", ".join(list_linears(model))
                remedy = f"names no layer that LoRA can adapt; this model has {leaves}"
                raise UserError("lora.target_modules", target, remedy)


def list_linears(model: Any) -> list[str]:
    """List the last parts of the names of a model's linear layers, without the output layer."""
    head = model.get_output_embeddings()
    leaves = {
        name.rpartition(".")[2]
        for name, part in model.named_modules()
        # GPT-2's linear layers are of a class of their own.
        if type(part).__name__ in ("Linear", "Conv1D") and part is not head
    }
    return sorted(leaves)


def get_merged_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return name.replace(BASE, ".")


def merge_adapters(model: Any) -> "Iterator[tuple[str, Tensor]]":
    """Yield the state of `model` with its adapters merged, whole or sharded, in the dtype of the
    sum.
    """
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
            yield get_merged_name(name), value


@contextmanager
def disable_adapters(model: Any) -> Iterator[None]:
    """Disable the adapters of `model` while the block runs, by a scale of 0. peft's own switch
    disables their gradients, and FSDP, which checks these only once, would find no parameter to
    train.
    """
    from peft.tuners.lora import LoraLayer

    layers = [(part, part.scaling) for part in model.modules() if isinstance(part, LoraLayer)]
    for layer, scaling in layers:
        layer.scaling = dict.fromkeys(scaling, 0.0)
    try:
        yield
    finally:
        for layer, scaling in layers:
            layer.scaling = scaling
