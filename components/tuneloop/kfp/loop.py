"""A loop as KFP tasks: written out if it is short, else a ParallelFor over committed state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kfp import dsl

from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.kfp.stage import TARGET
from tuneloop.workflow.loop import Loop, Step, output_of, step_of

Steps = Mapping[str, Any]
"""Name of a stage → the function that makes its task."""


@dataclass
class LoopTasks:
    """Draws a loop inside a pipeline.

    Attributes:
        url: of the run.
        shared: parameters of the pipeline that every stage which has them is given: the seed, the URL of weights.
        target: the mean reward that ends the loop.
        values: artifacts that the first iteration starts from.
    """

    loop: Loop
    steps: Steps
    config: LoopPipelineConfig
    url: Any
    shared: Mapping[str, Any]
    target: Any
    values: Mapping[str, Any]

    def draw(self) -> None:
        """Evaluate the policy, run the loop, evaluate and finish."""
        check = self.loop.check.name
        self.call(self.loop.check, f"{check}-before", self.url, {**self.values, "iteration": 0})
        settings = self.config
        stride = settings.loop.iterations_per_pod or 1
        rounds = range(1, settings.loop.iterations + 1, stride)
        # A pod of several iterations evaluates by itself.
        every = 0 if settings.loop.iterations_per_pod else settings.loop.evaluate_every
        written_out = len(rounds) <= settings.kfp.unroll
        trained = self.write_out(rounds, every) if written_out else self.repeat(stride, every)
        self.call(self.loop.check, f"{check}-after", self.url, {**self.values, **trained, "iteration": 0})
        for step in self.loop.finish:
            self.call(step, step.name, self.url, {**self.values, **trained})

    def write_out(self, rounds: range, every: int) -> dict[str, Any]:
        """Write every iteration out; return what the last one hands on."""
        carried: dict[str, Any] = {}
        for i in rounds:
            at = f"{self.url}/iterations/{i}"
            values = {**self.values, **carried, "iteration": i}
            _, carried = self.iterate(values, at)
            if every and i % every == 0:
                self.call(self.loop.check, self.loop.check.name, at, {**values, **carried})
        return carried

    def repeat(self, stride: int, every: int) -> dict[str, Any]:
        """Repeat the iterations that are not committed yet, one after the other; return what the last one hands on."""
        (policy,) = self.loop.carry
        asked = {
            **{"policy": self.values[policy], "run": self.url, "iterations": self.config.loop.iterations},
            **{"evaluate_every": every, TARGET: self.target, "stride": stride},
        }
        position = self.steps["position"]
        plan = position("plan", iteration=0, **asked)
        with dsl.ParallelFor(plan.outputs["todo"], parallelism=1) as i:
            start = position("turn", iteration=i, **asked)
            at = start.outputs["at"]  # made there: a number of KFP's becomes 1 in one text, and 1.0 in another
            values = {**self.values, policy: start.outputs["start"], "iteration": i}
            task, carried = self.iterate(values, at)
            if every:
                with dsl.If(start.outputs["evaluate"] == True):  # noqa: E712 - kfp reads the comparison
                    self.call(self.loop.check, self.loop.check.name, at, {**values, **carried})
        last = position("last", iteration=0, **asked).after(task)
        return {policy: last.outputs["start"]}

    def iterate(self, values: Mapping[str, Any], url: Any) -> tuple[Any, dict[str, Any]]:
        """Make the tasks of one iteration, or the one of several in a pod; return the last, and what it hands on."""
        if self.config.loop.iterations_per_pod:
            given = {name: values[name] for name in self.loop.passed}
            task = self.steps["iterations"](
                "iterations", url=self.url, seed=self.shared["seed"], **{TARGET: self.target}, **given
            )
            return task, {name: task.outputs[output_of(wire)] for name, wire in self.loop.carry.items()}
        known = dict(values)
        for step in self.loop.steps:
            ends_loop = step_of(self.loop.reward) in map(step_of, step.wires.values())
            task = self.call(step, step.name, url, known, **({TARGET: self.target} if ends_loop else {}))
            known |= {f"{step.name}.{name.replace('_', '-')}": output for name, output in task.outputs.items()}
        return task, {name: known[wire] for name, wire in self.loop.carry.items()}

    def call(self, step: Step, name: str, url: Any, values: Mapping[str, Any], **more: Any) -> Any:
        """Make the task of a step, which commits to `name` below `url`; where the engine is, KFP's stages know."""
        wired = {k: values[wire] for k, wire in step.wires.items() if wire != "endpoint"}
        shared = {k: value for k, value in self.shared.items() if k in step.component.Params.model_fields}
        return self.steps[step.name](name, url=f"{url}/{name}", **wired, **shared, **more)
