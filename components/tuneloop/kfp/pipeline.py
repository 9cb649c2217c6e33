"""A pipeline for Kubeflow Pipelines: a component for each of its stages, and the graph that calls them."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kfp import dsl

from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.kfp.loop import LoopTasks, Steps, is_written_out, iterations_step
from tuneloop.kfp.stage import TARGET
from tuneloop.kfp.template import register_step, report_step, stage_step
from tuneloop.workflow.loop import Graph, Loop, Outputs, StageSpec

ABOUT = {
    "store": "URL of the store, as pods reach it: s3://bucket/prefix",
    "run": "name of the run; its artifacts lie at store/run, and the same name again resumes it",
    "seed": "every random stream of the run is derived from it",
    TARGET: "the loop ends once a batch of rollouts earns this mean reward",
}


def build_pipeline(
    name: str, config: Any, specs: Sequence[StageSpec], draw: Callable[[Graph], None], loop: Loop | None = None
) -> Any:
    """Return a pipeline as KFP's compiler takes it; its description is the docstring of `draw`. Raises UserError at a
    setting that Kubeflow Pipelines have nothing for, and at a step of the loop that is not among the stages."""
    steps = build_steps(name, config, specs, loop)
    parameters: dict[str, tuple[type, Any]] = {
        **{"store": (str, inspect.Parameter.empty), "run": (str, name), "seed": (int, config.seed)},
        **({TARGET: (float, config.loop.target_reward)} if loop else {}),
    }

    def built(*values: Any) -> None:
        given = dict(zip(parameters, values))
        with dsl.ExitHandler(steps["report"]("report", run=given["run"], store=given["store"])):
            draw(Tasks(config, steps, loop, f"{given['store']}/{given['run']}", given))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    built.__doc__ = "\n".join([inspect.getdoc(draw) or "", "", "Args:", *(f"    {k}: {ABOUT[k]}" for k in parameters)])
    built.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter(k, kind, annotation=each, default=value) for k, (each, value) in parameters.items()]
    )
    # kfp takes a file whose pipeline has a component's name for that component.
    return dsl.pipeline(name=f"{name}-pipeline" if name in steps else name)(built)


def build_steps(pipeline: str, config: Any, specs: Sequence[StageSpec], loop: Loop | None) -> dict[str, Any]:
    """Return each stage as a function that makes its task, by name."""
    cluster, kfp, engine = config.cluster, config.kfp, dict[str, Any]()
    if loop:
        loop.check_specs(specs)
        refused = {"loop.asynchronous": config.loop.asynchronous, "engine.colocate": config.engine.colocate}
        refused["engine.replicas"] = config.engine.replicas if config.engine.replicas > 1 else False
        for name, chosen in refused.items():
            if chosen:
                raise UserError(name, chosen, "is built for Argo and for one machine: leave it out here")
        engine = {"endpoint": config.engine.rollout_endpoint_url}
    passed = ["seed", *(["iteration"] if loop else []), *config.published("")]
    steps: dict[str, Any] = {"report": report_step(cluster=cluster, kfp=kfp)}
    for spec in specs:
        given = spec.with_shared(engine)
        steps[spec.component.template] = stage_step(given, dynamic=spec.accepted(passed), cluster=cluster, kfp=kfp)
    if loop and not is_written_out(config):
        steps["iterations"] = iterations_step(loop, specs, config)
    if config.kfp.model_registry:
        _register_exports(steps, pipeline, specs, config)
    return steps


def _register_exports(steps: dict[str, Any], pipeline: str, specs: Sequence[StageSpec], config: Any) -> None:
    """Have a registration follow each task whose stage exports a model."""
    register = register_step(cluster=config.cluster, kfp=config.kfp)

    def follow(export: Any, output: str) -> Any:
        def step(name: str, **arguments: Any) -> dsl.PipelineTask:
            task = export(name, **arguments)
            place = {"registry": config.kfp.model_registry, "model_name": pipeline}
            register(f"register-{name}", model=task.outputs[output], **place)
            return task

        return step

    for component in (spec.component for spec in specs):
        if component.kind == "model":
            steps[component.template] = follow(steps[component.template], component.output)


class Tasks:
    """Draws the stages of a pipeline as tasks of the enclosing KFP pipeline."""

    def __init__(self, config: Any, steps: Steps, loop: Loop | None, url: str, given: Mapping[str, Any]) -> None:
        self.config, self._steps, self._loop, self._url = config, steps, loop, url
        self._shared, self._given = {"seed": given["seed"], **config.published(url)}, given

    def stage(self, component: Component, name: str = "", **inputs: Any) -> Outputs:
        name = name or component.template
        shared = {k: value for k, value in self._shared.items() if k in component.Params.model_fields}
        task = self._steps[component.template](name, url=f"{self._url}/{name}", **inputs, **shared)
        return Outputs(lambda output: task.outputs[output])

    def loop(self, serve: Any, **values: Any) -> None:
        assert self._loop, "the pipeline is built with its loop"
        target, config = self._given[TARGET], self.config
        LoopTasks(self._loop, self._steps, config, self._url, self._shared, target, values).draw()
