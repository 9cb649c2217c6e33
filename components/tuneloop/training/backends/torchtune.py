"""torchtune's recipes, chosen as Kubeflow Trainer does
(``pkg/runtime/framework/plugins/torch/torchtune.go``).
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pydantic import BaseModel, Field, ValidationError

from tuneloop.core.component import convert_validation_error
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import encode_value
from tuneloop.training.backends import LLMBackend, register_backend

RUNTIMES = ("llama3_2/1B", "llama3_2/3B", "llama3_3/70B", "qwen2_5/1.5B")
"""Configurations that the Trainer accepts; only that of 70B runs on several nodes.

Each has a folder in ``manifests/components/trainer/torchtune`` with the runtime that
`Torchtune.get_runtime_name` names. `Torchtune.validate` refuses by these names what torchtune has
no recipe for. `tests/cluster/test_trainjob.py` asks the Trainer itself about each.
"""
LORA = "model.lora_attn_modules"
QUANTIZED = "model.quantize_base"
DORA = "model.use_dora"
"""Overrides by which the Trainer's plugin chooses the recipe: fields of `Lora`, under ``model``."""
MANAGED = ("output_dir", "tokenizer.path", "tokenizer.merges_file", "checkpointer.checkpoint_dir")
"""Options that a TrainJob's runtime sets itself: the Trainer's webhook refuses them as arguments of
a job.
"""


AttentionModule = Literal["q_proj", "k_proj", "v_proj", "output_proj"]
Column = Literal["input", "output"]
FileFormat = Literal["json", "csv", "parquet", "arrow", "text", "xml"]


class Lora(BaseModel, frozen=True, extra="forbid"):
    """LoRA, QLoRA (`quantize_base`) or DoRA, under ``model``."""

    apply_lora_to_mlp: bool | None = None
    apply_lora_to_output: bool | None = None
    lora_rank: int | None = Field(None, ge=1)
    lora_alpha: int | float | None = Field(None, gt=0)
    lora_dropout: float | None = Field(None, ge=0, lt=1)
    quantize_base: bool | None = None
    use_dora: bool | None = None
    # The default is that of Kubeflow's SDK.
    lora_attn_modules: list[AttentionModule] = Field(
        ["q_proj", "v_proj", "output_proj"],
        min_length=1,
    )


class InstructDataset(BaseModel, frozen=True, extra="forbid"):
    """``torchtune.datasets.instruct_dataset``; `column_map` says which columns are ``input`` and
    ``output``.
    """

    source: FileFormat | None = None
    split: str | None = None
    train_on_input: bool | None = None
    new_system_prompt: str | None = None
    column_map: dict[Column, str] | None = None
    data_dir: str | None = None


class TorchtuneConfig(BaseModel, frozen=True, extra="forbid"):
    """The part of torchtune's configuration that Kubeflow's SDK has types for, under torchtune's
    own keys.
    """

    dtype: Literal["bf16", "fp32"] | None = None
    batch_size: int | None = Field(None, ge=1)
    epochs: int | None = Field(None, ge=1)
    loss: str | None = None
    model: Lora | None = None
    dataset: InstructDataset | None = None

    def to_overrides(self) -> dict[str, str]:
        """Return the overrides by their dotted names, in the SDK's order and in its words."""
        overrides: dict[str, str] = {}
        for section, value in self.model_dump(exclude_none=True).items():
            # A data set is named by its class; the keys below are the arguments of that.
            if section == "dataset":
                overrides[section] = "torchtune.datasets.instruct_dataset"
            if isinstance(value, dict):
                for key, option in value.items():
                    overrides[f"{section}.{key}"] = _format_option(option)
            else:
                overrides[section] = _format_option(value)
        return overrides


def _format_option(value: object) -> str:
    """Format a value as the SDK does: a list without quotes and spaces."""
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value)


@register_backend("torchtune")
@dataclass(frozen=True, kw_only=True)
class Torchtune(LLMBackend):
    """``tune run``, which is torchrun with torchtune's recipes.

    `args` are overrides by their dotted names; they take precedence over `config`.

    Attributes:
        model: family and size as in torchtune's configurations.
        config: the typed overrides, or their keys. Without a dataset torchtune loads Alpaca from
            the Hugging Face Hub.
    """

    image: ClassVar[str] = "torchtune"
    model: str = "llama3_2/1B"
    config: TorchtuneConfig | JsonMapping = field(default_factory=dict)

    def framework(self) -> str:
        """Return the framework of Kubeflow Trainer's runtimes for torchtune."""
        return "torchtune"

    def get_runtime_name(self) -> str:
        """Return the runtime's name, in which the Trainer reads the model:
        ``tuneloop-llama3.2-1b``.
        """
        return f"tuneloop-{self.model.replace('_', '.').replace('/', '-').lower()}"

    def to_command(self) -> list[str]:
        """Return torchtune's command."""
        return ["tune", "run"]

    def to_args(self) -> list[str]:
        """Return all arguments; in a TrainJob the Trainer adds those before the overrides."""
        recipe, config = self.recipe()
        arguments: list[str] = []
        # Without an option of torchrun, `tune` starts one process and ignores the ``PET_*``
        # variables.
        if "distributed" in recipe:
            arguments += ["--nnodes", str(self.nodes)]
            arguments += ["--nproc_per_node", str(self.processes)]
        arguments += [recipe, "--config", config]
        return arguments + self._format_overrides()

    def to_runtime_args(self) -> list[str]:
        """Return the overrides alone. Raises UserError at one that the runtime sets."""
        overrides = self.overrides
        managed = sorted(overrides.keys() & {*MANAGED})
        if managed:
            name = managed[0]
            raise UserError(f"args.{name}", overrides[name], "is set by the runtime; leave it out")
        return self._format_overrides()

    def _format_overrides(self) -> list[str]:
        return [f"{name}={encode_value(value)}" for name, value in self.overrides.items()]

    @property
    def overrides(self) -> JsonObject:
        """`config` and `args` without None, and without a false `QUANTIZED` or `DORA`, since the
        Trainer enables these by their names alone.

        Raises UserError for a key or a value that `config` cannot have.
        """
        overrides: JsonObject = {}
        try:
            overrides.update(TorchtuneConfig.model_validate(self.config).to_overrides())
        except ValidationError as error:
            raise convert_validation_error(error, "config.") from None
        overrides.update(self.args)
        for name in (QUANTIZED, DORA):
            if str(overrides.get(name)).lower() == "false":
                del overrides[name]
        return {name: value for name, value in overrides.items() if value is not None}

    def recipe(self) -> tuple[str, str]:
        """Choose recipe and configuration by nodes, ranks and the overrides for LoRA.

        DoRA is not QLoRA.
        """
        overrides = self.overrides
        # On several nodes torchtune has recipes for all weights only; `validate` refuses LoRA.
        if self.nodes > 1:
            return "full_finetune_distributed", f"{self.model}_full_multinode"
        recipe = "full"
        config = "full"
        if QUANTIZED in overrides and DORA not in overrides:
            recipe = "lora"
            config = "qlora"
        elif LORA in overrides:
            recipe = "lora"
            config = "lora"
        if self.processes == 1:
            return f"{recipe}_finetune_single_device", f"{self.model}_{config}_single_device"
        return f"{recipe}_finetune_distributed", f"{self.model}_{config}"

    def validate(self) -> None:
        """Check that torchtune and the Trainer have a configuration for the model and the ranks."""
        if self.model not in RUNTIMES:
            remedy = f"has no torchtune runtime; known: {', '.join(RUNTIMES)}"
            raise UserError("model", self.model, remedy)
        if self.nodes > 1 and self.model != "llama3_3/70B":
            raise UserError("nodes", self.nodes, f"must be 1 for {self.model}")
        if self.nodes > 1 and self.overrides.keys() & {LORA, QUANTIZED}:
            remedy = "must be 1 with LoRA: on several torchtune would train all weights"
            raise UserError("nodes", self.nodes, remedy)
        config = self.recipe()[1]
        if config.endswith("_qlora") and self.model in ("llama3_2/1B", "llama3_2/3B"):
            remedy = f"must be 1 for {self.model} with {QUANTIZED}"
            raise UserError("processes", self.processes, remedy)
        if "_qlora" in config and self.model == "qwen2_5/1.5B":
            value = self.overrides[QUANTIZED]
            raise UserError(f"args.{QUANTIZED}", value, f"is not supported for {self.model}")
