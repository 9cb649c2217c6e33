"""The definition of a pipeline for all engines: its stages, their calls and its loop, which `tuneloop.argo.pipeline`
and `tuneloop.kfp.pipeline` draw. A pipeline with branches or nested loops writes its graph for the engine itself."""

import copy
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.program import to_kebab_case


class StageSpec:
    """A stage of a pipeline, with the parameters that are the same in each of its calls.

    Args:
        settings: the section of the stage.
        trainer: the settings that all stages which train have in common; the stage gets those of
            them that are its parameters, and keeps its own default where one is None.
        processes, nodes: the ranks of torchrun in a pod, and the pods.
        parameters: what the pipeline sets itself.
    """

    def __init__(
        self,
        component: Component,
        settings: BaseModel | None = None,
        *,
        trainer: BaseModel | None = None,
        processes: int = 1,
        nodes: int = 1,
        **parameters: Any,
    ) -> None:
        self.component = component
        self.processes = processes
        self.nodes = nodes
        self.parameters: dict[str, Any] = {}
        if trainer:
            common = trainer.model_dump(exclude_none=True)
            self.parameters |= {name: common[name] for name in self.accepted(list(common))}
        if settings:
            self.parameters |= settings.model_dump()
        self.parameters |= parameters
        if self.parameters.get("backend", "native") not in (None, "native"):
            # Such a backend starts the ranks itself.
            self.parameters["expected_world_size"] = processes
            self.processes = 1

    def with_shared(self, values: Mapping[str, Any]) -> "StageSpec":
        """Return the stage with additional parameters: those of `values` that it has."""
        made = copy.copy(self)
        made.parameters = {
            **self.parameters,
            **{name: values[name] for name in self.accepted(list(values))},
        }
        return made

    def accepted(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that are parameters of the stage."""
        return [name for name in names if name in self.component.Params.model_fields]


class Step:
    """A call of a stage in a loop: `wires` maps an input or parameter to a value of the loop, such as ``policy``, or to
    an earlier step's output, such as ``reward.rewards``. An `optional` step is left out if it has no `StageSpec`."""

    def __init__(self, component: Component, *, optional: bool = False, **wires: str) -> None:
        self.component = component
        self.optional = optional
        self.wires = wires
        self.name = component.template
        self.outputs = [
            f"{self.name}.{to_kebab_case(each)}" for each in (component.output, *component.results)
        ]
        known = [*component.inputs, *component.Params.model_fields]
        for name, wire in wires.items():
            if name not in known:
                raise UserError(
                    f"{self.name}.{name}",
                    wire,
                    f"is not an input or parameter; known: {', '.join(known)}",
                )
        for name, required in component.inputs.items():
            if required and name not in wires:
                raise UserError(
                    f"{self.name}.{name}", None, "is a required input: say which value it takes"
                )


@dataclass(frozen=True)
class Loop:
    """Steps that are repeated, one after another: the last one trains, those before it make its batch.

    Attributes:
        carry: value → the output that it takes in the next iteration.
        constants: values that stay the same.
        reward: the output that ends the loop once it reaches ``target-reward``.
        check: evaluates a policy: before the loop, after it, and every so many iterations.
        finish: steps with the last policy and its evaluation; some of them may be optional.
    """

    steps: Sequence[Step]
    carry: Mapping[str, str]
    constants: Sequence[str]
    reward: str
    check: Step
    finish: Sequence[Step]

    def __post_init__(self) -> None:
        known = {*self.inputs}
        for step in self.steps:
            self._check(f"loop.steps.{step.name}", step.wires.values(), known)
            known |= {*step.outputs}
        ended = {*self.inputs}
        for step in (self.check, *self.finish):
            self._check(f"loop.{step.name}", step.wires.values(), ended)
            ended |= {*step.outputs}
        self._check("loop.carry", self.carry.values(), known)
        self._check("loop.reward", [self.reward], known)

    def _check(self, field: str, wires: Iterable[str], known: set[str]) -> None:
        for wire in wires:
            if wire not in known:
                raise UserError(
                    field, wire, f"no value has this name; known here: {', '.join(sorted(known))}"
                )

    def check_specs(self, specs: Sequence[StageSpec]) -> None:
        """Check that every step that is not optional has a `StageSpec`. Raises UserError at one that has none."""
        described = {spec.component.template for spec in specs}
        for step in (*self.steps, self.check, *self.finish):
            if step.name not in described and not step.optional:
                raise UserError(
                    "stages", step.name, "is a step of the loop and has no StageSpec: add one"
                )

    @property
    def passed(self) -> tuple[str, ...]:
        """The values that an iteration starts from."""
        return ("iteration", *self.carry, *self.constants)

    @property
    def inputs(self) -> tuple[str, ...]:
        """The values that an iteration starts from, and the endpoint of the rollout server."""
        return (*self.passed, "endpoint")

    @property
    def outputs(self) -> tuple[str, ...]:
        """The values that the loop ends with."""
        return (*self.carry, "iteration", output_of(self.reward))

    @property
    def pod_outputs(self) -> tuple[str, ...]:
        """The values that several iterations in one pod end with."""
        return ("iteration", *self.carry, output_of(self.reward))

    @property
    def trainer(self) -> Step:
        """The last step."""
        return self.steps[-1]

    @property
    def batch(self) -> Sequence[Step]:
        """The steps before the last."""
        return self.steps[:-1]

    @property
    def batch_wires(self) -> list[str]:
        """The outputs of earlier steps that the last step and the loop need."""
        return [wire for wire in (*self.trainer.wires.values(), self.reward) if "." in wire]

    def values_of(self, steps: Sequence[Step]) -> list[str]:
        """Return the loop's values that `steps` take, in the order in which they are first taken."""
        return list(
            dict.fromkeys(wire for step in steps for wire in step.wires.values() if "." not in wire)
        )


def step_of(wire: str) -> str:
    """Return the step whose output a wire such as ``reward.rewards`` is."""
    return wire.partition(".")[0]


def output_of(wire: str) -> str:
    """Return the output that a wire such as ``reward.rewards`` is."""
    return wire.partition(".")[2]


def check_drawing(
    component: Component, name: str, described: Container[str], drawn: Container[str]
) -> None:
    """Check that a stage which a pipeline draws under `name` is one of the `described` ones, and has this name alone
    among those that were `drawn` before. Raises UserError."""
    if component.template not in described:
        remedy = "is drawn, and `stages` has no StageSpec of it: add one"
        raise UserError("stages", component.template, remedy)
    if name in drawn:
        remedy = "is the name of two stages that are drawn: give one of them another name"
        raise UserError("stages", name, remedy)


class Outputs:
    """The outputs of a task, each an attribute: ``data.prompts``; `read` looks one up by name."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return self._read(name)


class Graph(Protocol):
    """The methods by which a pipeline draws itself for an engine, and its configuration."""

    config: Any

    def stage(self, component: Component, name: str = "", **inputs: Any) -> Outputs:
        """Call a stage and return its outputs, committed in the run under the task's `name` (default: the stage's)."""

    def loop(self, serve: Any, **values: Any) -> None:
        """Evaluate a policy, run the loop, evaluate and finish. The rollout server boots with the checkpoint `serve`,
        and the first iteration starts from `values`."""
