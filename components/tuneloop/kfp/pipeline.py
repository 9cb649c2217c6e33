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
import json
from collections.abc import Callable, Sequence
from typing import Any

from kfp import dsl
from kfp.dsl import HTML, Input, Metrics, Model, Output

from tuneloop.config.explicit_values import find_explicit_values
from tuneloop.config.loading import Pipeline, find_pipeline
from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kfp import template
from tuneloop.kfp.configure import list_limits, read_files
from tuneloop.kfp.form import OTHERS, Parameter, list_fixed, list_parameters
from tuneloop.kfp.loop import LoopTasks, Steps, iterations_step, select_parameters
from tuneloop.kfp.register import AFTER, BEFORE
from tuneloop.kfp.stage import CHANGES, TARGET, URL
from tuneloop.kfp.task_plan import TaskPlan, name_changes, plan_tasks
from tuneloop.kfp.template import REQUIRED, Signature, define_uncached_step, stage_step
from tuneloop.workflow.loop import Graph, Loop, Outputs, StageSpec, check_drawing

DESCRIPTIONS = {
    "store": "URL of the store, as pods reach it: s3://bucket/prefix",
    "run": (
        "name of the run; its artifacts lie at store/run, and the same name again resumes it; "
        "empty: a new name, from KFP's id of the run"
    ),
    OTHERS: (
        'other settings by their keys, as {"rollout.temperature": 0.7}; `tuneloop schema` lists them'
    ),
}
"""Parameter of a pipeline → description; the settings of the form have descriptions of their own.

The parameters are in `build_pipeline`. A further one needs a default there, or has to be passed by
`client.py: submit_run` and `check_data.py: start_scheduled_run`.
"""


def build_pipeline(
    name: str,
    config: Any,
    specs: Sequence[StageSpec],
    draw: Callable[[Graph], None],
    loop: Loop | None = None,
    *,
    file: str,
) -> Any:
    """Build a pipeline for KFP's compiler.

    Args:
        name: of the pipeline.
        config: its settings.
        specs: its stages.
        draw: calls them; its docstring is the pipeline's description.
        loop: what `draw` calls as the loop.
        file: the Python file that defines all of it, from which the first task of a run makes the
            settings again.

    Raises:
        UserError: Kubeflow Pipelines do not support a setting, or a step of the loop is not among
            the stages.
    """
    plan = plan_tasks(name, config, specs, loop)
    form = list_parameters(config)
    steps = build_steps(name, config, specs, loop, plan)
    steps["configure"] = configure_step(find_pipeline(file), config, plan, form)
    signature: Signature = {"store": (str, REQUIRED), "run": (str, ""), OTHERS: (dict, {})}
    descriptions = dict(DESCRIPTIONS)
    for parameter in form:
        signature[parameter.name] = (parameter.type, parameter.default)
        descriptions[parameter.name] = parameter.description

    def create_tasks(*values: Any) -> None:
        # Placeholders: kfp calls this once, when it compiles.
        arguments = dict(zip(signature, values))
        identity = {
            "store": arguments["store"],
            "run": arguments["run"],
            "pipeline": name,
            "run_id": dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        }
        # The report is written however the run ends.
        with dsl.ExitHandler(steps["report"]("report", **identity)):
            settings = steps["configure"]("settings", **identity | arguments)
            draw(Tasks(config, steps, loop, plan, settings.outputs))

    template.set_interface(
        create_tasks, describe_pipeline(config, draw, plan), signature, descriptions
    )
    # kfp would read a file whose pipeline has a component's name as that component.
    pipeline_name = f"{name}-pipeline" if name in steps else name
    return dsl.pipeline(name=pipeline_name)(create_tasks)


def describe_pipeline(config: Any, draw: Callable[[Graph], None], plan: TaskPlan) -> str:
    """Describe a pipeline for people: what it does, and what is fixed in its compiled form."""
    paragraphs = [
        inspect.getdoc(draw) or "",
        f"Fixed when it was compiled, as they decide the graph or its pods: "
        f"{', '.join(list_fixed(config))}; and what another model would need of memory.",
        plan.describe_unlimited(),
    ]
    return "\n\n".join(filter(None, paragraphs))


def configure_step(
    pipeline: Pipeline, config: Any, plan: TaskPlan, form: Sequence[Parameter]
) -> template.Step:
    """Return the step that runs `tuneloop.kfp.configure`.

    Flags, parameters and outputs are those that `configure.py: main` parses, reads and writes.

    Args:
        pipeline: that is compiled.
        config: its settings.
        plan: of its tasks.
        form: its parameters.
    """
    kinds: JsonObject = {"store": str, "run": str, "pipeline": str, "run_id": str, OTHERS: dict}
    descriptions = dict(DESCRIPTIONS)
    for parameter in form:
        kinds[parameter.name] = parameter.type
        descriptions[parameter.name] = parameter.description
    kinds[URL] = dsl.OutputPath(str)
    # One for each task: KFP's cache knows a task again whose own settings are the same.
    for task in plan.configured:
        kinds[name_changes(task)] = dsl.OutputPath(str)
    if plan.has_loop:
        kinds[TARGET] = dsl.OutputPath(float)
    # Only what was set, so that the rest follows what a user sets for a run.
    values = find_explicit_values(pipeline, config)
    flags = ["--pipeline", pipeline.name, "--values", _encode(values)]
    # The base model of this machine may not be known in the task's pod, from which they follow.
    flags += ["--limits", _encode(list_limits(plan))]
    files = read_files(pipeline)
    if files:
        flags += ["--files", _encode(files)]
    summary = "Name the run, and check what is set for it."
    return define_uncached_step(
        "configure", summary, kinds, descriptions, config.cluster, config.kfp, flags=flags
    )


def _encode(value: JsonMapping) -> str:
    return template.escape_json(json.dumps(value, separators=(",", ":")))


def build_steps(
    pipeline: str, config: Any, specs: Sequence[StageSpec], loop: Loop | None, plan: TaskPlan
) -> JsonObject:
    """Return name → the function that creates a task: the stages by their templates, the iterations
    of a loop, and the report.

    The name ``iterations`` is `argo/run_plan.py: POD`; the first task is added by `build_pipeline`.
    """
    cluster = config.cluster
    kfp = config.kfp
    report = define_uncached_step(
        "report",
        "Report on a run, however it ended.",
        {
            "run": str,
            "store": str,
            "pipeline": str,
            "run_id": str,
            "report": Output[HTML],
            "rewards": Output[Metrics],
        },
        {"run": "name of the run; empty: from the id", "store": "URL of the store"},
        cluster,
        kfp,
    )
    steps: JsonObject = {"report": report}
    for spec in specs:
        name = spec.component.template
        steps[name] = stage_step(spec, plan.stages[name], cluster=cluster, kfp=kfp)
    if loop and plan.iterations:
        steps["iterations"] = iterations_step(loop, plan.iterations, config)
    if kfp.model_registry:
        _register_exports(steps, pipeline, specs, config)
    return steps


def _register_exports(
    steps: JsonObject, pipeline: str, specs: Sequence[StageSpec], config: Any
) -> None:
    """Add a registration after each task whose stage exports a model.

    With a gate it takes the first and the last evaluation that were created before it, which are
    those before and after the training.
    """
    gate = config.kfp.gate
    kinds: JsonObject = {"model": Input[Model]}
    if gate:
        kinds |= {BEFORE: Input[Metrics], AFTER: Input[Metrics]}
    kinds |= {"registry": str, "model_name": str, "model_version": dsl.OutputPath(str)}
    register = define_uncached_step(
        "register",
        "Register the exported model.",
        kinds,
        {"registry": "address of the registry", "model_name": "of the registered model"},
        config.cluster,
        config.kfp,
    )
    # In the order in which the graph is drawn.
    evaluations: list[Any] = []

    def note_evaluation(evaluate: template.Step, output: str) -> template.Step:
        def step(name: str, **arguments: Any) -> dsl.PipelineTask:
            task = evaluate(name, **arguments)
            evaluations.append(task.outputs[output])
            return task

        return step

    def add_registration(export: template.Step, output: str) -> template.Step:
        def step(name: str, **arguments: Any) -> dsl.PipelineTask:
            task = export(name, **arguments)
            inputs = {"model": task.outputs[output]}
            if gate:
                if len(evaluations) < 2:
                    remedy = f"{name} has no evaluation before and after the training: leave it out"
                    raise UserError("kfp.gate", True, remedy)
                inputs |= {BEFORE: evaluations[0], AFTER: evaluations[-1]}
            register(
                f"register-{name}",
                registry=config.kfp.model_registry,
                model_name=pipeline,
                **inputs,
            )
            return task

        return step

    for spec in specs:
        stage = spec.component
        if stage.role == "evaluator":
            steps[stage.template] = note_evaluation(steps[stage.template], stage.output)
        if stage.kind == "model":
            steps[stage.template] = add_registration(steps[stage.template], stage.output)


class Tasks:
    """Draws the stages of a pipeline as tasks of the enclosing KFP pipeline."""

    def __init__(
        self,
        config: Any,
        steps: Steps,
        loop: Loop | None,
        plan: TaskPlan,
        settings: JsonMapping,
    ) -> None:
        """Prepare to draw.

        Args:
            config: settings of the pipeline.
            steps: create the tasks.
            loop: what `loop` draws.
            plan: of the tasks.
            settings: outputs of the first task, as placeholders.
        """
        self.config = config
        self._steps = steps
        self._loop = loop
        self._url = settings[URL]
        self._shared: JsonObject = config.published(self._url)
        self._changes = {task: settings[name_changes(task)] for task in plan.configured}
        self._target_reward = settings[TARGET] if plan.has_loop else None
        self._names: set[str] = set()

    def stage(self, component: Component, name: str = "", **inputs: Any) -> Outputs:
        """Create the task of a stage, as `Graph.stage` describes."""
        name = name or component.template
        check_drawing(component, name, self._steps, self._names)
        self._names.add(name)
        arguments = select_parameters(component, self._shared)
        arguments[CHANGES] = self._changes[component.template]
        arguments |= inputs
        task = self._steps[component.template](name, url=f"{self._url}/{name}", **arguments)
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
            changes=self._changes,
            target_reward=self._target_reward,
            values=values,
        )
        tasks.draw()
