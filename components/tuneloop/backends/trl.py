"""TRL's trainers, by the modules behind its command line.

``trl sft`` starts ranks by accelerate, which knows nothing of torchrun's ``PET_*`` variables: in a TrainJob every pod
would train alone, at world size 1, and say nothing (kubeflow/trainer#3930). torchrun with the script's module does not.
"""

from __future__ import annotations

from dataclasses import dataclass

from tuneloop.backends import LLMBackend, flags, register
from tuneloop.errors import UserError

TRAINERS = {"sft": (), "dpo": (), "kto": (), "grpo": ("reward_funcs",)}
"""Trainer → options it needs beside those that all do."""


@register("trl")
@dataclass(frozen=True, kw_only=True)
class Trl(LLMBackend):
    """A TRL script under torchrun.

    Attributes:
        trainer: ``sft``, ``dpo``, ``kto`` or ``grpo``.
        args: of its script, ModelConfig and trainer's config, by their own names.
    """

    trainer: str = "sft"

    def framework(self) -> str:
        return "trl"

    def to_command(self) -> list[str]:
        return ["python", "-m", "tuneloop.torchrun", "-m", f"trl.scripts.{self.trainer}"]

    def to_args(self) -> list[str]:
        return flags(self.args)

    def validate(self) -> None:
        if self.trainer not in TRAINERS:
            raise UserError("trainer", self.trainer, f"is none of TRL's scripts known here: {', '.join(TRAINERS)}")
        self.require("model_name_or_path", "dataset_name", "output_dir", *TRAINERS[self.trainer])
