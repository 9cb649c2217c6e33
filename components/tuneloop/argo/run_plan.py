"""Plan what a pipeline's workflow runs, from its settings and its stages
(`tuneloop.workflow.plan`).

`argo/template.py` and `argo/loop.py` render the plan. `kfp/task_plan.py` plans the tasks of
Kubeflow Pipelines by functions of this module, and `planning/` reads the plan that a workflow
carries. `tests/unit/workflow/test_plan.py` compares plans with what is rendered.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from tuneloop.argo.jobset import enable_shared_memory
from tuneloop.argo.memory_estimate import plan_memory
from tuneloop.argo.pod_fields import find_role, plan_resources
from tuneloop.argo.tasks import RUN
from tuneloop.config.engines import ServingEngine
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.config.pipeline import PipelineConfig
from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.loop import Loop, StageSpec, Step
from tuneloop.workflow.plan import LoopPlan, PodPlan, RunPlan, ServerPlan, StagePlan, StepPlan
from tuneloop.workflow.quantities import parse_resource_quantity
from tuneloop.workflow.settings import Cluster, ResourceRole

SERVER = "serve"
"""The template of the rollout servers; of several, also the beginning of their tasks' names.
`cluster/serving.py` finds it by this name, which is written out there; the record of starts is
called so, too (`argo/template.py: server_template`)."""
POD = "iterations"
"""The template of a pod that runs iterations; on KFP the task that does (`kfp/loop.py`).
`argo/loop.py: build_pods` gives the name to its task, and writes it out."""


def plan_run(
    name: str, config: Any, specs: Sequence[StageSpec], loop: Loop | None = None
) -> RunPlan:
    """Plan a pipeline's workflow.

    Args:
        name: the pipeline's.
        config: a `PipelineConfig`; with a loop, a `LoopPipelineConfig`.
        specs: its stages.
        loop: what repeats some of them.

    Raises:
        UserError: a parameter is refused, a step of the loop is not among the stages, the model's
            configuration cannot be read, or a server would request more while it sleeps.
    """
    if loop:
        loop.check_specs(specs)
    stages = {spec.component.template: plan_pipeline_stage(spec, config, loop) for spec in specs}
    plan = RunPlan(pipeline=name, stages=stages)
    if loop:
        plan = _add_loop(plan, config, specs, loop)
    plan = plan_memory(plan, config.cluster)
    for server in plan.servers.values():
        check_asleep(server)
    return plan


def plan_stages(
    name: str, specs: Sequence[StageSpec], cluster: Cluster, wired: Sequence[str] = ()
) -> RunPlan:
    """Plan the stages of a graph that is written for Argo itself (docs/hera-and-argo.md). No
    settings of the run are added to those of its stages: a seed is a parameter of each `StageSpec`.

    Args:
        name: the pipeline's.
        specs: its stages.
        cluster: where they run.
        wired: parameters that the graph sets, of those stages that have them.
    """
    stages: dict[str, StagePlan] = {}
    for spec in specs:
        stages[spec.component.template] = plan_stage(
            spec,
            cluster,
            spec.accepted(wired),
        )
    return plan_memory(RunPlan(pipeline=name, stages=stages), cluster)


def plan_pipeline_stage(spec: StageSpec, config: PipelineConfig, loop: Loop | None) -> StagePlan:
    """Plan a stage that has a pod of its own; the run's parameters are among its own."""
    wired = spec.accepted(["iteration", "endpoint"]) if loop else []
    return plan_stage(spec.with_shared(config.run_parameters(RUN)), config.cluster, wired)


def plan_stage(spec: StageSpec, cluster: Cluster, wired: Sequence[str] = ()) -> StagePlan:
    """Plan a stage and its pod, whose memory `plan_memory` estimates later.

    Args:
        spec: the stage, with its parameters.
        cluster: where it runs.
        wired: parameters that the graph sets while it runs.

    Raises:
        UserError: a parameter is refused.
    """
    component = spec.component
    parameters = dict(spec.parameters)
    if spec.nodes > 1:
        parameters["expected_world_size"] = spec.nodes * spec.processes
    role = find_role(component, parameters, wired)
    resources = plan_resources(role, cluster)
    if spec.nodes > 1:
        resources = enable_shared_memory(resources)
    # The inputs and the output are artifacts of the run: the graph always sets them.
    graph_names = list(component.inputs)
    graph_names.append(component.output)
    graph_names += wired
    return StagePlan(
        template=component.template,
        module=component.module,
        role=component.role,
        parameters=resolve_parameters(component, parameters, wired),
        wired=tuple(graph_names),
        output=component.output,
        processes=spec.processes,
        nodes=spec.nodes,
        image=cluster.images.format(image=component.image),
        resource_role=role,
        resources=resources,
    )


def resolve_parameters(
    component: Component, parameters: JsonMapping, wired: Sequence[str]
) -> JsonObject:
    """Return the parameters that a command states, as JSON values: those that are not wired, and
    not None.
    """
    resolved = component.resolve_constants(parameters, wired)
    return {name: value for name, value in resolved.items() if value is not None}


def _add_loop(
    plan: RunPlan, config: LoopPipelineConfig, specs: Sequence[StageSpec], loop: Loop
) -> RunPlan:
    """Return the plan with the loop, its servers, and the stages that a pod of iterations runs.

    A stage gets the run's settings on two ways: in a pod of its own by `plan_pipeline_stage`, in a
    pod of iterations here.
    """
    server = config.engine.server
    servers = {SERVER: plan_server(server, config)} if server else {}
    if not config.iterations_per_pod:
        loop_plan = plan_loop(loop, specs, config)
        return plan.model_copy(update={"servers": servers, "loop": loop_plan})
    # The URL of the weights is a value of the loop here, which the pod gives to its stages.
    loop_plan = plan_loop(loop, specs, config, config.published(RUN))
    specs_with_settings = [spec.with_shared(config.run_settings) for spec in specs]
    inner_stages = plan_pod_stages(loop_plan, specs_with_settings, config.cluster)
    pod = plan_pod(inner_stages.values(), config.cluster)
    loop_plan = loop_plan.model_copy(update={"pod": pod})
    stages = dict(plan.stages)
    # They have the pod's image, role and resources together.
    for name in loop_plan.stages:
        stage = inner_stages[name].model_dump() | pod.model_dump(exclude={"template"})
        stages[name] = StagePlan.model_validate(stage)
    return plan.model_copy(update={"stages": stages, "servers": servers, "loop": loop_plan})


def plan_loop(
    loop: Loop, specs: Sequence[StageSpec], config: LoopPipelineConfig, wired: Iterable[str] = ()
) -> LoopPlan:
    """Plan a loop, without the pod that runs its iterations.

    Args:
        loop: as the pipeline describes it.
        specs: the pipeline's stages.
        config: its settings.
        wired: parameters that the graph sets, in addition to the steps' own wires, of those stages
            that have them.
    """
    specs_by_component = {spec.component: spec for spec in specs}

    def plan_step(step: Step) -> StepPlan:
        # Such a parameter takes the value of the loop that has its name.
        names = specs_by_component[step.component].accepted(list(wired))
        return StepPlan(stage=step.name, wires=step.wires | dict(zip(names, names)))

    settings = config.loop
    return LoopPlan(
        steps=tuple(plan_step(step) for step in loop.steps),
        carry=dict(loop.carry),
        reward=loop.reward,
        check=plan_step(loop.check),
        evaluate_every=settings.evaluate_every,
        asynchronous=settings.asynchronous,
        iterations_per_pod=config.iterations_per_pod,
    )


def plan_pod_stages(
    loop_plan: LoopPlan, specs: Sequence[StageSpec], cluster: Cluster
) -> dict[str, StagePlan]:
    """Plan the stages that a pod of iterations runs: template → stage, with what a pod of its own
    would request.
    """
    specs_by_template = {spec.component.template: spec for spec in specs}
    stages: dict[str, StagePlan] = {}
    steps = list(loop_plan.steps)
    if loop_plan.evaluate_every:
        steps.append(loop_plan.check)
    for step in steps:
        spec = specs_by_template[step.stage]
        wired = [name for name in step.wires if name not in spec.component.inputs]
        stages[step.stage] = plan_stage(spec, cluster, wired)
    return stages


def plan_pod(stages: Iterable[StagePlan], cluster: Cluster) -> PodPlan:
    """Plan the pod that runs stages of a loop one after another, with the accelerators of the stage
    that has most. Its image is always ``rollout``, so a stage of the loop needs its libraries
    there.
    """
    role, merged = cluster.merge_roles([stage.resource_role for stage in stages])
    return PodPlan(
        template=POD,
        image=cluster.images.format(image="rollout"),
        resource_role=role,
        resources=plan_resources(role, merged),
    )


def plan_server(server: ServingEngine, config: LoopPipelineConfig) -> ServerPlan:
    """Plan the rollout servers of a loop; `server` are the engine's settings of them.

    A field of `ServerPlan` that is set here reaches servers by `ServerPlan.flags`, or else by
    `argo/template.py: server_template` and on KFP by `kfp/task_plan.py: _describe_server`.
    """
    cluster = config.cluster
    role: ResourceRole = "sampler"
    return ServerPlan(
        template=SERVER,
        image=cluster.images.format(image="rollout"),
        resource_role=role,
        resources=plan_resources(role, cluster),
        kind=server.kind,
        port=server.port,
        engine_args=server.options,
        replicas=server.replicas,
        weights=config.published(RUN).get("weights"),
        asleep=server.asleep_requests,
    )


def check_asleep(server: ServerPlan) -> None:
    """Raise UserError if a server would request more asleep than awake, which no queue has
    admitted.
    """
    awake = {"cpu": server.resources.cpu, "memory": server.resources.memory_request}
    for name, amount in server.asleep.items():
        if parse_resource_quantity(amount) > parse_resource_quantity(awake[name]):
            remedy = (
                f"is more than the server requests awake ({awake[name]}): "
                f"lower it, or raise cluster.sampler.{name}"
            )
            raise UserError(f"engine.asleep.{name}", amount, remedy)
