"""A pipeline for Kubeflow Pipelines: a component for each of its stages, and the graph that calls
them.

A loop is one task; a short loop can be unrolled, with one task for each stage. KFP cannot leave a
loop early, passes no values from one iteration of a ParallelFor to the next, and compiles to Argo,
which keeps the state of all tasks in an object of at most 1 MiB. So one task runs the iterations,
and after `per_workflow` of them another run of KFP continues: its size does not grow with the loop.
The tasks after the loop have no condition of KFP (a DAG whose last task is skipped stays RUNNING in
its metadata): until the loop has ended, a mark of the policy's handle (`CONTINUED` of
`kfp/stage.py`) tells them to do nothing.

The words of a loop (step, wire, carry, check) are those of `workflow/loop.py`.
"""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from kfp import dsl
from kfp.dsl import HTML, Dataset, Input, Metrics, Model, Output

from tuneloop.argo.run_plan import plan_loop, plan_pod_stages
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kfp import template
from tuneloop.kfp.iterations import get_output_name
from tuneloop.kfp.stage import TARGET, URL
from tuneloop.kfp.template import REQUIRED, Signature, define_uncached_step, stage_step
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
from tuneloop.workflow.plan import VLLM
from tuneloop.workflow.settings import Cluster, ResourceRole

DESCRIPTIONS = {
    "store": "URL of the store, as pods reach it: s3://bucket/prefix",
    "run": "name of the run; its artifacts lie at store/run, and the same name again resumes it",
    "seed": "every random stream of the run is derived from it",
    TARGET: "the loop ends once a batch of rollouts earns this mean reward",
}
"""Parameter of a pipeline → description."""
ITERATIONS_DESCRIPTIONS = template.DESCRIPTIONS | {
    URL: "URL of the run, below which the iterations commit their artifacts",
    "run_id": "KFP's own id of the run that this task belongs to",
    "seed": DESCRIPTIONS["seed"],
}
"""Parameter of the task that runs the iterations → description."""
Steps = JsonMapping
"""Name of a stage → the function that creates its task."""


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
        "seed": (int, config.seed),
    }
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
    template.set_interface(create_tasks, summary, signature, DESCRIPTIONS)
    # kfp would read a file whose pipeline has a component's name as that component.
    pipeline_name = f"{name}-pipeline" if name in steps else name
    return dsl.pipeline(name=pipeline_name)(create_tasks)


def build_steps(
    pipeline: str, config: Any, specs: Sequence[StageSpec], loop: Loop | None
) -> JsonObject:
    """Return name → the function that creates a stage's task."""
    cluster = config.cluster
    kfp = config.kfp
    # Parameters that the graph passes to every stage that has them. Another one has to be added to
    # `Tasks` and `LoopTasks`, too, and to the iterations' step (`kfp/iterations.py`).
    dynamic = ["seed"]
    shared_constants: JsonObject = {}
    if loop:
        loop.check_specs(specs)
        _refuse_unsupported_settings(config)
        shared_constants["endpoint"] = config.engine.endpoint_url or None
        dynamic.append("iteration")
    # The parameters of publishing weights, if this run publishes.
    dynamic += list(config.published(""))
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


def select_parameters(stage: Component, values: JsonMapping) -> JsonObject:
    """Return those of `values` that are parameters of a stage."""
    return {name: value for name, value in values.items() if name in stage.Params.model_fields}


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
        self._shared: JsonObject = {"seed": arguments["seed"]}
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
        # The task of the iterations runs the server itself, with the policy of its first iteration.
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


def is_written_out(config: LoopPipelineConfig) -> bool:
    """Return whether each stage of each iteration is a task of its own."""
    return config.loop.iterations <= config.kfp.unroll


@dataclass
class LoopTasks:
    """Draws a loop inside a pipeline.

    Attributes:
        loop: what is drawn.
        steps: create the tasks.
        config: settings of the pipeline.
        url: of the run.
        shared: the pipeline's parameters for every stage that has them (the seed, the URL of
            weights).
        target_reward: the mean reward that ends the loop.
        values: the artifacts that the first iteration starts from.
    """

    loop: Loop
    steps: Steps
    config: LoopPipelineConfig
    url: Any
    shared: JsonMapping
    target_reward: Any
    values: JsonMapping

    def draw(self) -> None:
        """Evaluate the policy, run the loop, evaluate and finish."""
        check = self.loop.check
        values = dict(self.values)
        values["iteration"] = 0
        self.call(check, f"{check.name}-before", self.url, values)
        if is_written_out(self.config):
            self.finish(self.write_out())
            return
        arguments: JsonObject = {TARGET: self.target_reward}
        arguments |= self.values
        task = self.steps["iterations"](
            "iterations",
            url=self.url,
            run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
            seed=self.shared["seed"],
            **arguments,
        )
        self.finish({name: task.outputs[get_output_name(name)] for name in self.loop.carry})

    def finish(self, trained: JsonMapping) -> None:
        """Evaluate the last policy, and create the tasks of the loop's `finish` steps.

        Args:
            trained: the values that the last iteration passes on.
        """
        values = dict(self.values)
        values.update(trained)
        values["iteration"] = 0
        check = self.loop.check
        self.call(check, f"{check.name}-after", self.url, values)
        for step in self.loop.finish:
            # The settings may have left out an optional one.
            if step.name in self.steps:
                self.call(step, step.name, self.url, values)

    def write_out(self) -> JsonObject:
        """Unroll the loop, with tasks for every iteration; return the values that the last one
        passes on.
        """
        carried: JsonObject = {}
        check = self.loop.check
        interval = self.config.loop.evaluate_every
        for iteration in range(1, self.config.loop.iterations + 1):
            url = f"{self.url}/iterations/{iteration}"
            values = dict(self.values)
            values.update(carried)
            values["iteration"] = iteration
            carried = self.iterate(values, url)
            if interval and iteration % interval == 0:
                # The evaluation is of the policy that this iteration has trained.
                values.update(carried)
                self.call(check, check.name, url, values)
        return carried

    def iterate(self, values: JsonMapping, url: str) -> JsonObject:
        """Create the tasks of one iteration, and return the values that it passes on.

        Args:
            values: what its steps can take, but for outputs of steps before.
            url: below which its stages commit.
        """
        available = dict(values)
        scorer = step_of(self.loop.reward)
        for step in self.loop.steps:
            arguments: JsonObject = {}
            # The stage that takes the rewards marks its handle where they end the loop.
            if scorer in map(step_of, step.wires.values()):
                arguments[TARGET] = self.target_reward
            task = self.call(step, step.name, url, available, **arguments)
            for name, output in task.outputs.items():
                available[f"{step.name}.{name.replace('_', '-')}"] = output
        return {name: available[wire] for name, wire in self.loop.carry.items()}

    def call(
        self, step: Step, name: str, url: Any, values: JsonMapping, **parameters: Any
    ) -> dsl.PipelineTask:
        """Create the task of a step.

        Args:
            step: of the loop.
            name: of the task, which commits to that name below `url`.
            url: of the run, or of an iteration.
            values: what the wires of the step can lead to.
            parameters: further ones of the stage.
        """
        arguments = select_parameters(step.component, self.shared)
        arguments |= parameters
        for target, wire in step.wires.items():
            # The endpoint is a constant of KFP's stages.
            if wire != "endpoint":
                arguments[target] = values[wire]
        return self.steps[step.name](name, url=f"{url}/{name}", **arguments)


def iterations_step(
    loop: Loop, specs: Sequence[StageSpec], config: LoopPipelineConfig
) -> template.Step:
    """Return the step that runs `tuneloop.kfp.iterations`.

    Raises:
        UserError: a stage spans several nodes.
    """
    for spec in specs:
        if spec.nodes > 1:
            remedy = (
                f"{spec.component.template} would have to run inside of a pod: "
                "set kfp.unroll to loop.iterations, or this to 1"
            )
            raise UserError("nodes", config.nodes, remedy)
    engine = config.engine
    settings = config.loop
    parameters = ["seed"]
    parameters += config.published("")
    loop_plan = plan_loop(loop, specs, config, parameters)
    stages = plan_pod_stages(loop_plan, specs, config.cluster)
    roles: list[ResourceRole] = [stage.resource_role for stage in stages.values()]
    # One pod for all of them, and for the server: it has what any of them asks for.
    role, cluster = config.cluster.merge_roles(roles, engine.server is not None)
    pod_loop = loop_plan.build_pod_loop(stages)
    flags = ["--loop", pod_loop.model_dump_json(exclude_defaults=True)]
    flags += ["--iterations", str(settings.iterations)]
    flags += ["--per-task", str(settings.per_workflow)]
    flags += ["--api", config.kfp.api]
    flags += ["--endpoint", engine.endpoint_url]
    publication = engine.publication
    if publication and publication.url:
        flags += ["--weights", publication.url]
    if engine.server:
        flags += ["--server", _encode_server(config, cluster, role)]
    types = _choose_types(loop)
    image = cluster.images.format(image="rollout")
    create_task = template.define_container_component(
        "iterations",
        "Iterations of the loop.",
        _build_iterations_signature(loop, types),
        ITERATIONS_DESCRIPTIONS,
        image,
        ["python3", "-m", "tuneloop.kfp.iterations"],
        flags,
    )

    def create_uncached_task(**arguments: Any) -> dsl.PipelineTask:
        # A task that is repeated continues after the committed iterations.
        passed_once = template.pass_artifacts_once(arguments, types)
        return create_task(**passed_once).set_caching_options(False)

    return template.make_step(create_uncached_task, image, cluster, config.kfp, role)


def _encode_server(config: LoopPipelineConfig, cluster: Cluster, role: ResourceRole) -> str:
    """Return the JSON of the rollout server, as `tuneloop.kfp.iterations.run_server` takes it.

    Args:
        config: settings of the pipeline.
        cluster: what the pod of the iterations asks for, the server's GPUs included.
        role: of that pod.
    """
    engine = config.engine
    assert engine.server, "the caller has checked it"
    server: JsonObject = {
        "port": engine.server.port,
        "engine_args": engine.options,
        "pull": engine.publication is not None,
    }
    if engine.kind != VLLM:
        server["engine"] = engine.kind
    server_gpus = config.cluster.sampler.gpus
    if server_gpus:
        # The server gets the last GPUs of the pod; the trainer's ranks use the first.
        total = cluster.count_gpus(role)
        server["devices"] = ",".join(map(str, range(total - server_gpus, total)))
    return json.dumps(server, separators=(",", ":"))


def _choose_types(loop: Loop) -> JsonObject:
    """Return value of the loop → artifact type: that of the input which takes it."""
    input_by_wire: dict[str, str] = {}
    for step in loop.steps:
        for name, wire in step.wires.items():
            input_by_wire[wire] = name
    values = list(loop.carry)
    values += loop.constants
    return {name: template.TYPES.get(input_by_wire[name], Dataset) for name in values}


def _build_iterations_signature(loop: Loop, types: JsonMapping) -> Signature:
    """Build the inputs and outputs of the task that runs the iterations.

    Args:
        loop: whose values it takes and passes on.
        types: value of the loop → artifact type.
    """
    kinds: JsonObject = {URL: str, "run_id": str, "seed": int, TARGET: float}
    for name in loop.carry:
        kinds[get_output_name(name)] = Output[types[name]]
    for name, kind in template.UI_TYPES.items():
        kinds[name] = Output[kind]
    kinds["last_iteration"] = dsl.OutputPath(int)
    kinds[output_of(loop.reward).replace("-", "_")] = dsl.OutputPath(float)
    signature = template.define_inputs(types, dict.fromkeys(types, True))
    for name, kind in kinds.items():
        signature[name] = (kind, REQUIRED)
    return signature
