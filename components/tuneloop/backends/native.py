"""tuneloop's own stages that train."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuneloop.backends import LLMBackend, _word, register
from tuneloop.errors import UserError

if TYPE_CHECKING:
    from tuneloop.component import Component

STAGES = ("sft", "policy_update")


@register("native")
@dataclass(frozen=True, kw_only=True)
class Native(LLMBackend):
    """A stage under torchrun, with FSDP2.

    Attributes:
        stage: its name.
        args: its input references, the URL of its output, and its parameters, in snake_case.
    """

    stage: str = "sft"

    def framework(self) -> str:
        return "torch"

    def to_command(self) -> list[str]:
        return ["python", "-m", "tuneloop.torchrun", "-m", f"tuneloop.{self.stage}"]

    def to_args(self) -> list[str]:
        given = {**self.args, "expected_world_size": self.nodes * self.processes}
        return [word for k, v in given.items() if v is not None for word in (f"--{k.replace('_', '-')}", _word(v))]

    def validate(self) -> None:
        if self.stage not in STAGES:
            raise UserError("stage", self.stage, f"is none that trains; known: {', '.join(STAGES)}")
        module = importlib.import_module(f"tuneloop.{self.stage}")
        component: Component = getattr(module, self.stage)
        self.require(*(name for name, required in component.inputs.items() if required), component.output)
        artifacts = {*component.inputs, component.output}
        component.validate({k: v for k, v in self.args.items() if k not in artifacts})
