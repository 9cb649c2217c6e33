"""The parameters that all training stages share: their types, bounds and defaults.

Each option is a flag of every stage whose options have it and a key of the pipelines' settings. Those
that describe the model are arguments of `Policy` (`MODEL_OPTIONS`); those that all stages of a run
have in common are in the section ``trainer`` (`TRAINER_SETTINGS` of `config/trainer.py`).

A new option is a field of `TrainerOptions`. It is named in these places, too, as far as they
concern it, and nothing notices one that is left out:

- `training/backends/trl.py: SHARED_OPTIONS` or `UNSUPPORTED`: TRL's backend ignores it otherwise.
- `stages/policy_update.py: PolicyUpdateOptions.flags`: a loop does not have it otherwise.
- `MODEL_OPTIONS` below, if the model is made with it. (If the optimizer is, it is a field of
  `Optimization`, which `extensions/gateway/resident.py: _read_optimization` makes, too.)
- `config/trainer.py: TRAINER_SETTINGS`, if it is set once for all stages; else each stage's section
  has it.
- `planning/limits.py: GPU_SETTINGS`, if it needs a GPU; `argo/memory_estimate.py`, if memory
  depends on it.

A default that is changed here or in a stage's subclass is changed in `config/rules.py: RULES`, too:
a rule replaces only the defaults that it lists, and would no longer apply.
`tests/unit/config/test_followed.py` notices that for the stages of shipped pipelines, so not for
`reward_model`.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from pydantic import Field

from tuneloop.core.component import UNTRACKED
from tuneloop.core.context import Options
from tuneloop.training.lora import Lora

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16"]
Packing = Literal["auto", "packed", "padded"]
Schedule = Literal["constant", "linear", "cosine"]

LEARNING_RATE_TEXT = "AdamW's learning rate after the warm-up"
ADAM_BETA2_TEXT = "AdamW's decay of the mean of squared gradients"

MODEL_OPTIONS = (
    "dtype",
    "attn_implementation",
    "packing",
    "max_length",
    "gradient_checkpointing",
    "lora",
    "cpu_offload",
    "torch_compile",
    "use_liger_kernel",
)
"""The keyword arguments of `tuneloop.training.fsdp.policy.Policy`, by name.

A stage without one of these flags uses the default of `Policy`, which may be another one than here
(`max_length`). A trainer in memory is used again only if these and `Optimization` are equal
(`training/checkpoint.py: ResidentTrainer.take`).
"""
LOGITS = 1 << 25
"""Maximum number of logits at once, 128 MiB in float32: 1024 tokens of a vocabulary of 32768.

`fsdp/policy.py: Policy._wrap_head` cuts by it. `argo/memory_estimate.py`, `config/choices.py` and
`config/model_facts.py` compute memory from it.
"""
GPU_LOGITS = 1 << 28
"""The same on a GPU, 1 GiB in float32; larger, as each part of the logits reads the output layer's
weights anew. `argo/memory_estimate.py` reads it, too.
"""


@dataclass(frozen=True)
class Optimization:
    """AdamW, its schedule and clipping, by the names and meanings of transformers'
    TrainingArguments.

    `max_steps` is where ``linear`` and ``cosine`` reach zero. Step 1 of a warm-up already has a
    rate above zero. Each field has the name of an option of `TrainerOptions`. `Trainer.__init__`
    gives them to AdamW; only `rate` and `max_grad_norm` are read again in each step.
    """

    learning_rate: float
    lr_scheduler_type: Schedule
    warmup_steps: int
    max_steps: int
    weight_decay: float
    adam_beta1: float
    adam_beta2: float
    max_grad_norm: float

    def rate(self, step: int) -> float:
        """Compute the learning rate of `step`, counted from 1."""
        if step <= self.warmup_steps:
            return self.learning_rate * step / self.warmup_steps
        if self.lr_scheduler_type == "constant":
            return self.learning_rate
        # The first step after the warm-up has the full rate; step `max_steps` is the last above 0.
        # Without a step after the warm-up there is nothing to divide by.
        decay_steps = max(1, self.max_steps - self.warmup_steps)
        progress = min(1.0, (step - 1 - self.warmup_steps) / decay_steps)
        if self.lr_scheduler_type == "linear":
            return self.learning_rate * (1 - progress)
        return self.learning_rate * ((1 + math.cos(math.pi * progress)) / 2)


class TrainerOptions(Options):
    """Options of a trainer; a stage's subclass may set defaults, and `flags`: the names of the options
    that it has. Without `flags` it has all.

    On resuming, each is compared with those of committed outputs, unless it is `UNTRACKED`. An
    option that an earlier release did not have must be at its default then (`core/component.py:
    Component._check_same_origin`), so a new option needs a default that changes nothing.

    Attributes:
        sequences: the number of sequences in an example.
    """

    sequences: ClassVar[int] = 1

    # `BackendOptions` checks a backend against the fields that are declared before its own, which
    # are all of these (`training/delegation.py`).
    max_steps: int = Field(100, ge=1, description="optimizer steps")
    per_device_train_batch_size: int = Field(32, ge=1, description="examples in a micro-batch")
    gradient_accumulation_steps: int = Field(
        1,
        ge=1,
        description="a step is batch x accumulation x processes examples",
    )
    learning_rate: float = Field(1e-4, gt=0, description=LEARNING_RATE_TEXT)
    lr_scheduler_type: Schedule = Field(
        "constant", description="how the learning rate goes on after the warm-up"
    )
    warmup_steps: int = Field(
        10, ge=0, description="optimizer steps in which the learning rate rises"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's weight decay")
    adam_beta1: float = Field(0.9, ge=0, lt=1, description="AdamW's decay of the mean of gradients")
    adam_beta2: float = Field(0.99, ge=0, lt=1, description=ADAM_BETA2_TEXT)
    max_grad_norm: float = Field(
        1.0, ge=0, description="norm to which gradients are clipped; 0: no clipping"
    )
    max_length: int = Field(
        256,
        ge=2,
        description="most tokens of a prompt with its completion; data.too_long says what happens to longer rows",
    )
    packing: Packing = Field(
        "auto",
        description="auto: packed on a GPU with a kernel for it, else padded",
    )
    gradient_checkpointing: bool = Field(
        False,
        description="recompute activations in place of keeping them",
    )
    lora: Lora | None = Field(None, description="train adapters by peft, with peft's option names")
    cpu_offload: bool = Field(
        False,
        description="FSDP shards and optimizer in the host's memory; several GPUs only",
    )
    torch_compile: bool = Field(
        False,
        description="compile layers; resuming is then exact to float tolerance only",
    )
    use_liger_kernel: bool = Field(False, description="liger-kernel's Triton kernels; GPUs only")
    dtype: Dtype = Field("float32", description="of the computation; parameters are float32")
    attn_implementation: str = Field(
        "auto",
        description="transformers' name, or varlen; auto: FlashAttention 2, else varlen, else sdpa",
    )
    save_dtype: Literal["auto", "bfloat16", "float16", "float32"] = Field(
        "auto",
        description="dtype of model/, which is sampled from; auto: as the policy came in",
    )
    save_steps: int = Field(0, ge=0, description="steps between resume points; 0: only on SIGTERM")
    device: Device = Field("auto", description="auto: CUDA if available")
    expected_world_size: int | None = Field(
        None,
        ge=1,
        description="refuse to train with another number of processes",
        json_schema_extra=UNTRACKED,
    )

    @property
    def is_delegated(self) -> bool:
        """Whether another backend trains."""
        return False

    @property
    def required_world_size(self) -> int | None:
        """The number of processes that must train; None: any."""
        return self.expected_world_size

    @property
    def optimization(self) -> Optimization:
        """The options of the optimizer alone."""
        values = {field.name: getattr(self, field.name) for field in fields(Optimization)}
        return Optimization(**values)

    @property
    def model_options(self) -> dict[str, Any]:
        """The options of `MODEL_OPTIONS` that are flags of the stage."""
        # A stage whose `flags` leave an option out uses the model's own default.
        return {name: getattr(self, name) for name in MODEL_OPTIONS if name in self.names()}


class PairOptions(TrainerOptions):
    """Options of a stage whose examples are pairs of completions."""

    sequences: ClassVar[int] = 2

    per_device_train_batch_size: int = Field(32, ge=1, description="pairs in a micro-batch")
    gradient_accumulation_steps: int = Field(
        1,
        ge=1,
        description="a step is batch x accumulation x processes pairs",
    )


class ScoringOptions(TrainerOptions):
    """Options of a stage that computes with a model and does not train it."""

    flags: ClassVar[tuple[str, ...]] = (
        "packing",
        "dtype",
        "attn_implementation",
        "device",
        "expected_world_size",
    )
