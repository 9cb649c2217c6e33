"""A pipeline as an Argo Workflow: a template for each of its stages, and the graph `main` that calls them."""

from collections.abc import Callable, Sequence
from typing import Any

from hera.workflows import DAG, NodeNameConflict, Workflow

from tuneloop.argo.loop import (
    Templates,
    build_loop,
    build_part,
    build_pods,
    call_loop,
    iterations_template,
)
from tuneloop.argo.resize import resize_while_asleep
from tuneloop.argo.tasks import RUN, Output
from tuneloop.argo.template import define_workflow, server_template, stage_template
from tuneloop.config.loop import LoopConfig
from tuneloop.config.pipeline import PipelineConfig
from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.program import to_kebab_case
from tuneloop.workflow.loop import Graph, Loop, Outputs, StageSpec, check_drawing


def build_workflow(
    name: str,
    config: Any,
    specs: Sequence[StageSpec],
    draw: Callable[[Graph], None],
    loop: Loop | None = None,
) -> Workflow:
    """Return a pipeline as a Workflow; `draw` calls its stages, and `loop`. `config` is a `PipelineConfig`, with a loop
    a `LoopPipelineConfig`. Raises UserError at a step of the loop that is not among the stages."""
    if loop:
        loop.check_specs(specs)
    limits = read_limits(config.loop) if loop else {}
    with define_workflow(name, limits, cluster=config.cluster) as built:
        templates = build_templates(config, specs, loop)
        if loop:
            templates["part"] = build_part(loop, templates, config)
        try:
            with DAG(name="main"):
                draw(Tasks(config, templates, loop))
        except NodeNameConflict as error:  # with a task that the loop draws itself
            taken = str(error).rpartition(": ")[2]
            remedy = "is the name of two stages that are drawn: give one of them another name"
            raise UserError("stages", taken, remedy) from None
    return built


def read_limits(loop: LoopConfig) -> JsonObject:
    """Return the settings of a loop that are parameters of its workflow."""
    return {
        "iterations": loop.iterations,
        "per_workflow": loop.per_workflow,
        "target_reward": loop.ending_reward,
    }


def build_templates(config: Any, specs: Sequence[StageSpec], loop: Loop | None) -> JsonObject:
    """Build the templates: each stage, the rollout server before the loop's stages, and the loop after them."""
    made: JsonObject = {}
    described = {spec.component.template: spec for spec in specs}
    repeated = [step.component for step in loop.steps] if loop else []
    per_pod = config.iterations_per_pod if loop else 0
    for spec in specs:
        server = config.engine.server if loop else None
        if server and spec.component is repeated[0]:
            made["serve"] = server_template(
                server.port,
                server.options,
                config.cluster,
                several=server.replicas > 1,
                **config.published(RUN),
            )
            if server.asleep:
                resize_while_asleep(made["serve"], server.asleep.requests)
        if not (per_pod and spec.component in repeated) and spec.component.template not in made:
            made[spec.component.template] = template_of(spec, config, loop)
        if loop and spec.component is repeated[-1]:
            for step in (loop.check, *(() if per_pod else loop.steps)):
                if step.name not in made:  # `specs` has it after the last step
                    made[step.name] = template_of(described[step.name], config, loop)
            pod = iterations_template(loop, specs, config) if per_pod else None
            made["loop"] = build_pods(loop, pod) if pod else build_loop(loop, made, config)
    return made


def template_of(spec: StageSpec, config: PipelineConfig, loop: Loop | None) -> Any:
    """Build the template of a stage; the run's seed and weights URL are written into it as literals."""
    shared: JsonObject = {"seed": config.seed, **config.published(RUN)}
    spec = spec.with_shared(shared)
    cluster = config.cluster
    dynamic = spec.accepted(["iteration", "endpoint"]) if loop else []
    ranks = {"processes": spec.processes, "nodes": spec.nodes}
    return stage_template(
        spec.component, spec.parameters, dynamic=dynamic, cluster=cluster, **ranks
    )


class Tasks:
    """Draws the stages of a pipeline as tasks of the enclosing DAG; each depends on those whose outputs it takes."""

    def __init__(self, config: Any, templates: Templates, loop: Loop | None) -> None:
        self.config = config
        self._templates = templates
        self._loop = loop
        self._before: dict[str, set[str]] = {}

    def stage(self, component: Component, name: str = "", **inputs: Output) -> Outputs:
        name = name or component.template
        check_drawing(component, name, self._templates, self._before)
        arguments = {
            to_kebab_case(k): value
            for k, value in {**inputs, component.output: f"{RUN}/{name}"}.items()
        }
        task = self._templates[component.template](name=name, arguments=arguments)
        parents = {value.task.name: value.task for value in inputs.values()}
        implied = {each for parent in parents for each in self._before[parent]}
        for parent in parents:
            if parent not in implied:
                parents[parent] >> task
        self._before[name] = {*parents, *implied}
        return Outputs(lambda output: Output(task, to_kebab_case(output)))

    def loop(self, serve: Output, **values: Output) -> None:
        assert self._loop, "the pipeline is built with its loop"
        call_loop(self._loop, self._templates, self.config, serve, values)
