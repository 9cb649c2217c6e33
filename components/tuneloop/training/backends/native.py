"""tuneloop's own training stages, as a job of their own (`extensions/trainers/trainjob.py`).

A pipeline does not use it: there the stage runs in its pod. So ``backend: native`` in settings
means no backend, and never gets here (`training/delegation.py: _check_backend`).
"""

from dataclasses import dataclass

from tuneloop.core import plugins
from tuneloop.core.component import TORCHRUN, Component
from tuneloop.core.errors import UserError
from tuneloop.core.program import encode_flags
from tuneloop.training.backends import LLMBackend, register_backend


@register_backend("native")
@dataclass(frozen=True, kw_only=True)
class Native(LLMBackend):
    """A stage under torchrun, with FSDP2.

    Its `args` are references of the stage's inputs, the URL of its output, and its parameters, all
    in snake_case.

    Attributes:
        stage: name of a stage in `tuneloop.stages`. `validate` takes every stage with the parameter
            `expected_world_size`; those that only score have it, too.
    """

    stage: str = "sft"

    def framework(self) -> str:
        """Return the framework of Kubeflow Trainer's runtime for torchrun."""
        return "torch"

    def to_command(self) -> list[str]:
        """Return torchrun with the stage's module."""
        return [*TORCHRUN, "-m", f"tuneloop.stages.{self.stage}"]

    def to_args(self) -> list[str]:
        """Return the stage's flags, with the number of processes that must train."""
        parameters = dict(self.args)
        # A launcher that starts fewer is an error, and not a slower run with another batch.
        parameters["expected_world_size"] = self.nodes * self.processes
        return encode_flags(parameters)

    def validate(self) -> None:
        """Check the stage, that its inputs and output are given, and its parameters."""
        component: Component = plugins.load_variant(
            "stages", f"tuneloop.stages.{self.stage}:{self.stage}"
        )
        if "expected_world_size" not in component.Params.model_fields:
            raise UserError("stage", self.stage, "is not a stage that trains; name one, as sft")
        required_inputs = [name for name, is_required in component.inputs.items() if is_required]
        self.require(*required_inputs, component.output)
        # The artifacts' references are flags, too, but no parameters.
        artifacts = set(component.inputs) | {component.output}
        parameters = {name: value for name, value in self.args.items() if name not in artifacts}
        component.validate(parameters)
