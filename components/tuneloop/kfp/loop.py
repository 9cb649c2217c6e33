"""A loop as KFP tasks: its iterations in one task, or written out, a task a stage.

KFP cannot leave a loop, hands nothing from one round of a ParallelFor to the next, and Argo, to which it translates,
keeps the state of every task in an object of at most 1 MiB. So one task runs the iterations, and after `per_workflow`
of them the run goes on in another run of KFP: its size is constant, however long the loop is. What follows the loop is
no condition of KFP (a DAG whose last task is left out stays RUNNING in its metadata): those tasks do nothing, by what
the handle of the policy says, while the loop goes on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kfp import dsl

from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.kfp.iterations import get_output_name
from tuneloop.kfp.stage import TARGET
from tuneloop.workflow.loop import Loop, Step, step_of

Steps = Mapping[str, Any]
"""Name of a stage → the function that makes its task."""


def is_written_out(config: LoopPipelineConfig) -> bool:
    """Return whether each stage of each iteration is a task of its own."""
    return config.loop.iterations <= config.kfp.unroll


@dataclass
class LoopTasks:
    """Draws a loop inside a pipeline.

    Attributes:
        shared: parameters of the pipeline that every stage which has them is given: the seed, the URL of weights.
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
        check = self.loop.check
        self.call(check, f"{check.name}-before", self.url, {**self.values, "iteration": 0})
        if is_written_out(self.config):
            self.finish(self.write_out())
            return
        task = self.steps["iterations"](
            "iterations",
            **{"url": self.url, "run_id": dsl.PIPELINE_JOB_ID_PLACEHOLDER, "seed": self.shared["seed"]},
            **{TARGET: self.target, **self.values},
        )
        self.finish({name: task.outputs[get_output_name(name)] for name in self.loop.carry})

    def finish(self, trained: Mapping[str, Any]) -> None:
        """Evaluate the last policy, and make of it what the loop is to."""
        values, check = {**self.values, **trained, "iteration": 0}, self.loop.check
        self.call(check, f"{check.name}-after", self.url, values)
        for step in self.loop.finish:
            self.call(step, step.name, self.url, values)

    def write_out(self) -> dict[str, Any]:
        """Write every iteration out; return what the last one hands on."""
        carried: dict[str, Any] = {}
        every = self.config.loop.evaluate_every
        for i in range(1, self.config.loop.iterations + 1):
            at = f"{self.url}/iterations/{i}"
            values = {**self.values, **carried, "iteration": i}
            carried = self.iterate(values, at)
            if every and i % every == 0:
                self.call(self.loop.check, self.loop.check.name, at, {**values, **carried})
        return carried

    def iterate(self, values: Mapping[str, Any], url: str) -> dict[str, Any]:
        """Make the tasks of one iteration; return what it hands on."""
        known = dict(values)
        for step in self.loop.steps:
            ends_loop = step_of(self.loop.reward) in map(step_of, step.wires.values())
            task = self.call(step, step.name, url, known, **({TARGET: self.target} if ends_loop else {}))
            known |= {f"{step.name}.{name.replace('_', '-')}": output for name, output in task.outputs.items()}
        return {name: known[wire] for name, wire in self.loop.carry.items()}

    def call(self, step: Step, name: str, url: Any, values: Mapping[str, Any], **more: Any) -> Any:
        """Make the task of a step, which commits to `name` below `url`; where the engine is, KFP's stages know."""
        wired = {k: values[wire] for k, wire in step.wires.items() if wire != "endpoint"}
        shared = {k: value for k, value in self.shared.items() if k in step.component.Params.model_fields}
        return self.steps[step.name](name, url=f"{url}/{name}", **wired, **shared, **more)
