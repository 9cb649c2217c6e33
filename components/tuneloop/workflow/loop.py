"""The definition of a pipeline for all engines: its stages, their calls and its loop.

`tuneloop.argo.pipeline` and `tuneloop.kfp.pipeline` draw it; of a `Loop`, `argo/loop.py` and
`kfp/loop.py` draw the iterations, `argo/run_plan.py` plans them, `workflow/pod_loop.py` runs several
in one pod, and `runs/forking.py` reads where one begins. A pipeline with branches or nested loops
writes its graph for the engine itself.

What is added to a `Loop` is added to its plan (`workflow/plan.py: LoopPlan`, made in
`argo/run_plan.py`), to both drawings, and to `workflow/pod_loop.py: PodLoop`, or pods of several
iterations do not know it. Tests: `tests/unit/argo/test_loop.py`,
`tests/unit/local/test_iterations.py`, `tests/golden`.
"""

import copy
import itertools
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import BaseModel

from tuneloop.core.component import Component, Params
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
            if isinstance(settings, Params):
                self.parameters |= settings.to_parameters()
            else:
                self.parameters |= settings.model_dump()
        self.parameters |= parameters
        # Another backend than our own starts the ranks itself, from one process: the stage's
        # parameter `expected_world_size` says how many, and `StagePlan.ranks` reads it.
        if self.parameters.get("backend") not in (None, "native"):
            self.parameters["expected_world_size"] = processes
            self.processes = 1

    def with_shared(self, values: Mapping[str, Any]) -> "StageSpec":
        """Return the stage with additional parameters: those of `values` that it has; others are
        left out."""
        # The stage itself may be drawn for another engine, too.
        spec = copy.copy(self)
        spec.parameters = dict(self.parameters)
        for name in self.accepted(list(values)):
            spec.parameters[name] = values[name]
        return spec

    def accepted(self, names: Sequence[str]) -> list[str]:
        """Return those of `names` that are parameters of the stage."""
        return [name for name in names if name in self.component.Params.model_fields]


class Step:
    """A call of a stage in a loop. It has the name of the stage's template, below which its output
    lies in the iteration: so `Loop.steps` call a stage once at most.

    Args:
        component: the stage.
        optional: the step is left out if it has no `StageSpec`; only for steps of `Loop.finish`.
        wires: an input or parameter → a value of the loop, such as ``policy``, or an earlier
            step's output, such as ``reward.rewards``.

    Raises:
        UserError: a wire leads to nothing that the stage takes, or a required input has none.
    """

    def __init__(self, component: Component, *, optional: bool = False, **wires: str) -> None:
        self.component = component
        self.optional = optional
        self.wires = wires
        self.name = component.template
        self.outputs = [f"{self.name}.{to_kebab_case(component.output)}"]
        self.outputs += [f"{self.name}.{to_kebab_case(result)}" for result in component.results]
        names = list(component.inputs)
        names += component.Params.model_fields
        for name, wire in wires.items():
            if name not in names:
                remedy = f"is not an input or parameter; known: {', '.join(names)}"
                raise UserError(
                    f"{self.name}.{name}",
                    wire,
                    remedy,
                )
        # An optional input has a default, or none is needed.
        for name, required in component.inputs.items():
            if required and name not in wires:
                remedy = "is a required input: say which value it takes"
                raise UserError(f"{self.name}.{name}", None, remedy)


@dataclass(frozen=True)
class Loop:
    """Steps that are repeated, one after another: the last one trains, those before it make its
    batch.

    A value is a name that wires use: those of `carry` and `constants`, and ``iteration`` and
    ``endpoint``, which every loop has.

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
        # A step sees the outputs of those before it.
        values = set(self.inputs)
        for step in self.steps:
            if step.optional:
                remedy = "only a step of `finish` may be optional: leave it out of `steps`"
                raise UserError("loop.steps", step.name, remedy)
            self._check_wires(
                f"loop.steps.{step.name}",
                step.wires.values(),
                values,
            )
            values.update(step.outputs)
        self._check_wires("loop.carry", self.carry.values(), values)
        self._check_wires("loop.reward", [self.reward], values)
        # The steps after the loop see no output of its steps, only the values that it ends with.
        values = set(self.inputs)
        for step in self.last_steps:
            self._check_wires(
                f"loop.{step.name}",
                step.wires.values(),
                values,
            )
            values.update(step.outputs)

    def _check_wires(
        self,
        field: str,
        wires: Iterable[str],
        values: set[str],
    ) -> None:
        """Raise UserError for a wire that leads to none of these values."""
        for wire in wires:
            if wire not in values:
                remedy = f"no value has this name; known here: {', '.join(sorted(values))}"
                raise UserError(field, wire, remedy)

    def check_specs(self, specs: Sequence[StageSpec]) -> None:
        """Check that every step that is not optional has a `StageSpec`. Raises UserError at one
        that has none.
        """
        described = {spec.component.template for spec in specs}
        for step in itertools.chain(self.steps, self.last_steps):
            if step.name not in described and not step.optional:
                remedy = "is a step of the loop and has no StageSpec: add one"
                raise UserError("stages", step.name, remedy)

    @property
    def passed(self) -> tuple[str, ...]:
        """The values that an iteration starts from."""
        return tuple(itertools.chain(["iteration"], self.carry, self.constants))

    @property
    def inputs(self) -> tuple[str, ...]:
        """The values that an iteration starts from, and the endpoint of the rollout server."""
        return tuple(itertools.chain(self.passed, ["endpoint"]))

    @property
    def outputs(self) -> tuple[str, ...]:
        """The values that the loop ends with."""
        return tuple(itertools.chain(self.carry, ["iteration", output_of(self.reward)]))

    @property
    def pod_outputs(self) -> tuple[str, ...]:
        """The values that several iterations in one pod end with."""
        return tuple(itertools.chain(["iteration"], self.carry, [output_of(self.reward)]))

    @property
    def trainer(self) -> Step:
        """The last step."""
        return self.steps[-1]

    @property
    def last_steps(self) -> list[Step]:
        """The steps after the loop."""
        steps = [self.check]
        steps += self.finish
        return steps

    @property
    def batch(self) -> Sequence[Step]:
        """The steps before the last."""
        return self.steps[:-1]

    @property
    def batch_wires(self) -> list[str]:
        """The wires to outputs of earlier steps that the last step takes, and that of `reward`."""
        wires = itertools.chain(self.trainer.wires.values(), [self.reward])
        return [wire for wire in wires if "." in wire]

    def values_of(self, steps: Sequence[Step]) -> list[str]:
        """Return the loop's values that `steps` take, in the order in which they are first
        taken.
        """
        values: list[str] = []
        for step in steps:
            for wire in step.wires.values():
                # An output of another step is no value of the loop.
                if "." not in wire and wire not in values:
                    values.append(wire)
        return values


def step_of(wire: str) -> str:
    """Return the step that a wire leads to: ``reward`` of ``reward.rewards``."""
    return wire.partition(".")[0]


def output_of(wire: str) -> str:
    """Return the name of the output that a wire leads to: ``rewards`` of ``reward.rewards``."""
    return wire.partition(".")[2]


def check_drawing(
    component: Component,
    name: str,
    described: Container[str],
    drawn: Container[str],
) -> None:
    """Check a stage that a pipeline draws.

    Args:
        component: the stage.
        name: the name under which it is drawn.
        described: the stages that have a `StageSpec`.
        drawn: the names under which stages were drawn before.

    Raises:
        UserError: the stage is not described, or the name is taken.
    """
    if component.template not in described:
        remedy = "is drawn, and `stages` has no StageSpec of it: add one"
        raise UserError("stages", component.template, remedy)
    # A stage commits below its name: two would commit to the same place.
    if name in drawn:
        remedy = "is the name of two stages that are drawn: give one of them another name"
        raise UserError("stages", name, remedy)


class Outputs:
    """The outputs of a task, each an attribute: ``data.prompts``; `read` looks one up by name."""

    def __init__(
        self,
        read: Callable[[str], Any],
    ) -> None:
        self._read = read

    def __getattr__(self, name: str) -> Any:
        return self._read(name)


class Graph(Protocol):
    """The methods by which a pipeline draws itself for an engine, and its configuration: of
    `argo/pipeline.py` and of `kfp/pipeline.py`."""

    config: Any

    def stage(self, component: Component, name: str = "", **inputs: Any) -> Outputs:
        """Call a stage and return its outputs, committed in the run under the task's `name`
        (default: the stage's).
        """

    def loop(self, serve: Any, **values: Any) -> None:
        """Evaluate a policy, run the loop, evaluate and finish. The rollout server boots with the
        checkpoint `serve`, and the first iteration starts from `values`.
        """
