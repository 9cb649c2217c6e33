"""torchtune's recipes, chosen as Kubeflow Trainer does (``pkg/runtime/framework/plugins/torch/torchtune.go``)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError

from tuneloop.core.component import convert_validation_error
from tuneloop.core.errors import UserError
from tuneloop.core.program import encode_value
from tuneloop.training.backends import LLMBackend, register_backend

RUNTIMES = ("llama3_2/1B", "llama3_2/3B", "llama3_3/70B", "qwen2_5/1.5B")
"""Configurations that the Trainer accepts; only that of 70B runs on several nodes."""
LORA, QUANTIZED, DORA = "model.lora_attn_modules", "model.quantize_base", "model.use_dora"
MANAGED = ("output_dir", "tokenizer.path", "tokenizer.merges_file", "checkpointer.checkpoint_dir")
"""Options that a TrainJob's runtime sets itself: the Trainer's webhook refuses them as arguments of a job."""


class Lora(BaseModel, frozen=True, extra="forbid"):
    """LoRA, QLoRA (`quantize_base`) or DoRA, under ``model``."""

    apply_lora_to_mlp: bool | None = None
    apply_lora_to_output: bool | None = None
    lora_rank: int | None = Field(None, ge=1)
    lora_alpha: int | float | None = Field(None, gt=0)
    lora_dropout: float | None = Field(None, ge=0, lt=1)
    quantize_base: bool | None = None
    use_dora: bool | None = None
    lora_attn_modules: list[Literal["q_proj", "k_proj", "v_proj", "output_proj"]] = Field(
        ["q_proj", "v_proj", "output_proj"], min_length=1
    )


class InstructDataset(BaseModel, frozen=True, extra="forbid"):
    """``torchtune.datasets.instruct_dataset``; `column_map` says which columns are ``input`` and ``output``."""

    source: Literal["json", "csv", "parquet", "arrow", "text", "xml"] | None = None
    split: str | None = None
    train_on_input: bool | None = None
    new_system_prompt: str | None = None
    column_map: dict[Literal["input", "output"], str] | None = None
    data_dir: str | None = None


class TorchtuneConfig(BaseModel, frozen=True, extra="forbid"):
    """The part of torchtune's configuration that Kubeflow's SDK has types for, under torchtune's own keys."""

    dtype: Literal["bf16", "fp32"] | None = None
    batch_size: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1)
    loss: str | None = None
    model: Lora | None = None
    dataset: InstructDataset | None = None

    def to_overrides(self) -> dict[str, str]:
        """Return the overrides by their dotted names, in the SDK's order and in its words."""
        made: dict[str, Any] = {}
        for name, value in self.model_dump(exclude_none=True).items():
            if name == "dataset":
                made[name] = "torchtune.datasets.instruct_dataset"
            made |= (
                {f"{name}.{key}": of for key, of in value.items()}
                if isinstance(value, dict)
                else {name: value}
            )
        return {
            key: f"[{','.join(of)}]" if isinstance(of, list) else str(of)
            for key, of in made.items()
        }


@register_backend("torchtune")
@dataclass(frozen=True, kw_only=True)
class Torchtune(LLMBackend):
    """``tune run``, which is torchrun with torchtune's recipes.

    `model` is family and size as in torchtune's configurations. `config` has the typed overrides, as a
    `TorchtuneConfig` or its keys; without a dataset torchtune loads Alpaca from the Hugging Face Hub. `args` are all
    other overrides, by their dotted names; they take precedence."""

    image: ClassVar[str] = "torchtune"
    model: str = "llama3_2/1B"
    config: TorchtuneConfig | Mapping[str, Any] = field(default_factory=dict)

    def framework(self) -> str:
        return "torchtune"

    def get_runtime_name(self) -> str:
        """Return the runtime's name, in which the Trainer reads the model: ``tuneloop-llama3.2-1b``."""
        return f"tuneloop-{self.model.replace('_', '.').replace('/', '-').lower()}"

    def to_command(self) -> list[str]:
        return ["tune", "run"]

    def to_args(self) -> list[str]:
        """Return all arguments; in a TrainJob the Trainer adds those before the overrides."""
        recipe, config = self.recipe()
        # Without an option of torchrun, `tune` starts one process and ignores the ``PET_*`` variables.
        ranks = ["--nnodes", str(self.nodes), "--nproc_per_node", str(self.processes)]
        return [
            *(ranks if "distributed" in recipe else ()),
            recipe,
            "--config",
            config,
            *self._words(),
        ]

    def to_runtime_args(self) -> list[str]:
        """Return the overrides alone. Raises UserError at one that the runtime sets."""
        if taken := sorted(self.overrides.keys() & {*MANAGED}):
            raise UserError(
                f"args.{taken[0]}", self.overrides[taken[0]], "is set by the runtime; leave it out"
            )
        return self._words()

    def _words(self) -> list[str]:
        return [f"{name}={encode_value(value)}" for name, value in self.overrides.items()]

    @property
    def overrides(self) -> dict[str, Any]:
        """`config` and `args` without None, and without a false `QUANTIZED` or `DORA`, since the Trainer enables these
        by their names alone. Raises UserError for a key or a value that `config` cannot have."""
        try:
            given = {**TorchtuneConfig.model_validate(self.config).to_overrides(), **self.args}
        except ValidationError as error:
            raise convert_validation_error(error, "config.") from None
        off = [name for name in (QUANTIZED, DORA) if str(given.get(name)).lower() == "false"]
        return {
            name: value for name, value in given.items() if value is not None and name not in off
        }

    def recipe(self) -> tuple[str, str]:
        """Choose recipe and configuration by nodes, ranks and the overrides for LoRA. DoRA is not QLoRA."""
        quantized, lora = (
            QUANTIZED in self.overrides and DORA not in self.overrides,
            LORA in self.overrides,
        )
        if self.nodes > 1:
            return "full_finetune_distributed", f"{self.model}_full_multinode"
        kind, name = (
            ("lora", "qlora") if quantized else ("lora", "lora") if lora else ("full", "full")
        )
        if self.processes == 1:
            return f"{kind}_finetune_single_device", f"{self.model}_{name}_single_device"
        return f"{kind}_finetune_distributed", f"{self.model}_{name}"

    def validate(self) -> None:
        if self.model not in RUNTIMES:
            raise UserError(
                "model", self.model, f"has no torchtune runtime; known: {', '.join(RUNTIMES)}"
            )
        if self.nodes > 1 and self.model != "llama3_3/70B":
            raise UserError("nodes", self.nodes, f"must be 1 for {self.model}")
        if self.nodes > 1 and self.overrides.keys() & {LORA, QUANTIZED}:
            raise UserError(
                "nodes",
                self.nodes,
                "must be 1 with LoRA: on several torchtune would train all weights",
            )
        config = self.recipe()[1]
        if config.endswith("_qlora") and self.model in ("llama3_2/1B", "llama3_2/3B"):
            raise UserError(
                "processes", self.processes, f"must be 1 for {self.model} with {QUANTIZED}"
            )
        if "_qlora" in config and self.model == "qwen2_5/1.5B":
            raise UserError(
                f"args.{QUANTIZED}", self.args[QUANTIZED], f"is not supported for {self.model}"
            )
