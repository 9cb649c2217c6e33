"""What describes model and device of all stages that train: the section ``trainer``.

How much an optimizer does (learning rate, steps, epochs) differs between stages and stays in their
own sections. The stages declare these parameters (`tuneloop.training.options`); here they are
collected once, and a pipeline gives them to its `StageSpec`, which passes each to a stage that has
it. So a name that no stage has changes nothing, without a word. `training/options.py` says in which
further places a new one has to be named.
"""

from typing import Any

from pydantic import Field, create_model

from tuneloop.config.followed import SECTION_SUFFIX
from tuneloop.config.pipeline import SET_BY_PIPELINE
from tuneloop.core.component import Params
from tuneloop.training.options import ADAM_BETA2_TEXT, TrainerOptions

TRAINER_SETTINGS = (
    "dtype",
    "lora",
    "per_device_train_batch_size",
    "gradient_checkpointing",
    "attn_implementation",
    "packing",
    "torch_compile",
    "use_liger_kernel",
    "cpu_offload",
    "save_dtype",
    "device",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "max_grad_norm",
)
"""The parameters of stages that train, or score with the policy, that are set in the section
``trainer`` for all of them."""
SET_FOR_TRAINERS = SET_BY_PIPELINE.union(TRAINER_SETTINGS)
"""Parameters of stages that train that are in no section of their own: a pipeline gives them, or the
section ``trainer``."""
MICRO_BATCH = Field(
    None,
    ge=1,
    description="examples of a stage that a process computes at once; none: 32 demonstrations or "
    "pairs, 128 rollouts",
)
"""The numbers are the defaults of the stages (`tuneloop.training.options`). `config/rules.py` has them,
too, to know which values may be replaced."""
ADAM_BETA2 = Field(
    None,
    ge=0,
    lt=1,
    description=f"{ADAM_BETA2_TEXT}; none: 0.95 for sft, 0.99 else",
)


def make_trainer_config() -> Any:
    """Make the class of the section from the fields that the stages declare."""
    fields: dict[str, Any] = {}
    for name in TRAINER_SETTINGS:
        field = TrainerOptions.model_fields[name]
        fields[name] = (field.annotation, field)
    # The default differs between stages, so it is null here: `StageSpec` passes no null to a stage,
    # which then uses its own default.
    fields["adam_beta2"] = (float | None, ADAM_BETA2)
    fields["per_device_train_batch_size"] = (int | None, MICRO_BATCH)
    summary = "Model and device of the stages that train."
    # `followed.is_section_of`, `planning/limits.py` and `listing.py` find the section by this name.
    return create_model(f"trainer{SECTION_SUFFIX}", __base__=Params, __doc__=summary, **fields)


TrainerConfig = make_trainer_config()
