"""A loop as KFP tasks: its iterations in one task, or written out, a task a stage.

KFP cannot leave a loop, hands nothing from one round of a ParallelFor to the next, and Argo, to which it translates,
keeps the state of every task in an object of at most 1 MiB. So one task runs the iterations, and after `per_workflow`
of them the run goes on in another run of KFP: its size is constant, however long the loop is. What follows the loop is
no condition of KFP (a DAG whose last task is left out stays RUNNING in its metadata): those tasks do nothing, by what
the handle of the policy says, while the loop goes on.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kfp import dsl
from kfp.dsl import HTML, Dataset, Markdown, Metrics, Output

from tuneloop.argo.loop import describe_loop, list_roles
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.core.errors import UserError
from tuneloop.kfp import template
from tuneloop.kfp.io import SAME
from tuneloop.kfp.iterations import get_output_name
from tuneloop.kfp.stage import TARGET
from tuneloop.workflow.loop import Loop, StageSpec, Step, output_of, step_of

ABOUT = {
    "url": "of the run: what the iterations make is committed below it",
    "run_id": "KFP's own, of the run that this task belongs to",
    "seed": "every random stream of the run is derived from it",
    TARGET: "rewards of this mean end the loop",
    SAME: "input → the other input that is the same artifact",
}
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


def iterations_step(loop: Loop, specs: Sequence[StageSpec], config: LoopPipelineConfig) -> template.Step:
    """Return the step that runs `tuneloop.kfp.iterations`, and the rollout server beside them. Raises UserError where a
    stage spans several nodes."""
    image = config.cluster.images.format(image="rollout")
    settings, engine = config.loop, config.engine
    if spread := [spec.component.template for spec in specs if spec.nodes > 1]:
        remedy = f"{spread[0]} would have to run inside of a pod: set kfp.unroll to loop.iterations, or this to 1"
        raise UserError("nodes", config.nodes, remedy)
    described = describe_loop(loop, specs, {}, ["seed", *config.published("")], settings.evaluate_every)
    roles, served = list_roles(loop, specs, settings.evaluate_every), engine.name == "vllm"
    server: dict[str, Any] = {"port": engine.port, "engine_args": engine.options, "pull": engine.pull}
    role, cluster = config.cluster.merge_roles(roles, served)
    if served and (own := config.cluster.sampler.gpus):  # the last of the pod's; ranks take the first
        total = cluster.count_gpus(role)
        server["devices"] = ",".join(map(str, range(total - own, total)))
    flags = [
        *("--loop", described.model_dump_json(exclude_defaults=True), "--iterations", str(settings.iterations)),
        *("--per-task", str(settings.per_workflow), "--api", config.kfp.api),
        *("--endpoint", engine.rollout_endpoint_url or ""),
        *(("--weights", engine.weights) if engine.weights else ()),
        *(("--server", json.dumps(server, separators=(",", ":"))) if engine.name == "vllm" else ()),
    ]
    taken = {wire: name for step in loop.steps for name, wire in step.wires.items()}
    types = {name: template.TYPES.get(taken[name], Dataset) for name in (*loop.carry, *loop.constants)}
    shown = {"results": Metrics, "preview": Markdown, "curves": HTML}
    kinds: dict[str, Any] = {
        **{"url": str, "run_id": str, "seed": int, TARGET: float},
        **{get_output_name(name): Output[types[name]] for name in loop.carry},
        **{name: Output[kind] for name, kind in shown.items()},
        "last_iteration": dsl.OutputPath(int),
        output_of(loop.reward).replace("-", "_"): dsl.OutputPath(float),
    }
    signature = template.define_inputs(types, dict.fromkeys(types, True))
    signature |= {name: (kind, template.REQUIRED) for name, kind in kinds.items()}
    command, about = ["python3", "-m", "tuneloop.kfp.iterations"], "Iterations of the loop."
    made = template.define_container_component("iterations", about, signature, ABOUT, image, command, flags)

    def make(**arguments: Any) -> dsl.PipelineTask:  # it goes on from what the run has committed by now
        return made(**template.pass_artifacts_once(arguments, types)).set_caching_options(False)

    return template.make_step(make, image, cluster, config.kfp, role)
