"""What the tasks of a pipeline run, and what their pods request, without kfp.

It is planned when a pipeline is compiled, and again in its first task, with the settings that a user
has typed (`tuneloop.kfp.configure`).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tuneloop.argo.memory_estimate import context_of, estimate_pod, model_of
from tuneloop.argo.pod_fields import plan_resources
from tuneloop.argo.run_plan import POD, plan_loop, plan_pod_stages, plan_server, plan_stage
from tuneloop.config.loop import LoopPipelineConfig
from tuneloop.config.model_facts import Model
from tuneloop.config.pipeline import PipelineConfig
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.workflow.loop import Loop, StageSpec
from tuneloop.workflow.plan import VLLM, PodPlan, PodResources, ServerPlan, StagePlan
from tuneloop.workflow.quantities import parse_resource_quantity
from tuneloop.workflow.settings import Cluster, ResourceRole

RUN = "@run@"
"""What stands for the URL of the run in the options of `tuneloop.kfp.iterations`, where
`build_values` replaces it: the URL is known in the run alone."""


def name_changes(task: str) -> str:
    """Return the output of the first task that says what a task does otherwise than it was
    compiled.
    """
    return f"{task.replace('-', '_')}_settings"


@dataclass(frozen=True)
class IterationsPlan:
    """The task that runs the iterations of a loop.

    Attributes:
        pod: what runs it.
        options: name → value, as JSON, of the flags of the program `tuneloop.kfp.iterations`; those
            that are None are left out.
    """

    pod: PodPlan
    options: JsonObject


@dataclass(frozen=True)
class TaskPlan:
    """The tasks of a pipeline.

    Attributes:
        pipeline: its name.
        stages: template → stage, with the pod of its task. All stages are here, also those of
            `repeated`.
        repeated: templates of the stages that the task of the iterations runs, which have no task
            of their own.
        iterations: None: there is no loop, or each stage of each iteration is a task.
        written_out: the iterations whose stages are tasks; 0 where none are.
        model: the base model's shape, or why it is unknown.
    """

    pipeline: str
    stages: dict[str, StagePlan]
    repeated: tuple[str, ...]
    iterations: IterationsPlan | None
    written_out: int
    model: Model | str

    @property
    def has_loop(self) -> bool:
        """Whether some stages are repeated."""
        return self.iterations is not None or self.written_out > 0

    @property
    def pods(self) -> dict[str, PodPlan]:
        """Task → its pod."""
        pods: dict[str, PodPlan] = {
            name: stage for name, stage in self.stages.items() if name not in self.repeated
        }
        if self.iterations:
            pods[POD] = self.iterations.pod
        return pods

    @property
    def configured(self) -> list[str]:
        """What the first task of a run configures: the stages, and the task of the iterations."""
        names = list(self.stages)
        if self.iterations:
            names.append(POD)
        return names

    @property
    def unlimited(self) -> list[PodPlan]:
        """The pods that compute with a model, and whose memory is not known."""
        return [
            pod
            for pod in self.pods.values()
            if pod.resource_role != "cpu" and pod.resources.memory_limit is None
        ]

    def describe_unlimited(self) -> str:
        """Say which pods have no limit of memory, because it is not known; empty if all have one."""
        if not self.unlimited:
            return ""
        tasks = ", ".join(
            f"{pod.template} (requests {pod.resources.memory_request})" for pod in self.unlimited
        )
        roles = sorted({pod.resource_role for pod in self.unlimited})
        settings = ", ".join(f"cluster.{role}.memory" for role in roles)
        reason = f": {self.model}" if isinstance(self.model, str) else ""
        return (
            f"The memory of these tasks is not known, so that they have no limit: {tasks}{reason}. "
            f"{settings} sets it."
        )


def plan_tasks(
    name: str, config: Any, specs: Sequence[StageSpec], loop: Loop | None = None
) -> TaskPlan:
    """Plan the tasks of a pipeline.

    Args:
        name: of the pipeline.
        config: a `PipelineConfig`; with a loop, a `LoopPipelineConfig`.
        specs: its stages.
        loop: what repeats some of them.

    Raises:
        UserError: a parameter is refused, Kubeflow Pipelines do not support a setting, a step of
            the loop is not among the stages, or the model's configuration cannot be read.
    """
    shared = dict(config.run_settings)
    # The graph sets them in every stage that has them.
    wired = list(config.published(""))
    if loop:
        loop.check_specs(specs)
        _refuse_unsupported_settings(config)
        shared["endpoint"] = config.engine.endpoint_url or None
        wired.append("iteration")
    stages: dict[str, StagePlan] = {}
    for spec in specs:
        stage = plan_stage(spec.with_shared(shared), config.cluster, spec.accepted(wired))
        stages[stage.template] = stage
    # Either one task runs the iterations, or each of their stages has a task.
    iterations: IterationsPlan | None = None
    inner: dict[str, StagePlan] = {}
    server: ServerPlan | None = None
    if loop and not is_written_out(config):
        inner = _plan_inner_stages(loop, specs, config)
        if config.engine.server:
            server = plan_server(config.engine.server, config)
        iterations = _plan_iterations(loop, specs, config, inner, server)
    plan = TaskPlan(
        pipeline=name,
        stages=stages,
        repeated=tuple(step.name for step in loop.steps) if loop and iterations else (),
        iterations=iterations,
        written_out=count_written_out(config, loop),
        model=model_of(stages.values()),
    )
    return _estimate_memory(plan, config, inner, server)


def is_written_out(config: LoopPipelineConfig) -> bool:
    """Return whether each stage of each iteration is a task of its own."""
    return config.loop.iterations <= config.kfp.unroll


def count_written_out(config: PipelineConfig, loop: Loop | None) -> int:
    """Return the iterations of a loop whose stages are tasks of their own."""
    if loop and isinstance(config, LoopPipelineConfig) and is_written_out(config):
        return config.loop.iterations
    return 0


def _refuse_unsupported_settings(config: Any) -> None:
    """Raise UserError for a setting of a loop that Kubeflow Pipelines do not support.

    A setting that only Argo and one machine carry out is added here, or it has no effect on
    Kubeflow Pipelines and nobody is told; one of an engine is added to `config/engines.py:
    local_settings`. What is set of pods is refused by `task_pod.py`.
    """
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


def _plan_inner_stages(
    loop: Loop, specs: Sequence[StageSpec], config: LoopPipelineConfig
) -> dict[str, StagePlan]:
    """Plan the stages that the task of the iterations runs.

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
    loop_plan = plan_loop(loop, specs, config, config.published(RUN))
    shared_specs = [spec.with_shared(config.run_settings) for spec in specs]
    return plan_pod_stages(loop_plan, shared_specs, config.cluster)


def _plan_iterations(
    loop: Loop,
    specs: Sequence[StageSpec],
    config: LoopPipelineConfig,
    inner: dict[str, StagePlan],
    server: ServerPlan | None,
) -> IterationsPlan:
    """Plan the task that runs the iterations, whose memory `_estimate_memory` estimates later.

    Each option is a flag of the same name in `iterations.py: _parse_options`.
    """
    loop_plan = plan_loop(loop, specs, config, config.published(RUN))
    roles: list[ResourceRole] = [stage.resource_role for stage in inner.values()]
    # One pod for all of them, and for the server: it has what any of them asks for.
    role, cluster = config.cluster.merge_roles(roles, server is not None)
    pod = PodPlan(
        template=POD,
        image=cluster.images.format(image="rollout"),
        resource_role=role,
        resources=plan_resources(role, cluster),
    )
    pod_loop = loop_plan.build_pod_loop(inner)
    options: JsonObject = {
        "loop": pod_loop.model_dump_json(exclude_defaults=True),
        "iterations": config.loop.iterations,
        "per_task": config.loop.per_workflow,
        "api": config.kfp.api,
        "endpoint": config.engine.endpoint_url,
        "published": config.published(RUN) or None,
        "server": None,
    }
    if server:
        gpus = pod.resources.accelerators
        options["server"] = _describe_server(server, gpus, config.cluster.sampler.gpus)
    return IterationsPlan(pod, options)


def _describe_server(server: ServerPlan, gpus: int, server_gpus: int) -> JsonObject:
    """Describe the rollout server, as `rollout_server.py: run_server` takes it.

    It is compiled into pipelines: older ones lack a key that is added.

    Args:
        server: its plan.
        gpus: of the pod of the iterations, the server's included.
        server_gpus: those of the server.
    """
    description: JsonObject = {
        "flags": server.flags,
        "port": server.port,
        "pull": server.weights is not None,
    }
    if server_gpus:
        # The server gets the last GPUs of the pod; the trainer's ranks use the first.
        description["devices"] = ",".join(map(str, range(gpus - server_gpus, gpus)))
    return description


def _estimate_memory(
    plan: TaskPlan,
    config: PipelineConfig,
    inner: dict[str, StagePlan],
    server: ServerPlan | None,
) -> TaskPlan:
    """Return the plan with the memory of the pods that have no limit yet, as far as it is known.

    For Argo `argo/memory_estimate.py: plan_memory` does it, with the same `estimate_pod`.

    Args:
        plan: of the tasks.
        config: settings of the pipeline.
        inner: the stages that the task of the iterations runs.
        server: the rollout server beside them.
    """
    model = plan.model
    # Without its shape nothing is estimated: pods keep the requests of their roles.
    if not isinstance(model, Model):
        return plan
    processes: list[StagePlan | ServerPlan] = list(plan.stages.values())
    if server:
        processes.append(server)
    context = context_of(processes)
    estimate = partial(estimate_pod, model=model, context=context, cluster=config.cluster)
    stages: dict[str, StagePlan] = {}
    for name, stage in plan.stages.items():
        engine = find_engine(stage, config.cluster)
        # Such a stage holds what a server would.
        if engine:
            resources = _drop_limit(estimate(engine, [engine]).resources, stage.resources)
            stages[name] = stage.model_copy(update={"resources": resources})
        else:
            stages[name] = estimate(stage, [stage])
    iterations = plan.iterations
    if iterations:
        pod = estimate(iterations.pod, list(inner.values()))
        if server:
            # Both run at once, and share the pod's memory.
            both = [pod.resources, estimate(server, [server]).resources]
            pod = pod.model_copy(update={"resources": _add_memory(both)})
        iterations = replace(iterations, pod=pod)
    return replace(plan, stages=stages, iterations=iterations)


def find_engine(stage: StagePlan, cluster: Cluster) -> ServerPlan | None:
    """Return vLLM as a server, for the estimate of memory, if a stage runs it in its own process;
    else None.
    """
    is_called = stage.parameters.get("endpoint") or "endpoint" in stage.wired
    if stage.parameters.get("engine") != VLLM or is_called:
        return None
    return ServerPlan(
        template=stage.template,
        image=stage.image,
        resource_role=stage.resource_role,
        resources=plan_resources(stage.resource_role, cluster),
        # Nothing listens.
        port=1,
        engine_args=stage.engine_args,
    )


def _drop_limit(estimate: PodResources, resources: PodResources) -> PodResources:
    """Return the resources of a pod with an estimated request, and its own limit if it has one.

    An engine in the process of a stage was not measured, and a guess must not kill a pod.
    """
    return resources.model_copy(update={"memory_request": estimate.memory_request})


def _add_memory(resources: Sequence[PodResources]) -> PodResources:
    """Return the first resources with the memory of all; without a limit where one has none."""
    limits = [item.memory_limit for item in resources]
    update: JsonObject = {
        "memory_request": _add_quantities(item.memory_request for item in resources),
        "memory_limit": None if None in limits else _add_quantities(filter(None, limits)),
    }
    return resources[0].model_copy(update=update)


def _add_quantities(quantities: Iterable[str]) -> str:
    total = sum(parse_resource_quantity(quantity) for quantity in quantities)
    return f"{int(total) >> 20}Mi"
