"""A pipeline for Kubeflow Pipelines: a component for each of its stages, and the graph that calls
them.

A loop is one task; a short loop can be unrolled, with one task for each stage. KFP cannot leave a
loop early, passes no values from one iteration of a ParallelFor to the next, and compiles to Argo,
which keeps the state of all tasks in an object of at most 1 MiB. So one task runs the iterations,
and after `per_workflow` of them another run of KFP continues: its size does not grow with the loop.
The tasks after the loop have no condition of KFP (a DAG whose last task is skipped stays RUNNING in
its metadata): until the loop has ended, a mark of the policy's handle (`CONTINUED` of
`kfp/stage.py`) tells them to do nothing.

`kfp/loop.py` draws the loop. Its words (step, wire, carry, check) are those of `workflow/loop.py`.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from kfp import dsl
from kfp.dsl import HTML, Input, Metrics, Model, Output

from tuneloop.config.pipeline import RUN_SETTINGS
from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kfp import template
from tuneloop.kfp.loop import (
    LoopTasks,
    Steps,
    is_written_out,
    iterations_step,
    select_parameters,
)
from tuneloop.kfp.stage import TARGET
from tuneloop.kfp.template import REQUIRED, Signature, define_uncached_step, stage_step
from tuneloop.workflow.loop import Graph, Loop, Outputs, StageSpec, check_drawing

DESCRIPTIONS = {
    "store": "URL of the store, as pods reach it: s3://bucket/prefix",
    "run": "name of the run; its artifacts lie at store/run, and the same name again resumes it",
    TARGET: "the loop ends once a batch of rollouts earns this mean reward",
}
"""Parameter of a pipeline → description; `RUN_SETTINGS` have their own."""


def build_pipeline(
    name: str,
    config: Any,
    specs: Sequence[StageSpec],
    draw: Callable[[Graph], None],
    loop: Loop | None = None,
) -> Any:
    """Build a pipeline for KFP's compiler.

    Args:
        name: of the pipeline.
        config: its settings.
        specs: its stages.
        draw: calls them; its docstring is the pipeline's description.
        loop: what `draw` calls as the loop.

    Raises:
        UserError: Kubeflow Pipelines do not support a setting, or a step of the loop is not among
            the stages.
    """
    steps = build_steps(name, config, specs, loop)
    signature: Signature = {
        "store": (str, REQUIRED),
        "run": (str, name),
    }
    signature |= template.define_run_settings(config)
    if loop:
        signature[TARGET] = (float, config.loop.ending_reward)

    def create_tasks(*values: Any) -> None:
        arguments = dict(zip(signature, values))
        run = arguments["run"]
        store = arguments["store"]
        # The report is written however the run ends.
        with dsl.ExitHandler(steps["report"]("report", run=run, store=store)):
            draw(Tasks(config, steps, loop, f"{store}/{run}", arguments))

    summary = inspect.getdoc(draw) or ""
    descriptions = DESCRIPTIONS | template.describe_run_settings(config)
    template.set_interface(create_tasks, summary, signature, descriptions)
    # kfp would read a file whose pipeline has a component's name as that component.
    pipeline_name = f"{name}-pipeline" if name in steps else name
    return dsl.pipeline(name=pipeline_name)(create_tasks)


def build_steps(
    pipeline: str, config: Any, specs: Sequence[StageSpec], loop: Loop | None
) -> JsonObject:
    """Return name → the function that creates a stage's task."""
    cluster = config.cluster
    kfp = config.kfp
    # Parameters that the graph passes to every stage that has them; here only their names matter.
    dynamic = list(config.run_parameters(""))
    shared_constants: JsonObject = {}
    if loop:
        loop.check_specs(specs)
        _refuse_unsupported_settings(config)
        shared_constants["endpoint"] = config.engine.endpoint_url or None
        dynamic.append("iteration")
    report = define_uncached_step(
        "report",
        "Report on a run, however it ended.",
        {"run": str, "store": str, "report": Output[HTML], "rewards": Output[Metrics]},
        {"run": "name of the run", "store": "URL of the store"},
        cluster,
        kfp,
    )
    steps: JsonObject = {"report": report}
    for spec in specs:
        steps[spec.component.template] = stage_step(
            spec.with_shared(shared_constants),
            dynamic=spec.accepted(dynamic),
            cluster=cluster,
            kfp=kfp,
        )
    if loop and not is_written_out(config):
        steps["iterations"] = iterations_step(loop, specs, config)
    if kfp.model_registry:
        _register_exports(steps, pipeline, specs, config)
    return steps


def _refuse_unsupported_settings(config: Any) -> None:
    """Raise UserError for a setting of a loop that Kubeflow Pipelines do not support."""
    # Not every loop has a section for the deployment.
    unsupported: JsonObject = {
        "loop.asynchronous": config.loop.asynchronous,
        "deploy": getattr(config, "deploy", None),
    }
    server = config.engine.server
    if server:
        for name, value in server.local_settings.items():
            unsupported[f"engine.{name}"] = value
        if server.replicas > 1:
            unsupported["engine.replicas"] = server.replicas
    for name, value in unsupported.items():
        if value:
            remedy = "is built for Argo and for one machine: leave it out here"
            raise UserError(name, value, remedy)


def _register_exports(
    steps: JsonObject, pipeline: str, specs: Sequence[StageSpec], config: Any
) -> None:
    """Add a registration after each task whose stage exports a model."""
    register = define_uncached_step(
        "register",
        "Register the exported model.",
        {
            "model": Input[Model],
            "registry": str,
            "model_name": str,
            "model_version": dsl.OutputPath(str),
        },
        {"registry": "address of the registry", "model_name": "of the registered model"},
        config.cluster,
        config.kfp,
    )

    def add_registration(export: template.Step, output: str) -> template.Step:
        def step(name: str, **arguments: Any) -> dsl.PipelineTask:
            task = export(name, **arguments)
            register(
                f"register-{name}",
                model=task.outputs[output],
                registry=config.kfp.model_registry,
                model_name=pipeline,
            )
            return task

        return step

    for spec in specs:
        stage = spec.component
        if stage.kind == "model":
            steps[stage.template] = add_registration(steps[stage.template], stage.output)


class Tasks:
    """Draws the stages of a pipeline as tasks of the enclosing KFP pipeline."""

    def __init__(
        self, config: Any, steps: Steps, loop: Loop | None, url: str, arguments: JsonMapping
    ) -> None:
        """Prepare to draw.

        Args:
            config: settings of the pipeline.
            steps: create the tasks.
            loop: what `loop` draws.
            url: of the run, which has placeholders for the pipeline's arguments.
            arguments: of the pipeline, as placeholders.
        """
        self.config = config
        self._steps = steps
        self._loop = loop
        self._url = url
        # The settings are what the user of the compiled pipeline asks for.
        self._shared: JsonObject = {name: arguments[name] for name in RUN_SETTINGS}
        self._shared |= config.published(url)
        self._target_reward = arguments.get(TARGET)
        self._names: set[str] = set()

    def stage(self, component: Component, name: str = "", **inputs: Any) -> Outputs:
        """Create the task of a stage, as `Graph.stage` describes."""
        name = name or component.template
        check_drawing(component, name, self._steps, self._names)
        self._names.add(name)
        shared = select_parameters(component, self._shared)
        step = self._steps[component.template]
        task = step(name, url=f"{self._url}/{name}", **inputs, **shared)
        return Outputs(lambda output: task.outputs[output])

    def loop(self, serve: Any, **values: Any) -> None:
        """Create the tasks of the loop, as `Graph.loop` describes."""
        assert self._loop, "the pipeline is built with its loop"
        # `serve` is not used: the task of the iterations runs the server itself, and boots it with
        # the policy of its first iteration.
        tasks = LoopTasks(
            loop=self._loop,
            steps=self._steps,
            config=self.config,
            url=self._url,
            shared=self._shared,
            target_reward=self._target_reward,
            values=values,
        )
        tasks.draw()
