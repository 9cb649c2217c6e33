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
from tuneloop.argo.run_plan import SERVER, plan_run
from tuneloop.argo.tasks import RUN, Output
from tuneloop.argo.template import define_workflow, server_template, stage_template
from tuneloop.config.loop import LoopConfig
from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.program import to_kebab_case
from tuneloop.workflow.loop import Graph, Loop, Outputs, StageSpec, check_drawing
from tuneloop.workflow.plan import RunPlan


def build_workflow(
    name: str,
    config: Any,
    specs: Sequence[StageSpec],
    draw: Callable[[Graph], None],
    loop: Loop | None = None,
) -> Workflow:
    """Return a pipeline as a Workflow.

    Args:
        name: the pipeline's.
        config: a `PipelineConfig`; with a loop, a `LoopPipelineConfig`.
        specs: the stages.
        draw: calls them, and `loop`.
        loop: what repeats some of them.

    Raises:
        UserError: a step of the loop is not among the stages, or two of them are drawn under one name; and as
            `plan_run`.
    """
    plan = plan_run(name, config, specs, loop)
    limits = read_limits(config.loop) if loop else {}
    with define_workflow(name, limits, plan=plan, cluster=config.cluster) as workflow:
        templates = build_templates(plan, config, specs, loop)
        if loop:
            templates["part"] = build_part(loop, templates, config)
        try:
            with DAG(name="main"):
                draw(Tasks(config, templates, loop))
        except NodeNameConflict as error:
            # A task of the pipeline has the name of one that the loop draws itself.
            taken = str(error).rpartition(": ")[2]
            remedy = "is the name of two stages that are drawn: give one of them another name"
            raise UserError("stages", taken, remedy) from None
    return workflow


def read_limits(loop: LoopConfig) -> JsonObject:
    """Return the settings of a loop that are parameters of its workflow."""
    return {
        "iterations": loop.iterations,
        "per_workflow": loop.per_workflow,
        "target_reward": loop.ending_reward,
    }


def build_templates(
    plan: RunPlan, config: Any, specs: Sequence[StageSpec], loop: Loop | None
) -> JsonObject:
    """Build the templates: each stage that has a pod of its own, the rollout server before the loop's stages, and the
    loop after them."""
    components = {spec.component.template: spec.component for spec in specs}
    looped = plan.loop
    inner = looped.stages if looped and looped.pod else []
    templates: JsonObject = {}

    def add(name: str) -> None:
        # A stage of the loop may come later among the stages than the loop's last step.
        if name not in templates and name not in inner:
            templates[name] = stage_template(components[name], plan.stages[name], config.cluster)

    for name in components:
        if looped and name == looped.stages[0] and SERVER in plan.servers:
            templates[SERVER] = server_template(plan.servers[SERVER], config.cluster)
        add(name)
        if loop and looped and name == looped.trainer:
            for stage in (looped.check.stage, *looped.stages):
                add(stage)
            if looped.pod:
                templates["loop"] = build_pods(loop, iterations_template(loop, plan, config))
            else:
                templates["loop"] = build_loop(loop, templates, config)
    return templates


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
