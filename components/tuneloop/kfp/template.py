"""A stage as a KFP container component, and the resources of its pods: the counterpart of `tuneloop.argo.template`.

A component takes the stage's input artifacts, the URL of its output and all its parameters; it returns a typed handle
of the committed artifact, its results, and the artifacts that the UI shows."""

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

from kfp import dsl, kubernetes
from kfp.dsl import HTML, Dataset, Input, Markdown, Metrics, Model, Output
from kfp.dsl.pipeline_channel import PipelineArtifactChannel
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from tuneloop.argo.pod_fields import PLAIN, SECRET, SHM, SMALL, STORE, find_role
from tuneloop.config.pipeline import Kfp
from tuneloop.core.component import Component
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kfp.io import SAME
from tuneloop.kfp.stage import TARGET, URL, get_result_name
from tuneloop.workflow.loop import StageSpec
from tuneloop.workflow.settings import AUTO, SANDBOX, Cluster, ResourceRole

TYPES = {
    "checkpoint": Model,
    "policy": Model,
    "reference": Model,
    "model": Model,
    "metrics": Metrics,
}
"""Input or output → artifact type; any other is a Dataset."""
GPU = "nvidia.com/gpu"
REQUIRED = inspect.Parameter.empty
Step = Callable[..., dsl.PipelineTask]


def stage_step(spec: StageSpec, *, dynamic: Sequence[str], cluster: Cluster, kfp: Kfp) -> Step:
    """Return the stage as a function that creates its task: ``step("sft", url=…, policy=…)``. The function takes the
    task's name in the UI, the input artifacts, ``url`` (where the output is committed) and the `dynamic` parameters;
    the other parameters are resolved here, once. A stage of several nodes is a JobSet, which the task's pod launches in
    the namespace ``kfp.jobs``. Raises UserError at a parameter that the stage refuses."""
    component = spec.component
    processes = spec.processes
    nodes = spec.nodes
    given = spec.parameters
    spread = {"expected_world_size": nodes * processes} if nodes > 1 else {}
    fixed = {
        k: v
        for k, v in component.resolve_constants({**given, **spread}, dynamic).items()
        if v is not None
    }
    image = cluster.images.format(image="base" if spread else component.image)
    settings = cluster.model_dump(mode="json", exclude_defaults=True)
    job = {"nodes": nodes, "processes": processes, "cluster": settings, "namespace": kfp.jobs}
    extra = ["--job", json.dumps(job, separators=(",", ":"))] if spread else []
    made = stage_component(component, image, 1 if spread else processes, {*fixed, *dynamic}, extra)
    own = cluster.adjust_role("cpu", **SMALL) if spread else cluster
    role = "cpu" if spread else find_role(component, given, dynamic)

    def step(name: str, **arguments: Any) -> dsl.PipelineTask:
        task = made(**fixed, **pass_artifacts_once(arguments, component.inputs)).set_display_name(
            name
        )
        task.set_env_variable("TUNELOOP_NODE_NAME", name)
        configure_task_pod(task, image, own, kfp, role)
        return task

    return step


def pass_artifacts_once(arguments: JsonMapping, inputs: Iterable[str]) -> JsonObject:
    """Return the arguments of a task with each artifact once; `SAME` maps a dropped input to the input that is the same
    artifact. `inputs` are the input artifacts in the component's order: of two equal ones, the first is passed."""
    passed: JsonObject = {}
    first: dict[str, str] = {}
    same: dict[str, str] = {}
    for name in sorted(arguments, key=[*inputs, *arguments].index):
        value = arguments[name]
        if (
            isinstance(value, PipelineArtifactChannel)
            and (other := first.setdefault(str(value), name)) != name
        ):
            same[name] = other
        else:
            passed[name] = value
    return {**passed, **({SAME: same} if same else {})}


def define_uncached_step(
    name: str,
    summary: str,
    kinds: JsonMapping,
    about: Mapping[str, str],
    cluster: Cluster,
    kfp: Kfp,
) -> Step:
    """Return the program ``tuneloop.kfp.<name>`` as a step that KFP never caches, because it reads the current state.
    `kinds` maps its inputs and outputs, none of them optional, to their types."""
    image = cluster.images.format(image="base")
    signature = {name: (kind, REQUIRED) for name, kind in kinds.items()}
    made = define_container_component(
        name, summary, signature, about, image, ["python3", "-m", f"tuneloop.kfp.{name}"]
    )
    return make_step(
        lambda **arguments: made(**arguments).set_caching_options(False), image, cluster, kfp
    )


def make_step(
    made: Callable[..., dsl.PipelineTask],
    image: str,
    cluster: Cluster,
    kfp: Kfp,
    role: ResourceRole = "cpu",
) -> Step:
    """Return a container component as a step."""

    def step(name: str, **arguments: Any) -> dsl.PipelineTask:
        task = made(**arguments).set_display_name(name)
        configure_task_pod(task, image, cluster, kfp, role)
        return task

    return step


def stage_component(
    component: Component,
    image: str,
    processes: int = 1,
    passed: Iterable[str] = (),
    extra: Sequence[str] = (),
) -> Any:
    """Return the stage as a `kfp.dsl` container component, which has the parameters `passed` even where their default
    is None (kfp.local cannot leave out an integer)."""
    signature, about = stage_signature(component, {*passed})
    _, *start, module = component.command(processes)
    command = ["python3", *start, "tuneloop.kfp.stage", f"{module}:{component.name}"]
    return define_container_component(
        component.name, component.summary, signature, about, image, command, extra
    )


def stage_signature(
    component: Component, passed: set[str]
) -> tuple[dict[str, tuple[Any, Any]], dict[str, str]]:
    """Return name → (kfp type, default) of a stage's inputs and outputs, and name → description."""
    fields = {
        k: f
        for k, f in component.Params.model_fields.items()
        if k in passed or f.default is not None
    }
    ends_loop = component.role == "trainer" and "iteration" in fields
    signature: dict[str, tuple[Any, Any]] = {
        **define_inputs(
            {name: TYPES.get(name, Dataset) for name in component.inputs}, component.inputs
        ),
        URL: (str, REQUIRED),
        **{name: _parameter(field) for name, field in fields.items()},
        **({TARGET: (Optional[float], None)} if ends_loop else {}),
        **{name: (Output[kind], REQUIRED) for name, kind in _artifacts(component).items()},
        **{
            get_result_name(component, k): (dsl.OutputPath(kind), REQUIRED)
            for k, kind in component.results.items()
        },
    }
    about = {name: field.description or "" for name, field in fields.items()}
    return signature, {
        URL: "where the output is committed",
        TARGET: "rewards of this mean end the loop",
        SAME: "input → the other input that is the same artifact",
        **about,
    }


def define_inputs(types: JsonMapping, required: Mapping[str, bool]) -> dict[str, tuple[Any, Any]]:
    """Return the signature of input artifacts; the second of two with the same type may be the same artifact."""
    earlier: set[Any] = set()
    signature: dict[str, tuple[Any, Any]] = {}
    for name, kind in types.items():
        needed = required[name] and kind not in earlier
        signature[name] = (Input[kind], REQUIRED) if needed else (Optional[Input[kind]], None)
        earlier.add(kind)
    return {**signature, **({SAME: (dict, {})} if len(earlier) < len(types) else {})}


def define_container_component(
    name: str,
    summary: str,
    signature: Mapping[str, tuple[Any, Any]],
    about: Mapping[str, str],
    image: str,
    command: list[str],
    extra: Sequence[str] = (),
) -> Any:
    """Define a container component whose program gets the executor input and `extra`. `command` begins with
    ``python3``, which kfp.local replaces by its own interpreter."""

    def program(*_: Any) -> dsl.ContainerSpec:
        arguments = ["--executor-input", dsl.PIPELINE_TASK_EXECUTOR_INPUT_PLACEHOLDER, *extra]
        return dsl.ContainerSpec(image=image, command=command, args=arguments)

    # kfp reads a component's interface from a function's signature and docstring.
    kind = inspect.Parameter.KEYWORD_ONLY
    program.__name__ = name
    program.__doc__ = "\n".join(
        [summary, "", "Args:", *(f"    {k}: {about[k]}" for k in signature if about.get(k))]
    )
    program.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter(k, kind, annotation=each, default=default)
            for k, (each, default) in signature.items()
        ]
    )
    return dsl.container_component(program)


def configure_task_pod(
    task: dsl.PipelineTask, image: str, cluster: Cluster, kfp: Kfp, role: ResourceRole = "cpu"
) -> None:
    """Set the resources, queue, store and rights of a task's pod. Raises UserError if it should share devices, or
    have more memory after the first attempt."""
    if cluster.share:
        remedy = "Kubeflow Pipelines have no field for claims, and no step that releases them: leave it out"
        raise UserError("cluster.share.group", cluster.share.group, remedy)
    cluster.check_one_memory_limit(role, "Kubeflow Pipelines")
    own = cluster.resources(role)
    task.set_cpu_request(own.cpu).set_memory_request(own.memory_request).set_memory_limit(
        own.memory_request
    )
    # The last becomes Argo's maxDuration, a deadline from the start of the first attempt; so it must be long.
    task.set_retry(
        kfp.retries, backoff_duration="10s", backoff_factor=1, backoff_max_duration="8760h"
    )
    task.set_env_variable("TUNELOOP_IMAGE", image)
    kubernetes.set_image_pull_policy(task, "IfNotPresent")
    kubernetes.set_security_context(task, run_as_user=1000, run_as_group=1000, run_as_non_root=True)
    # No variable is read from both: KFP's patch would merge two of one name into one with two sources, which
    # Kubernetes refuses.
    kubernetes.use_config_map_as_env(task, STORE, {key: key for key in PLAIN}, optional=True)
    kubernetes.use_secret_as_env(task, STORE, {key: key for key in SECRET}, optional=True)
    for name, value in cluster.sandbox_environment.items():
        task.set_env_variable(name, value)
    if cluster.sandbox_environment:
        kubernetes.use_secret_as_volume(task, *SANDBOX, optional=True)
    if kfp.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, kfp.image_pull_secrets)
    if kfp.timeout_s:
        kubernetes.set_timeout(task, kfp.timeout_s)
    for claim, path in kfp.volumes.items():
        kubernetes.mount_pvc(task, claim, path)
    if gpus := cluster.count_gpus(role):
        task.set_accelerator_type(GPU).set_accelerator_limit(gpus)
    for label, value in cluster.build_queue_labels(role).items():
        kubernetes.add_pod_label(task, label, value)
    if own.shm:
        limit = None if own.shm == AUTO else own.shm
        kubernetes.empty_dir_mount(task, "shm", SHM, medium="Memory", size_limit=limit)
    for label, value in own.node_selector.items():
        kubernetes.add_node_selector(task, label, value)
    for toleration in own.tolerations:
        kubernetes.add_toleration(task, **toleration.model_dump(exclude_defaults=True))


def _artifacts(component: Component) -> JsonObject:
    """Return the stage's output artifacts: first the handle, then those that the UI shows."""
    outputs: JsonObject = {component.output: TYPES.get(component.kind, Dataset)}
    if component.kind != "metrics":
        outputs["results"] = Metrics
    outputs["preview"] = Markdown
    if component.kind == "checkpoint" and "loss" in component.results:
        outputs["curves"] = HTML
    return outputs


def _parameter(field: FieldInfo) -> tuple[Any, Any]:
    """Return the kfp type and default of a parameter; one that may be None may be left out."""
    kind = _kind(field.annotation)
    if field.is_required():
        return kind, REQUIRED
    return (Optional[kind], None) if field.default is None else (kind, field.default)


def _kind(annotation: Any) -> type:
    origin = get_origin(annotation) or annotation
    if origin is Annotated:
        return _kind(get_args(annotation)[0])
    if origin in (Union, UnionType):
        return _kind(next(part for part in get_args(annotation) if part is not type(None)))
    if origin is Literal:
        return type(get_args(annotation)[0])
    if issubclass(origin, BaseModel):
        return dict
    return list if origin is tuple else origin
