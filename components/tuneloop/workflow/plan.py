"""What a workflow will run: its stages with typed parameters, its rollout servers, and its loop.

The plan is made where a pipeline's settings and its stages meet (`tuneloop.argo.run_plan`). The
Workflow is rendered from it and carries it as an annotation, from which `read_plan` reads it again.
Code that needs to know what a stage is started with asks the plan, not the words of a rendered
command. The graph itself, and the parameters that a user may still change when a workflow is
submitted (``iterations``, ``target-reward``), are the Workflow's.

Two make plans: `argo/run_plan.py`, and `kfp/task_plan.py` from its parts. `argo/memory_estimate.py`
fills in the memory of pods. A new field has a default, and is left out of the annotation where it
has it: plans of earlier versions lack it, and the golden files stay. Tuneloop of an earlier version
refuses a plan with a field that it does not know.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Literal

from pydantic import BaseModel, ValidationError

from tuneloop.core.artifacts import Role
from tuneloop.core.component import Component, build_command, find_component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import encode_flags, encode_value, to_kebab_case
from tuneloop.workflow.manifest import effective_spec
from tuneloop.workflow.pod_loop import PerPod, PodLoop, StageCall
from tuneloop.workflow.settings import ResourceRole

PLAN = "tuneloop.dev/plan"
"""Annotation of a Workflow: its `RunPlan`, as JSON."""
VLLM = "vllm"
"""The engine of a server whose command names none. The memory of its servers is known; of servers
of any other engine `argo/memory_estimate.py` knows the weights alone, and `planning/limits.py`
refuses nothing."""
NATIVE = "native"
"""The trainer backend that is tuneloop's own; torchrun starts its ranks."""


class PodResources(BaseModel, frozen=True, extra="forbid"):
    """What a pod requests, as Kubernetes writes quantities.

    `argo/pod_fields.py` makes it of a role's settings (`plan_resources`), and renders it
    (`pod_fields`); `argo/jobset.py` and `kfp/task_pod.py` render it, too.

    Attributes:
        memory_limit: None: there is no limit, or `argo/memory_estimate.py` has not set it yet.
        accelerators: GPUs of the pod; those of a claim that runs share are not counted.
        shared_memory: size of an in-memory ``/dev/shm``; ``auto``: all of the pod's memory; empty:
            the runtime's own.
    """

    cpu: str
    memory_request: str
    memory_limit: str | None = None
    accelerators: int = 0
    shared_memory: str = ""


class PodPlan(BaseModel, frozen=True, extra="forbid"):
    """A pod that a template starts.

    Attributes:
        template: the template's name; a stage of several nodes is a graph of this name.
        image: the container's, with its tag.
        resource_role: what the pod computes, which decides what it requests and where it may run.
    """

    template: str
    image: str
    resource_role: ResourceRole
    resources: PodResources


class StagePlan(PodPlan):
    """A stage, and the pod that runs it.

    Attributes:
        module: what its container starts.
        role: what it is in a loop.
        parameters: those that are the same in each call, as JSON values; what is None is left out.
        wired: the inputs, the output and the parameters that the graph sets while it runs.
        output: the name of its output.
        processes: ranks that torchrun starts in each pod.
        nodes: pods that work together.
    """

    module: str
    role: Role | None = None
    parameters: JsonObject = {}
    wired: tuple[str, ...]
    output: str
    processes: int = 1
    nodes: int = 1

    @property
    def component(self) -> Component | None:
        """The stage as it is declared; None where its module is not tuneloop's and has not been
        imported here.
        """
        # The module may be a program of somebody else, which reading a plan must not start.
        return find_component(self.module, self.template)

    @property
    def job_template(self) -> str:
        """The template whose pods run the stage: its own, or the one that applies its JobSet."""
        return self.template if self.nodes == 1 else f"{self.template}-job"

    @property
    def backend(self) -> str:
        """The trainer backend."""
        return str(self.parameters.get("backend", NATIVE))

    @property
    def ranks(self) -> int:
        """Ranks in each pod. A backend other than tuneloop's own starts them itself."""
        if self.backend == NATIVE:
            return self.processes
        return int(self.parameters.get("expected_world_size", 1))

    @property
    def engine_args(self) -> JsonObject:
        """What is passed on to the engine; empty where the stage has none."""
        options: JsonObject = self.parameters.get("engine_args", {})
        return options

    def number(self, name: str) -> float | None:
        """Return a parameter that is a number; None where it is absent, or decided while the
        workflow runs.
        """
        # To Python a boolean is an integer, too.
        value = self.parameters.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        return float(value)

    def build_call(self, wires: Mapping[str, str]) -> StageCall:
        """Return how a pod of several iterations calls the stage.

        Args:
            wires: input or parameter → the value of the loop that it takes, as in
                `tuneloop.workflow.loop.Step`.
        """
        # What the pod sets in each iteration must not stand in the command as well.
        constants = {name: value for name, value in self.parameters.items() if name not in wires}
        return StageCall(
            name=self.template,
            command=build_command(self.module, self.processes),
            flags=encode_flags(constants),
            wires={to_kebab_case(name): wire for name, wire in wires.items()},
            output=to_kebab_case(self.output),
        )


class ServerPlan(PodPlan):
    """The rollout servers of a workflow, and the pod of each.

    Attributes:
        kind: of the engine, one that serves.
        port: where each listens.
        engine_args: the engine's own options.
        replicas: how many there are.
        weights: URL of the versions that they follow; None: they load the checkpoints that they are
            given.
        asleep: what a pod requests while its server sleeps; empty: the same as awake.
    """

    kind: str = VLLM
    port: int
    engine_args: JsonObject = {}
    replicas: int = 1
    weights: str | None = None
    asleep: dict[str, str] = {}

    @property
    def flags(self) -> list[str]:
        """The flags of `inference/server.py` that do not depend on where the server runs."""
        flags = ["--port", str(self.port)]
        if self.kind != VLLM:
            flags += ["--engine", self.kind]
        flags += ["--engine-args", encode_value(self.engine_args)]
        return flags


class StepPlan(BaseModel, frozen=True, extra="forbid"):
    """A step of a loop: the stage that it calls, and its wires (`tuneloop.workflow.loop.Step`)."""

    stage: str
    wires: dict[str, str]


class LoopPlan(BaseModel, frozen=True, extra="forbid"):
    """A loop, in the terms of `tuneloop.workflow.loop.Loop`.

    Attributes:
        evaluate_every: iterations between two runs of `check`; 0: it runs only before and after the
            loop.
        asynchronous: the next batch is sampled while the policy is updated on this one.
        iterations_per_pod: 0: each stage has a pod of its own.
        pod: the pod that runs iterations; None where each stage has a pod of its own.
    """

    steps: tuple[StepPlan, ...]
    carry: dict[str, str]
    reward: str
    check: StepPlan
    evaluate_every: int = 0
    asynchronous: bool = False
    iterations_per_pod: PerPod = 0
    pod: PodPlan | None = None

    @property
    def stages(self) -> list[str]:
        """The stages that each iteration runs."""
        return [step.stage for step in self.steps]

    @property
    def trainer(self) -> str:
        """The stage that makes the next policy."""
        return self.steps[-1].stage

    @property
    def pod_stages(self) -> list[str]:
        """The stages that a pod of iterations runs, in the order in which they begin."""
        return [*self.stages, *([self.check.stage] if self.evaluate_every else [])]

    def build_pod_loop(self, stages: Mapping[str, StagePlan]) -> PodLoop:
        """Return what a pod of several iterations is given.

        Args:
            stages: those of the run, by template.
        """
        check: StageCall | None = None
        if self.evaluate_every:
            check = stages[self.check.stage].build_call(self.check.wires)
        return PodLoop(
            steps=[stages[step.stage].build_call(step.wires) for step in self.steps],
            carry=self.carry,
            reward=self.reward,
            check=check,
            evaluate_every=self.evaluate_every,
        )


class RunPlan(BaseModel, frozen=True, extra="forbid"):
    """What a workflow runs: `stages` and `servers` by template, and the loop.

    A plan of another `form` is not read: `find_plan` refuses its workflow. Code that displays or
    checks a run calls `find_plan`, as a workflow that was drawn by hand has no plan; code that
    computes from the plan calls `read_plan`.
    """

    form: Literal[1] = 1
    pipeline: str
    stages: dict[str, StagePlan] = {}
    servers: dict[str, ServerPlan] = {}
    loop: LoopPlan | None = None

    @property
    def pods(self) -> Iterator[PodPlan]:
        """The pods of stages that have one of their own, of servers, and of iterations."""
        # Stages that a pod of iterations runs have no pod of their own.
        inner = self.loop.stages if self.loop and self.loop.pod else []
        yield from (stage for name, stage in self.stages.items() if name not in inner)
        yield from self.servers.values()
        if self.loop and self.loop.pod:
            yield self.loop.pod

    def find_pod(self, template: str) -> StagePlan | ServerPlan | None:
        """Return the stage or the server whose pods a template starts; None where it starts another
        program.
        """
        if template in self.servers:
            return self.servers[template]
        return next(
            (stage for stage in self.stages.values() if stage.job_template == template), None
        )

    def dump(self) -> str:
        """Dump the plan as JSON; equal plans give equal text."""
        fields = self.model_dump(mode="json", exclude_defaults=True)
        return json.dumps({"form": self.form, **fields}, separators=(",", ":"), ensure_ascii=False)


def read_plan(workflow: JsonMapping) -> RunPlan:
    """Read the plan of a workflow, or of a workflow that was made from a WorkflowTemplate.

    Raises:
        UserError: the workflow carries no plan, or one of another form.
    """
    plan = find_plan(workflow)
    if plan is None:
        remedy = f"carries no plan (annotation {PLAN}): render it again"
        raise UserError("workflow", _get_name(workflow), remedy)
    return plan


def find_plan(workflow: JsonMapping) -> RunPlan | None:
    """Return the plan of a workflow; None where it carries none, as one that was drawn by hand.

    Raises:
        UserError: it carries a plan of another form.
    """
    text = _find_text(workflow)
    if text is None:
        return None
    try:
        return RunPlan.model_validate_json(text)
    except ValidationError as error:
        remedy = f"carries a plan of another version (annotation {PLAN}): render it again"
        raise UserError("workflow", _get_name(workflow), remedy) from error


def _get_name(workflow: JsonMapping) -> str | None:
    """Return the name of a workflow, or what it will begin with."""
    metadata = workflow.get("metadata") or {}
    name: str | None = metadata.get("name") or metadata.get("generateName")
    return name


def _find_text(workflow: JsonMapping) -> str | None:
    """Return the text of a workflow's plan; None where it carries none."""
    annotations = (workflow.get("metadata") or {}).get("annotations") or {}
    if PLAN in annotations:
        return str(annotations[PLAN])
    # A WorkflowTemplate has it among what the controller writes into its workflows.
    spec = effective_spec(workflow)
    given = (spec.get("workflowMetadata") or {}).get("annotations") or {}
    return given.get(PLAN)
