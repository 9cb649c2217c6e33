"""A stage as a KFP container component: the counterpart of `tuneloop.argo.template`. Its pod is
configured by `kfp/task_pod.py`.

A component takes the stage's input artifacts, the URL of its output and all its parameters; it
returns a typed handle of the committed artifact, its results, and the artifacts that the UI shows.
"""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

from kfp import dsl
from kfp.dsl import Dataset, Input, Metrics, Model, Output
from kfp.dsl.pipeline_channel import PipelineArtifactChannel
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tuneloop.argo.pod_fields import SMALL
from tuneloop.config.pipeline import Kfp
from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kfp.io import SAME
from tuneloop.kfp.stage import CHANGES, HANDLE_KEYS, TARGET, URL, get_result_name
from tuneloop.kfp.task_pod import configure_task_pod
from tuneloop.kfp.ui_outputs import UI_OUTPUTS
from tuneloop.workflow.loop import StageSpec
from tuneloop.workflow.plan import PodResources, StagePlan
from tuneloop.workflow.settings import Cluster, ResourceRole

TYPES = {
    "checkpoint": Model,
    "policy": Model,
    "reference": Model,
    "model": Model,
    "metrics": Metrics,
}
"""Name of an input, or kind of an output → artifact type; any other is a Dataset.

kfp refuses to connect an output with an input of another type: a stage that takes a checkpoint or
metrics under a new name needs that name here. `loop.py` and `extensions/trainers/kfp_step.py` read it, too.
"""
UI_TYPES: JsonMapping = {output.name: getattr(dsl, output.type) for output in UI_OUTPUTS}
"""Output that the UI shows → artifact type."""
DESCRIPTIONS = {
    URL: "where the output is committed",
    # The loop ends once the mean of an iteration's rewards is at least this.
    TARGET: "rewards of this mean end the loop",
    SAME: "input → the other input that is the same artifact",
    CHANGES: "parameters that are set for this run, as JSON",
}
"""Parameter of the adapter itself → description; a parameter of a stage has its own."""
REQUIRED = inspect.Parameter.empty
"""The default of an input or output that has none."""
Step = Callable[..., dsl.PipelineTask]
"""Creates a task of the enclosing pipeline: ``step(name, **arguments)``."""
Signature = dict[str, tuple[Any, Any]]
"""Input or output → its kfp type and its default, which may be `REQUIRED`."""


def stage_step(spec: StageSpec, plan: StagePlan, *, cluster: Cluster, kfp: Kfp) -> Step:
    """Return a stage as a step: ``step("sft", url=…, policy=…)``.

    The step takes the task's name in the UI, the input artifacts, ``url`` (where the output is
    committed) and the parameters that the graph sets; the others are those of the plan. A stage of
    several nodes is a JobSet, which the task's pod launches in the namespace ``kfp.jobs``.

    Args:
        spec: the stage.
        plan: its parameters and its pod.
        cluster: settings of the pods.
        kfp: settings of the task.

    Raises:
        UserError: as `check_names` and `configure_task_pod`.
    """
    stage = spec.component
    check_names(stage)
    role = plan.resource_role
    image_name = stage.image
    processes = spec.processes
    resources: PodResources | None = plan.resources
    flags: list[str] = []
    task_cluster = cluster
    if spec.nodes > 1:
        cluster.check_one_memory_limit(role, "a job of several pods")
        # The launcher does not know the base model, from which memory is estimated.
        job_cluster = cluster
        if plan.resources.memory_limit:
            job_cluster = cluster.adjust_role(role, memory=plan.resources.memory_limit)
        job = {
            "nodes": spec.nodes,
            "processes": processes,
            "cluster": job_cluster.model_dump(mode="json", exclude_defaults=True),
            "namespace": kfp.jobs,
        }
        flags = ["--job", escape_json(json.dumps(job, separators=(",", ":")))]
        # The task's pod only talks to the API server.
        role = "cpu"
        image_name = "base"
        processes = 1
        resources = None
        task_cluster = cluster.adjust_role("cpu", **SMALL)
    image = cluster.images.format(image=image_name)
    constants = plan.parameters
    parameter_names = set(constants).union(set(plan.wired) & stage.Params.model_fields.keys())
    create_task = stage_component(stage, image, processes, parameter_names, flags)

    def step(name: str, **arguments: Any) -> dsl.PipelineTask:
        passed_once = pass_artifacts_once(arguments, stage.inputs)
        task = create_task(**constants, **passed_once).set_display_name(name)
        task.set_env_variable("TUNELOOP_NODE_NAME", name)
        configure_task_pod(task, image, task_cluster, kfp, role, resources)
        return task

    return step


def pass_artifacts_once(arguments: JsonMapping, inputs: Iterable[str]) -> JsonObject:
    """Return the arguments of a task with each artifact once: KFP fails at the second (`io.SAME`).

    Args:
        arguments: of a task.
        inputs: the input artifacts in the component's order: of two equal ones, the first is
            passed.

    Returns:
        The arguments, of which `SAME` maps a dropped input to the input that is the same artifact.
    """
    order = list(inputs)
    order += arguments
    unique: JsonObject = {}
    input_by_artifact: dict[str, str] = {}
    same: dict[str, str] = {}
    for name in sorted(arguments, key=order.index):
        value = arguments[name]
        if isinstance(value, PipelineArtifactChannel):
            first_input = input_by_artifact.setdefault(str(value), name)
            if first_input != name:
                same[name] = first_input
                continue
        unique[name] = value
    if same:
        unique[SAME] = same
    return unique


def define_uncached_step(
    name: str,
    summary: str,
    kinds: JsonMapping,
    descriptions: Mapping[str, str],
    cluster: Cluster,
    kfp: Kfp,
    flags: Sequence[str] = (),
) -> Step:
    """Return the program ``tuneloop.kfp.<name>`` as a step that KFP never caches, because it reads
    the current state. Its image is ``base``.

    Args:
        name: of the program, a module of this package, and of the component.
        summary: one sentence for the UI.
        kinds: input or output → type.
        descriptions: input → what it is.
        cluster: settings of the task's pod.
        kfp: settings of the task.
        flags: of the program besides the executor input.
    """
    image = cluster.images.format(image="base")
    create_task = define_container_component(
        name,
        summary,
        {parameter: (kind, REQUIRED) for parameter, kind in kinds.items()},
        descriptions,
        image,
        ["python3", "-m", f"tuneloop.kfp.{name}"],
        flags,
    )

    def create_uncached_task(**arguments: Any) -> dsl.PipelineTask:
        return create_task(**arguments).set_caching_options(False)

    return make_step(create_uncached_task, image, cluster, kfp)


def make_step(
    create_task: Callable[..., dsl.PipelineTask],
    image: str,
    cluster: Cluster,
    kfp: Kfp,
    role: ResourceRole = "cpu",
    resources: PodResources | None = None,
) -> Step:
    """Return a container component as a step."""

    def step(name: str, **arguments: Any) -> dsl.PipelineTask:
        task = create_task(**arguments).set_display_name(name)
        configure_task_pod(task, image, cluster, kfp, role, resources)
        return task

    return step


def stage_component(
    stage: Component,
    image: str,
    processes: int = 1,
    parameter_names: Iterable[str] = (),
    extra: Sequence[str] = (),
) -> Any:
    """Return the stage as a `kfp.dsl` container component.

    Args:
        stage: what to run.
        image: of the container.
        processes: ranks of torchrun.
        parameter_names: parameters that the component has even where their default is None. Other
            parameters whose default is None are left out, because kfp.local cannot leave out an
            integer.
        extra: flags of `tuneloop.kfp.stage` besides the executor input.
    """
    signature, descriptions = stage_signature(stage, set(parameter_names))
    # kfp.local needs the name of an interpreter as the first word.
    _, *launcher, module = stage.command(processes)
    command = ["python3"]
    command += launcher
    command += ["tuneloop.kfp.stage", f"{module}:{stage.name}"]
    return define_container_component(
        stage.name, stage.summary, signature, descriptions, image, command, extra
    )


def stage_signature(
    stage: Component, parameter_names: set[str]
) -> tuple[Signature, dict[str, str]]:
    """Return the inputs and outputs of a stage's component, and name → description.

    `stage.py` reads these inputs and writes these outputs. A change of either changes every
    compiled pipeline (`make golden`).
    """
    fields: dict[str, FieldInfo] = {}
    for name, field in stage.Params.model_fields.items():
        if name in parameter_names or field.default is not None:
            fields[name] = field
    types = {name: TYPES.get(name, Dataset) for name in stage.inputs}
    signature = define_inputs(types, stage.inputs)
    signature[URL] = (str, REQUIRED)
    signature[CHANGES] = (str, "{}")
    for name, field in fields.items():
        signature[name] = _describe_parameter(field)
    # The trainer of an iteration decides whether the loop ends (`tuneloop.kfp.stage`).
    if stage.role == "trainer" and "iteration" in fields:
        signature[TARGET] = (Optional[float], None)
    for name, kind in choose_output_types(stage).items():
        signature[name] = (Output[kind], REQUIRED)
    for name, result_type in stage.results.items():
        signature[get_result_name(stage, name)] = (dsl.OutputPath(result_type), REQUIRED)
    descriptions = dict(DESCRIPTIONS)
    for name, field in fields.items():
        descriptions[name] = field.description or ""
    return signature, descriptions


def check_names(stage: Component) -> None:
    """Raise UserError for a stage that has a name of the adapter: one would replace the other."""
    names = set(stage.Params.model_fields)
    names.update(stage.inputs)
    names.update(stage.results)
    names.add(stage.output)
    taken = names & (DESCRIPTIONS.keys() | UI_TYPES.keys())
    taken |= stage.results.keys() & set(HANDLE_KEYS)
    if taken:
        remedy = "has a meaning of its own on Kubeflow Pipelines; rename it in the stage"
        raise UserError(f"stage {stage.name}", min(taken), remedy)


def define_inputs(types: JsonMapping, required: Mapping[str, bool]) -> Signature:
    """Return the signature of input artifacts.

    Args:
        types: input → artifact type.
        required: input → whether the stage needs it.
    """
    earlier_types: set[Any] = set()
    signature: Signature = {}
    for name, kind in types.items():
        # The second of two with the same type may be the same artifact, and is then not passed.
        if required[name] and kind not in earlier_types:
            signature[name] = (Input[kind], REQUIRED)
        else:
            signature[name] = (Optional[Input[kind]], None)
        earlier_types.add(kind)
    if len(earlier_types) < len(types):
        signature[SAME] = (dict, {})
    return signature


def escape_json(text: str) -> str:
    """Return JSON in which neither KFP nor the kubelet finds a tag or a variable to replace."""
    return text.replace("$(", "\\u0024(").replace("{{", "{\\u007b")


def define_container_component(
    name: str,
    summary: str,
    signature: Signature,
    descriptions: Mapping[str, str],
    image: str,
    command: list[str],
    extra: Sequence[str] = (),
) -> Any:
    """Define a container component.

    Args:
        name: of the component.
        summary: one sentence for the UI.
        signature: its inputs and outputs.
        descriptions: input or output → what it is.
        image: of the container.
        command: begins with ``python3``, which kfp.local replaces by its own interpreter.
        extra: arguments of the program besides the executor input.
    """
    arguments = ["--executor-input", dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER]
    arguments += extra

    def program(*_: Any) -> dsl.ContainerSpec:
        return dsl.ContainerSpec(image=image, command=command, args=arguments)

    program.__name__ = name
    set_interface(program, summary, signature, descriptions)
    return dsl.container_component(program)


def set_interface(
    function: Callable[..., Any],
    summary: str,
    signature: Signature,
    descriptions: Mapping[str, str],
) -> None:
    """Give a function the signature and docstring from which kfp reads an interface."""
    lines = [summary, "", "Args:"]
    parameters: list[inspect.Parameter] = []
    for name, (kind, default) in signature.items():
        if descriptions.get(name):
            lines.append(f"    {name}: {descriptions[name]}")
        # Keyword-only, so that a parameter without a default may follow one with a default.
        parameter = inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default
        )
        parameters.append(parameter)
    function.__doc__ = "\n".join(lines)
    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]


def choose_output_types(stage: Component) -> JsonObject:
    """Return output artifact of a stage → type: the handle, and those that the UI shows."""
    types: JsonObject = {stage.output: TYPES.get(stage.kind, Dataset)}
    for output in UI_OUTPUTS:
        if output.applies_to(stage):
            types[output.name] = UI_TYPES[output.name]
    return types


def _describe_parameter(field: FieldInfo) -> tuple[Any, Any]:
    """Return the kfp type and default of a parameter; one that may be None may be left out."""
    kind = _choose_type(field.annotation)
    if field.is_required():
        return kind, REQUIRED
    if field.default is None:
        return Optional[kind], None
    return kind, field.default


def _choose_type(annotation: Any) -> type:
    """Return the type among str, int, float, bool, list and dict that kfp has for an annotation.

    Of a union the first type counts that is not None: a parameter that may also be of another type
    gets no value of that type on Kubeflow Pipelines.
    """
    origin = get_origin(annotation) or annotation
    parts = get_args(annotation)
    if origin is Annotated:
        return _choose_type(parts[0])
    if origin in (Union, UnionType):
        return _choose_type(next(part for part in parts if part is not type(None)))
    if origin is Literal:
        return type(parts[0])
    if issubclass(origin, BaseModel):
        return dict
    return list if origin is tuple else origin
