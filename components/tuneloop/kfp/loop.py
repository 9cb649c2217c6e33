"""A loop as tasks of Kubeflow Pipelines: the counterpart of `tuneloop.argo.loop`.

`LoopTasks` draws it in one of two forms, and the stages before and after it. In one task
(`iterations_step`) `tuneloop.kfp.iterations` runs its iterations, stage after stage; written out,
each stage of each iteration is a task.

The words of a loop (step, wire, carry, check, finish) are those of `workflow/loop.py`. Every step
gets the run's parameters (`config.pipeline.PipelineConfig.run_parameters`), too.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kfp import dsl
from kfp.dsl import Dataset, Output

from tuneloop.argo.run_plan import plan_loop, plan_pod_stages
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.config.pipeline import RUN_SETTINGS
from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kfp import template
from tuneloop.kfp.iterations import RUN, get_output_name
from tuneloop.kfp.stage import TARGET, URL
from tuneloop.kfp.template import REQUIRED, Signature
from tuneloop.workflow.loop import Loop, StageSpec, Step, output_of, step_of
from tuneloop.workflow.plan import VLLM
from tuneloop.workflow.settings import Cluster, ResourceRole

DESCRIPTIONS = template.DESCRIPTIONS | {
    URL: "URL of the run, below which the iterations commit their artifacts",
    "run_id": "KFP's own id of the run that this task belongs to",
}
"""Parameter of the task that runs the iterations → description; `RUN_SETTINGS` have their own."""
Steps = JsonMapping
"""Name of a stage → the function that creates its task."""


def select_parameters(stage: Component, values: JsonMapping) -> JsonObject:
    """Return those of `values` that are parameters of a stage."""
    return {name: value for name, value in values.items() if name in stage.Params.model_fields}


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
        shared: the run's parameters, for every stage that has them.
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
        # It tells an evaluation outside of the iterations, as on Argo.
        values["iteration"] = 0
        self.call(check, f"{check.name}-before", self.url, values)
        if is_written_out(self.config):
            self.finish(self.write_out())
            return
        arguments: JsonObject = {TARGET: self.target_reward}
        # The other parameters of the run follow from its URL (`iterations_step`).
        arguments |= {name: self.shared[name] for name in RUN_SETTINGS}
        arguments |= self.values
        task = self.steps["iterations"](
            "iterations", url=self.url, run_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER, **arguments
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
        # The step whose output `reward` is; the one that takes its artifact knows the mean reward.
        scorer = step_of(self.loop.reward)
        for step in self.loop.steps:
            arguments: JsonObject = {}
            # It marks its handle where the reward ends the loop (`REACHED` of `kfp/stage.py`).
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
            # The endpoint is a constant of KFP's stages (`kfp/pipeline.py`, `build_steps`).
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
    published = config.published(RUN)
    loop_plan = plan_loop(loop, specs, config, list(config.run_parameters(RUN)))
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
    if published:
        flags += ["--published", json.dumps(published, separators=(",", ":"))]
    if engine.server:
        flags += ["--server", _encode_server(config, cluster, role)]
    types = _choose_types(loop)
    image = cluster.images.format(image="rollout")
    create_task = template.define_container_component(
        "iterations",
        "Iterations of the loop.",
        _build_iterations_signature(loop, types, config),
        DESCRIPTIONS | template.describe_run_settings(config),
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
    """Return the JSON of the rollout server, as `tuneloop.kfp.rollout_server` takes it.

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


def _build_iterations_signature(
    loop: Loop, types: JsonMapping, config: LoopPipelineConfig
) -> Signature:
    """Build the inputs and outputs of the task that runs the iterations.

    Args:
        loop: whose values it takes and passes on.
        types: value of the loop → artifact type.
        config: settings of the pipeline.
    """
    kinds: JsonObject = {URL: str, "run_id": str}
    # The pipeline passes them on, so that they have no default here.
    for name, (kind, _) in template.define_run_settings(config).items():
        kinds[name] = kind
    kinds[TARGET] = float
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
