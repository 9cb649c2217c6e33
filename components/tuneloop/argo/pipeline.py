"""A pipeline as an Argo Workflow: a template for each of its stages, and the graph `main` that calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hera.workflows import DAG, Workflow

from tuneloop.argo.loop import Templates, build_loop, build_part, build_pods, call_loop, dag, serve, tags
from tuneloop.argo.multi_stage_pod import segment_template
from tuneloop.argo.tasks import RUN, Output, Outputs, input_tag, output_parameter, task_tag
from tuneloop.argo.template import server_template, stage_template, workflow
from tuneloop.config.pipeline import PipelineConfig
from tuneloop.core.component import Component
from tuneloop.core.program import flag
from tuneloop.workflow.loop import Graph, Loop, StageSpec

LIMITS = {"iterations", "per_workflow", "target_reward"}
"""Settings of a loop that are parameters of its workflow."""


def build_workflow(
    name: str, config: Any, specs: Sequence[StageSpec], draw: Callable[[Graph], None], loop: Loop | None = None
) -> Workflow:
    """Return a pipeline as a Workflow.

    Args:
        name: of the pipeline, in kebab-case.
        config: a `PipelineConfig`; with a loop, a `LoopPipelineConfig`.
        specs: its stages.
        draw: calls them.
        loop: what `draw` calls as the loop.
    """
    limits = config.loop.model_dump(include=LIMITS) if loop else None
    graph = pod_graph(config, specs, loop) if loop and config.loop.iterations_per_pod else None
    with workflow(name, limits, cluster=config.cluster) as built:
        templates = build_templates(config, specs, loop, graph)
        if loop:
            templates["part"] = build_part(loop, templates, config)
        with DAG(name="main"):
            draw(Tasks(config, templates, loop))
    return built


def build_templates(
    config: Any, specs: Sequence[StageSpec], loop: Loop | None, graph: Workflow | None = None
) -> dict[str, Any]:
    """Make the template of each stage, of the rollout server before the loop's, and of the loop behind them."""
    made: dict[str, Any] = {}
    repeated = [step.component for step in loop.steps] if loop else []
    for spec in specs:
        if loop and spec.component is repeated[0]:
            made |= server_templates(config)
        if not (graph and spec.component in repeated):
            made[spec.component.template] = template_of(spec, config, loop)
        if loop and spec.component is repeated[-1]:
            pod = pod_template(graph, loop, config) if graph else None
            made["loop"] = build_pods(loop, pod) if pod else build_loop(loop, made, config)
    return made


def template_of(spec: StageSpec, config: PipelineConfig, loop: Loop | None) -> Any:
    """Make the template of a stage: the run's seed and its URL of weights are literals of it."""
    shared: dict[str, Any] = {"seed": config.seed, **config.published(RUN)}
    given = {**spec.parameters, **{name: shared[name] for name in spec.accepted(list(shared))}}
    dynamic = spec.accepted(["iteration", "endpoint"]) if loop else []
    about: Any = {"processes": spec.processes, "nodes": spec.nodes, "cluster": config.cluster}
    return stage_template(spec.component, given, dynamic=dynamic, **about)


def server_templates(config: Any) -> dict[str, Any]:
    """Make the template of the rollout server, if the engine has one."""
    if config.engine.name != "vllm":
        return {}
    about = {"cluster": config.cluster, **config.published(RUN)}
    return {"serve": server_template(config.engine.port, config.engine.options, **about)}


class Tasks:
    """Draws the stages of a pipeline as tasks of the enclosing DAG; each depends on those whose outputs it takes."""

    def __init__(self, config: Any, templates: Templates, loop: Loop | None) -> None:
        self._config, self._templates, self._loop = config, templates, loop
        self._before: dict[str, set[str]] = {}

    def stage(self, component: Component, name: str = "", **inputs: Output) -> Outputs:
        name = name or component.template
        given = {flag(k): value for k, value in inputs.items()}
        task = self._templates[component.template](name=name, arguments={**given, component.output: f"{RUN}/{name}"})
        parents = {value.task.name: value.task for value in inputs.values()}
        implied = {each for parent in parents for each in self._before[parent]}
        for parent in parents.keys() - implied:
            parents[parent] >> task
        self._before[name] = {*parents, *implied}
        return Outputs(task)

    def loop(self, serve: Output, **values: Output) -> None:
        assert self._loop, "the pipeline is built with its loop"
        call_loop(self._loop, self._templates, self._config, serve, values)


def pod_graph(config: Any, specs: Sequence[StageSpec], loop: Loop, *, served: bool = False) -> Workflow:
    """Return the part of the loop that one pod runs; to be called outside a Workflow.

    Args:
        served: the rollout server is in the same pod, for there is none beside it; the graph's entry is `pod`, then.
    """
    limits = {**config.loop.model_dump(include=LIMITS), "per_workflow": config.loop.iterations_per_pod}
    inner = {spec.component: spec for spec in specs}
    with workflow("pod", limits) as graph:
        calls = [*loop.steps, loop.check]
        made = {step.name: template_of(inner[step.component], config, loop) for step in calls}
        made |= server_templates(config) if served else {}
        repeated = build_loop(loop, made, config)
        if served:
            ended = [output_parameter(k, value=task_tag("loop", k)) for k in loop.pod_outputs]
            with dag("pod", loop.passed, ended):
                server, endpoint = serve(made, config, input_tag("policy"))
                server >> repeated(name="loop", arguments={**tags(loop.passed), "endpoint": endpoint})
    return graph


def pod_template(graph: Workflow, loop: Loop, config: Any) -> Any:
    """Make the template of a pod of several iterations."""
    fixed = {name: f"{{{{workflow.parameters.{name}}}}}" for name in ("run", "store", "iterations", "target-reward")}
    fixed["per-workflow"] = str(config.loop.iterations_per_pod)
    return segment_template(graph, "loop", loop.inputs, loop.pod_outputs, fixed=fixed, cluster=config.cluster)
