"""A pipeline for Kubeflow Pipelines: a component for each of its stages, and the graph that calls them.

A loop is one task; a short loop can be unrolled, with one task for each stage. KFP cannot leave a loop early, passes no
values from one iteration of a ParallelFor to the next, and compiles to Argo, which keeps the state of all tasks in an
object of at most 1 MiB. So one task runs the iterations, and after `per_workflow` of them another run of KFP continues:
its size does not grow with the loop. The tasks after the loop have no condition of KFP (a DAG whose last task is
skipped stays RUNNING in its metadata): until the loop has ended, the policy's handle tells them to do nothing."""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kfp import dsl
from kfp.dsl import HTML, Dataset, Input, Markdown, Metrics, Model, Output

from tuneloop.argo.run_plan import plan_loop, plan_pod_stages
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kfp import template
from tuneloop.kfp.io import SAME
from tuneloop.kfp.iterations import get_output_name
from tuneloop.kfp.stage import TARGET
from tuneloop.kfp.template import define_uncached_step, stage_step
from tuneloop.workflow.loop import (
    Graph,
    Loop,
    Outputs,
    StageSpec,
    Step,
    check_drawing,
    output_of,
    step_of,
)
from tuneloop.workflow.settings import ResourceRole

ABOUT = {
    "store": "URL of the store, as pods reach it: s3://bucket/prefix",
    "run": "name of the run; its artifacts lie at store/run, and the same name again resumes it",
    "seed": "every random stream of the run is derived from it",
    TARGET: "the loop ends once a batch of rollouts earns this mean reward",
}
ABOUT_ITERATIONS = {
    "url": "URL of the run, below which the iterations commit their artifacts",
    "run_id": "KFP's own id of the run that this task belongs to",
    "seed": ABOUT["seed"],
    TARGET: "rewards of this mean end the loop",
    SAME: "input → the other input that is the same artifact",
}
Steps = JsonMapping
"""Name of a stage → the function that creates its task."""


def build_pipeline(
    name: str,
    config: Any,
    specs: Sequence[StageSpec],
    draw: Callable[[Graph], None],
    loop: Loop | None = None,
) -> Any:
    """Return a pipeline for KFP's compiler; its description is the docstring of `draw`. Raises UserError for a setting
    that Kubeflow Pipelines do not support, and for a step of the loop that is not among the stages."""
    steps = build_steps(name, config, specs, loop)
    parameters: dict[str, tuple[type, Any]] = {
        "store": (str, inspect.Parameter.empty),
        "run": (str, name),
        "seed": (int, config.seed),
        **({TARGET: (float, config.loop.ending_reward)} if loop else {}),
    }

    def built(*values: Any) -> None:
        given = dict(zip(parameters, values))
        with dsl.ExitHandler(steps["report"]("report", run=given["run"], store=given["store"])):
            draw(Tasks(config, steps, loop, f"{given['store']}/{given['run']}", given))

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    built.__doc__ = "\n".join(
        [inspect.getdoc(draw) or "", "", "Args:", *(f"    {k}: {ABOUT[k]}" for k in parameters)]
    )
    built.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(k, kind, annotation=each, default=value)
            for k, (each, value) in parameters.items()
        ]
    )
    # kfp would read a file whose pipeline has a component's name as that component.
    return dsl.pipeline(name=f"{name}-pipeline" if name in steps else name)(built)


def build_steps(
    pipeline: str, config: Any, specs: Sequence[StageSpec], loop: Loop | None
) -> JsonObject:
    """Return name → the function that creates a stage's task."""
    cluster = config.cluster
    kfp = config.kfp
    engine = JsonObject()
    if loop:
        loop.check_specs(specs)
        refused = {
            "loop.asynchronous": config.loop.asynchronous,
            "deploy": getattr(config, "deploy", None),
        }
        server = config.engine.server
        if server:
            refused["engine.colocate"] = server.colocate
            refused["engine.asleep"] = server.asleep
            refused["engine.snapshot"] = server.snapshot
            refused["engine.replicas"] = server.replicas if server.replicas > 1 else False
        for name, chosen in refused.items():
            if chosen:
                raise UserError(
                    name, chosen, "is built for Argo and for one machine: leave it out here"
                )
        engine = {"endpoint": config.engine.endpoint_url or None}
    passed = ["seed", *(["iteration"] if loop else []), *config.published("")]
    kinds = {"run": str, "store": str, "report": Output[HTML], "rewards": Output[Metrics]}
    about = {"run": "name of the run", "store": "URL of the store"}
    said = "Report on a run, however it ended."
    steps: JsonObject = {"report": define_uncached_step("report", said, kinds, about, cluster, kfp)}
    for spec in specs:
        given = spec.with_shared(engine)
        steps[spec.component.template] = stage_step(
            given, dynamic=spec.accepted(passed), cluster=cluster, kfp=kfp
        )
    if loop and not is_written_out(config):
        steps["iterations"] = iterations_step(loop, specs, config)
    if config.kfp.model_registry:
        _register_exports(steps, pipeline, specs, config)
    return steps


def _register_exports(
    steps: JsonObject, pipeline: str, specs: Sequence[StageSpec], config: Any
) -> None:
    """Add a registration after each task whose stage exports a model."""
    kinds = {
        "model": Input[Model],
        "registry": str,
        "model_name": str,
        "model_version": dsl.OutputPath(str),
    }
    about = {"registry": "address of the registry", "model_name": "of the registered model"}
    said = "Register the exported model."
    register = define_uncached_step("register", said, kinds, about, config.cluster, config.kfp)

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

    def __init__(
        self, config: Any, steps: Steps, loop: Loop | None, url: str, given: JsonMapping
    ) -> None:
        self.config = config
        self._steps = steps
        self._loop = loop
        self._url = url
        self._shared = {"seed": given["seed"], **config.published(url)}
        self._given = given
        self._names: set[str] = set()

    def stage(self, component: Component, name: str = "", **inputs: Any) -> Outputs:
        name = name or component.template
        check_drawing(component, name, self._steps, self._names)
        self._names.add(name)
        shared = {
            k: value for k, value in self._shared.items() if k in component.Params.model_fields
        }
        task = self._steps[component.template](name, url=f"{self._url}/{name}", **inputs, **shared)
        return Outputs(lambda output: task.outputs[output])

    def loop(self, serve: Any, **values: Any) -> None:
        assert self._loop, "the pipeline is built with its loop"
        target = self._given[TARGET]
        config = self.config
        LoopTasks(self._loop, self._steps, config, self._url, self._shared, target, values).draw()


def is_written_out(config: LoopPipelineConfig) -> bool:
    """Return whether each stage of each iteration is a task of its own."""
    return config.loop.iterations <= config.kfp.unroll


@dataclass
class LoopTasks:
    """Draws a loop inside a pipeline. `shared` are the pipeline's parameters for every stage that has them (the seed,
    the URL of weights); `values` are the artifacts that the first iteration starts from."""

    loop: Loop
    steps: Steps
    config: LoopPipelineConfig
    url: Any
    shared: JsonMapping
    target: Any
    values: JsonMapping

    def draw(self) -> None:
        """Evaluate the policy, run the loop, evaluate and finish."""
        check = self.loop.check
        self.call(check, f"{check.name}-before", self.url, {**self.values, "iteration": 0})
        if is_written_out(self.config):
            self.finish(self.write_out())
            return
        task = self.steps["iterations"](
            "iterations",
            **{
                "url": self.url,
                "run_id": dsl.PIPELINE_JOB_ID_PLACEHOLDER,
                "seed": self.shared["seed"],
            },
            **{TARGET: self.target, **self.values},
        )
        self.finish({name: task.outputs[get_output_name(name)] for name in self.loop.carry})

    def finish(self, trained: JsonMapping) -> None:
        """Evaluate the last policy, and make the tasks of the loop's `finish` steps."""
        values = {**self.values, **trained, "iteration": 0}
        check = self.loop.check
        self.call(check, f"{check.name}-after", self.url, values)
        for step in (each for each in self.loop.finish if each.name in self.steps):
            self.call(step, step.name, self.url, values)

    def write_out(self) -> JsonObject:
        """Unroll the loop, with tasks for every iteration; return the values that the last one passes on."""
        carried: JsonObject = {}
        every = self.config.loop.evaluate_every
        for i in range(1, self.config.loop.iterations + 1):
            at = f"{self.url}/iterations/{i}"
            values = {**self.values, **carried, "iteration": i}
            carried = self.iterate(values, at)
            if every and i % every == 0:
                self.call(self.loop.check, self.loop.check.name, at, {**values, **carried})
        return carried

    def iterate(self, values: JsonMapping, url: str) -> JsonObject:
        """Create the tasks of one iteration; return the values that it passes on."""
        known = dict(values)
        for step in self.loop.steps:
            ends_loop = step_of(self.loop.reward) in map(step_of, step.wires.values())
            task = self.call(
                step, step.name, url, known, **({TARGET: self.target} if ends_loop else {})
            )
            known |= {
                f"{step.name}.{name.replace('_', '-')}": output
                for name, output in task.outputs.items()
            }
        return {name: known[wire] for name, wire in self.loop.carry.items()}

    def call(self, step: Step, name: str, url: Any, values: JsonMapping, **more: Any) -> Any:
        """Create the task of a step, which commits to `name` below `url`; `endpoint` is a constant of KFP's stages."""
        wired = {k: values[wire] for k, wire in step.wires.items() if wire != "endpoint"}
        shared = {
            k: value for k, value in self.shared.items() if k in step.component.Params.model_fields
        }
        return self.steps[step.name](name, url=f"{url}/{name}", **wired, **shared, **more)


def iterations_step(
    loop: Loop, specs: Sequence[StageSpec], config: LoopPipelineConfig
) -> template.Step:
    """Return the step that runs `tuneloop.kfp.iterations`. Raises UserError where a stage spans several nodes."""
    image = config.cluster.images.format(image="rollout")
    settings = config.loop
    engine = config.engine
    if spread := [spec.component.template for spec in specs if spec.nodes > 1]:
        remedy = f"{spread[0]} would have to run inside of a pod: set kfp.unroll to loop.iterations, or this to 1"
        raise UserError("nodes", config.nodes, remedy)
    wired = ["seed"]
    wired += config.published("")
    looped = plan_loop(loop, specs, config, wired)
    stages = plan_pod_stages(looped, specs, config.cluster)
    has_server = engine.server is not None
    roles: list[ResourceRole] = []
    for stage in stages.values():
        roles.append(stage.resource_role)
    role, cluster = config.cluster.merge_roles(roles, has_server)
    server_flags: list[str] = []
    if engine.server:
        server: JsonObject = {
            "port": engine.server.port,
            "engine_args": engine.options,
            "pull": engine.publication is not None,
        }
        server_gpus = config.cluster.sampler.gpus
        if server_gpus:
            # The server gets the last GPUs of the pod; the trainer's ranks use the first.
            total = cluster.count_gpus(role)
            server["devices"] = ",".join(map(str, range(total - server_gpus, total)))
        server_flags = ["--server", json.dumps(server, separators=(",", ":"))]
    publication = engine.publication
    flags = [
        "--loop",
        looped.build_pod_loop(stages).model_dump_json(exclude_defaults=True),
        "--iterations",
        str(settings.iterations),
        "--per-task",
        str(settings.per_workflow),
        "--api",
        config.kfp.api,
        "--endpoint",
        engine.endpoint_url,
        *(("--weights", publication.url) if publication and publication.url else ()),
        *server_flags,
    ]
    taken = {wire: name for step in loop.steps for name, wire in step.wires.items()}
    types = {
        name: template.TYPES.get(taken[name], Dataset) for name in (*loop.carry, *loop.constants)
    }
    shown = {"results": Metrics, "preview": Markdown, "curves": HTML}
    kinds: JsonObject = {
        "url": str,
        "run_id": str,
        "seed": int,
        TARGET: float,
        **{get_output_name(name): Output[types[name]] for name in loop.carry},
        **{name: Output[kind] for name, kind in shown.items()},
        "last_iteration": dsl.OutputPath(int),
        output_of(loop.reward).replace("-", "_"): dsl.OutputPath(float),
    }
    signature = template.define_inputs(types, dict.fromkeys(types, True))
    signature |= {name: (kind, template.REQUIRED) for name, kind in kinds.items()}
    command = ["python3", "-m", "tuneloop.kfp.iterations"]
    about = "Iterations of the loop."
    made = template.define_container_component(
        "iterations", about, signature, ABOUT_ITERATIONS, image, command, flags
    )

    def make(**arguments: Any) -> dsl.PipelineTask:  # it continues after the committed iterations
        return made(**template.pass_artifacts_once(arguments, types)).set_caching_options(False)

    return template.make_step(make, image, cluster, config.kfp, role)
