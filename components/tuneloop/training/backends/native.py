"""tuneloop's own training stages."""

from dataclasses import dataclass

from tuneloop.core import plugins
from tuneloop.core.component import TORCHRUN, Component
from tuneloop.core.errors import UserError
from tuneloop.core.program import encode_flags
from tuneloop.training.backends import LLMBackend, register_backend


@register_backend("native")
@dataclass(frozen=True, kw_only=True)
class Native(LLMBackend):
    """A stage under torchrun, with FSDP2. `args`: its inputs' references, output URL, parameters, in snake_case."""

    stage: str = "sft"

    def framework(self) -> str:
        return "torch"

    def to_command(self) -> list[str]:
        return [*TORCHRUN, "-m", f"tuneloop.stages.{self.stage}"]

    def to_args(self) -> list[str]:
        return encode_flags({**self.args, "expected_world_size": self.nodes * self.processes})

    def validate(self) -> None:
        component: Component = plugins.load_variant(
            "stages", f"tuneloop.stages.{self.stage}:{self.stage}"
        )
        if "expected_world_size" not in component.Params.model_fields:
            raise UserError("stage", self.stage, "is not a stage that trains; name one, as sft")
        self.require(
            *(name for name, required in component.inputs.items() if required), component.output
        )
        artifacts = {*component.inputs, component.output}
        component.validate({k: v for k, v in self.args.items() if k not in artifacts})
