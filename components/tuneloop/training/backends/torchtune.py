"""torchtune's recipes, chosen as Kubeflow Trainer does (``pkg/runtime/framework/plugins/torch/torchtune.go``)."""

from dataclasses import dataclass
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.core.program import encode_value
from tuneloop.training.backends import LLMBackend, register_backend

RUNTIMES = ("llama3_2/1B", "llama3_2/3B", "llama3_3/70B", "qwen2_5/1.5B")
"""Configurations that the Trainer takes; the one of 70B alone on several nodes."""
LORA, QUANTIZED, DORA = "model.lora_attn_modules", "model.quantize_base", "model.use_dora"
MANAGED = ("output_dir", "tokenizer.path", "tokenizer.merges_file", "checkpointer.checkpoint_dir")
"""What a TrainJob's runtime sets itself: the Trainer's webhook refuses it among a job's arguments."""


@register_backend("torchtune")
@dataclass(frozen=True, kw_only=True)
class Torchtune(LLMBackend):
    """``tune run``, which is torchrun.

    Attributes:
        model: family and size as in torchtune's configurations: ``llama3_2/1B``.
        args: overrides of the configuration, by their dotted names.
    """

    model: str = "llama3_2/1B"

    def framework(self) -> str:
        return "torchtune"

    def to_command(self) -> list[str]:
        return ["tune", "run"]

    def to_args(self) -> list[str]:
        """Return all arguments; in a TrainJob the Trainer adds those before the overrides, and others get ``PET_*``."""
        recipe, config = self.recipe()
        given = [f"{name}={encode_value(value)}" for name, value in self.overrides.items()]
        return [recipe, "--config", config, *given]

    def to_runtime_args(self) -> list[str]:
        """Return the overrides alone. Raises UserError at one that the runtime sets."""
        if taken := sorted(self.overrides.keys() & {*MANAGED}):
            raise UserError(f"args.{taken[0]}", self.overrides[taken[0]], "is set by the runtime; leave it out")
        return self.to_args()[3:]

    @property
    def overrides(self) -> dict[str, Any]:
        """`args` but for what is none, or switched off: the Trainer takes these two names alone for a yes."""
        off = [name for name in (QUANTIZED, DORA) if str(self.args.get(name)).lower() == "false"]
        return {name: value for name, value in self.args.items() if value is not None and name not in off}

    def recipe(self) -> tuple[str, str]:
        """Choose recipe and configuration by nodes, ranks and what the overrides say of LoRA. DoRA is not QLoRA."""
        quantized, lora = QUANTIZED in self.overrides and DORA not in self.overrides, LORA in self.overrides
        if self.nodes > 1:
            return "full_finetune_distributed", f"{self.model}_full_multinode"
        kind, name = ("lora", "qlora") if quantized else ("lora", "lora") if lora else ("full", "full")
        if self.processes == 1:
            return f"{kind}_finetune_single_device", f"{self.model}_{name}_single_device"
        return f"{kind}_finetune_distributed", f"{self.model}_{name}"

    def validate(self) -> None:
        if self.model not in RUNTIMES:
            raise UserError("model", self.model, f"has no torchtune runtime; known: {', '.join(RUNTIMES)}")
        if self.nodes > 1 and self.model != "llama3_3/70B":
            raise UserError("nodes", self.nodes, f"must be 1 for {self.model}")
        if self.nodes > 1 and self.overrides.keys() & {LORA, QUANTIZED}:
            raise UserError("nodes", self.nodes, "must be 1 with LoRA: on several torchtune would train all weights")
        config = self.recipe()[1]
        if config.endswith("_qlora") and self.model in ("llama3_2/1B", "llama3_2/3B"):
            raise UserError("processes", self.processes, f"must be 1 for {self.model} with {QUANTIZED}")
        if "_qlora" in config and self.model == "qwen2_5/1.5B":
            raise UserError(f"args.{QUANTIZED}", self.args[QUANTIZED], f"is not supported for {self.model}")
