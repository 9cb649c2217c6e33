"""What a pipeline says of itself once, for every engine: its stages, how one calls the other, and what is repeated.

`tuneloop.argo.pipeline` draws it as a Workflow and `tuneloop.kfp.pipeline` as a KFP pipeline, each in its own terms.
There are no branches and no loops in loops: a pipeline that needs them writes its graph for the engine itself.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.program import to_kebab_case


class StageSpec:
    """A stage of a pipeline, with the parameters that are the same in each of its calls."""

    def __init__(
        self,
        component: Component,
        settings: BaseModel | None = None,
        *,
        processes: int = 1,
        nodes: int = 1,
        **parameters: Any,
    ) -> None:
        self.component, self.processes, self.nodes = component, processes, nodes
        self.parameters = {**(settings.model_dump() if settings else {}), **parameters}
        if self.parameters.get("backend", "native") not in (None, "native"):  # which starts the ranks itself
            self.parameters["expected_world_size"], self.processes = processes, 1

    def with_shared(self, values: Mapping[str, Any]) -> "StageSpec":
        """Return the stage with those of `values` besides that are parameters of it."""
        made = copy.copy(self)
        made.parameters = {**self.parameters, **{name: values[name] for name in self.accepted(list(values))}}
        return made

    def accepted(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that are parameters of the stage."""
        return [name for name in names if name in self.component.Params.model_fields]


class Step:
    """A call of a stage in a loop: input or parameter → the value it takes.

    A value is one of the loop (``policy``, ``iteration``), or an output of a step before (``reward.rewards``), one of
    its `outputs`. A step that is `optional` is left out of a pipeline that has no `StageSpec` for it.
    """

    def __init__(self, component: Component, *, optional: bool = False, **wires: str) -> None:
        self.component, self.optional, self.wires, self.name = component, optional, wires, component.template
        self.outputs = [f"{self.name}.{to_kebab_case(each)}" for each in (component.output, *component.results)]
        known = [*component.inputs, *component.Params.model_fields]
        for name, wire in wires.items():
            if name not in known:
                raise UserError(f"{self.name}.{name}", wire, f"is not an input or parameter; known: {', '.join(known)}")
        for name, required in component.inputs.items():
            if required and name not in wires:
                raise UserError(f"{self.name}.{name}", None, "is a required input: say which value it takes")


@dataclass(frozen=True)
class Loop:
    """Steps that are repeated, one after another.

    Attributes:
        steps: the last one trains; those before it make the batch that it learns from.
        carry: value → the output that it takes in the next iteration.
        constants: values that stay the same.
        reward: the output that ends the loop once it reaches ``target-reward``.
        check: how a policy is evaluated: before the loop, after it, and each so many iterations.
        finish: what is made of the last policy, and of what it was evaluated as; of these steps some may be optional.
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
                raise UserError(field, wire, f"no value has this name; known here: {', '.join(sorted(known))}")

    def check_specs(self, specs: Sequence[StageSpec]) -> None:
        """Check that the stage of every step has its parameters. Raises UserError with the name of a step whose stage
        has no `StageSpec`."""
        described = {spec.component.template for spec in specs}
        for step in (*self.steps, self.check, *self.finish):
            if step.name not in described and not step.optional:
                raise UserError("stages", step.name, "is a step of the loop and has no StageSpec: add one")

    @property
    def passed(self) -> tuple[str, ...]:
        """What an iteration starts from."""
        return ("iteration", *self.carry, *self.constants)

    @property
    def inputs(self) -> tuple[str, ...]:
        """What an iteration starts from, and where the rollout server is."""
        return (*self.passed, "endpoint")

    @property
    def outputs(self) -> tuple[str, ...]:
        """What the loop ends with."""
        return (*self.carry, "iteration", output_of(self.reward))

    @property
    def pod_outputs(self) -> tuple[str, ...]:
        """What several iterations in one pod end with."""
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
        """What the last step, and the loop, need of the steps before."""
        return [wire for wire in (*self.trainer.wires.values(), self.reward) if "." in wire]

    def values_of(self, steps: Sequence[Step]) -> list[str]:
        """Return the loop's values that `steps` take, in the order in which they are first taken."""
        return list(dict.fromkeys(wire for step in steps for wire in step.wires.values() if "." not in wire))


def step_of(wire: str) -> str:
    """Return the step whose output a wire such as ``reward.rewards`` is."""
    return wire.partition(".")[0]


def output_of(wire: str) -> str:
    """Return the output that a wire such as ``reward.rewards`` is."""
    return wire.partition(".")[2]


class Outputs:
    """The outputs of a task, each an attribute: ``data.prompts``; `read` gives the one of a name."""

    def __init__(self, read: Callable[[str], Any]) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return self._read(name)


class Graph(Protocol):
    """What an engine gives a pipeline to draw itself with, and its configuration."""

    config: Any

    def stage(self, component: Component, name: str = "", **inputs: Any) -> Outputs:
        """Call a stage, and return its outputs. `name` is the task's, and where its output is committed in the run;
        without one it is the stage's own."""

    def loop(self, serve: Any, **values: Any) -> None:
        """Evaluate a policy, run the loop, evaluate and finish.

        Args:
            serve: the checkpoint that the rollout server boots with.
            values: what the first iteration starts from.
        """
