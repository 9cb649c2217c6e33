"""A pipeline as an Argo Workflow: a template for each of its stages, and the graph `main` that
calls them.

`kfp/pipeline.py` is the counterpart for Kubeflow Pipelines: a method of `Tasks` here is one there,
as both are a `Graph` (`workflow/loop.py`) to the file of a pipeline.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hera.workflows import DAG, NodeNameConflict, Task, Workflow

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
        UserError: a step of the loop is not among the stages, or two of them are drawn under one
            name; and as `plan_run`.
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
            task = str(error).rpartition(": ")[2]
            remedy = "is the name of two stages that are drawn: give one of them another name"
            raise UserError("stages", task, remedy) from None
    return workflow


def read_limits(loop: LoopConfig) -> JsonObject:
    """Return the settings of a loop that are parameters of its workflow, in snake_case; the
    workflow has them with dashes (``per-workflow``).

    By these names they are read in conditions (`argo/loop.py`) and by `planning/counts.py`,
    `argo/jobset.py: check_names`, `runs/forking.py`, `runs/summary.py`, `cluster/watch.py`,
    `cli/live.py`, `cli/inspect.py`, `ui/describe.py` and `extensions/sweep/runs.py`.
    `local/iterations.py` gets them as flags.
    """
    return {
        "iterations": loop.iterations,
        "per_workflow": loop.per_workflow,
        "target_reward": loop.ending_reward,
    }


def build_templates(
    plan: RunPlan, config: Any, specs: Sequence[StageSpec], loop: Loop | None
) -> JsonObject:
    """Build the templates: each stage that has a pod of its own, the rollout server before the
    loop's stages, and the loop after them. Hera writes them in the order in which they are made.

    Args:
        plan: what the pipeline runs.
        config: its settings.
        specs: its stages.
        loop: what repeats some of them.

    Returns:
        Name → Hera's template.
    """
    components = {spec.component.template: spec.component for spec in specs}
    loop_plan = plan.loop
    # Stages that a pod of iterations runs have no template of their own.
    inner = loop_plan.stages if loop_plan and loop_plan.pod else []
    templates: JsonObject = {}

    def add(name: str) -> None:
        # A stage of the loop may come later among the stages than the loop's last step.
        if name not in templates and name not in inner:
            templates[name] = stage_template(components[name], plan.stages[name], config.cluster)

    for name in components:
        if loop_plan and name == loop_plan.stages[0] and SERVER in plan.servers:
            templates[SERVER] = server_template(plan.servers[SERVER], config.cluster)
        add(name)
        if loop and loop_plan and name == loop_plan.trainer:
            # The loop calls the templates of its stages, so they come first.
            add(loop_plan.check.stage)
            for stage in loop_plan.stages:
                add(stage)
            if loop_plan.pod:
                templates["loop"] = build_pods(loop, iterations_template(loop, plan, config))
            else:
                templates["loop"] = build_loop(loop, templates, config)
    return templates


class Tasks:
    """Draws the stages of a pipeline as tasks of the enclosing DAG; each depends on those whose
    outputs it takes.
    """

    def __init__(self, config: Any, templates: Templates, loop: Loop | None) -> None:
        self.config = config
        self._templates = templates
        self._loop = loop
        # Task → all tasks that it waits for, also through others.
        self._ancestors: dict[str, set[str]] = {}

    def stage(self, component: Component, name: str = "", **inputs: Output) -> Outputs:
        """Draw a stage as a task, named after its template or `name`.

        Args:
            component: the stage.
            name: of the task; the run's artifact of the stage has it, too.
            inputs: outputs of other tasks, by the stage's names of its inputs.
        """
        name = name or component.template
        check_drawing(component, name, self._templates, self._ancestors)
        arguments: dict[str, str] = {}
        parents: dict[str, Task] = {}
        implied: set[str] = set()
        for key, value in inputs.items():
            arguments[to_kebab_case(key)] = value
            parent = str(value.task.name)
            parents[parent] = value.task
            implied |= self._ancestors[parent]
        arguments[to_kebab_case(component.output)] = f"{RUN}/{name}"
        task = self._templates[component.template](name=name, arguments=arguments)
        for parent, parent_task in parents.items():
            # An edge that follows from others would only make the graph harder to read.
            if parent not in implied:
                parent_task >> task
        self._ancestors[name] = implied.union(parents)
        return Outputs(lambda output: Output(task, to_kebab_case(output)))

    def loop(self, serve: Output, **values: Output) -> None:
        """Draw the pipeline's loop.

        Args:
            serve: the checkpoint that a rollout server boots with.
            values: what the loop starts from, by the names in its `carry` and `constants`.
        """
        assert self._loop, "the pipeline is built with its loop"
        call_loop(self._loop, self._templates, self.config, serve, values)
