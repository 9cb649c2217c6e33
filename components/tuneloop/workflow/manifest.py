"""Read Workflows of Argo: what the local executor supports of them (`check_workflow`), and what is
asked of them here and on a cluster (calls, dependencies, labels, the spec that is run).

The fields that the local executor supports are in ``local_fields.yaml``; any other is refused by
name before anything runs. So a field that `argo/` begins to render needs a word there, with a dash
where it means nothing on one machine, or else `local/` has to do what it says. Tests:
`tests/unit/workflow/test_spec.py`.
"""

import functools
import json
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.pod_hook import list_pod_hooks
from tuneloop.workflow.settings import SANDBOX, TOKEN_SECRET

KINDS = ("container", "dag")
RETRIED_PHASES = {"Always": ("Failed", "Error"), "OnFailure": ("Failed",), "OnError": ("Error",)}
"""Policy of a retry strategy → phases after which another attempt may follow. Argo's
``OnTransientError`` goes by the texts of errors that only a cluster has."""
UNSUPPORTED = "is not supported by the local executor; remove it, or submit to a cluster"

FIELD_PATHS = (
    "metadata.name",
    "metadata.namespace",
    "metadata.uid",
    "spec.nodeName",
    "spec.serviceAccountName",
    "status.podIP",
    "status.hostIP",
)
"""What ``env.valueFrom.fieldRef`` may name. `local/pod.py` has the value of each, under the same
names."""


def check_workflow(spec: JsonMapping) -> None:
    """Check that the local executor can run a workflow.

    Raises:
        UserError: the first field that it does not support, or the first fault of a graph.
    """
    templates: Sequence[JsonMapping] = spec.get("templates", [])
    for template in templates:
        # It is refused before unknown fields are, as the remedy is another.
        if "resource" in template:
            field = f"spec.templates.{template['name']}.resource"
            remedy = (
                "needs a cluster: submit it to one, or set nodes=1, and processes to their total"
            )
            raise UserError(
                field,
                template["resource"].get("action"),
                remedy,
            )
    # The first one is enough: with a field of a newer Argo there may be hundreds.
    for path in _find_unknown_fields(spec, "spec", "spec"):
        raise UserError(path, "…", UNSUPPORTED)
    _check_outputs(templates)
    names = {template["name"] for template in templates}
    for field in ("entrypoint", "onExit"):
        if spec.get(field) and spec[field] not in names:
            raise UserError(f"spec.{field}", spec[field], "no such template")
    for template in templates:
        kinds = [kind for kind in KINDS if kind in template]
        if len(kinds) != 1:
            remedy = f"needs one of {', '.join(KINDS)}"
            raise UserError(f"templates.{template['name']}", kinds, remedy)
        _check_retries(template)
        _check_pod(template)
        _check_graph(template, names)


def _check_outputs(templates: Sequence[JsonMapping]) -> None:
    """Refuse to take a pod's standard output as a parameter: only a cluster's executor captures
    it.
    """
    output = re.search(
        r"(?:steps|tasks)\.[\w-]+\.outputs\.result\b",
        json.dumps(templates),
    )
    if output:
        remedy = "is not supported here; let the pod write a file (valueFrom.path)"
        raise UserError("spec.templates", output[0], remedy)


def _check_graph(
    template: JsonMapping,
    names: Container[str],
) -> None:
    """Check that the tasks of a graph call templates of these names, and do not wait for one
    another in a circle.
    """
    for task in list_calls(template):
        if task.get("template") not in names:
            field = f"templates.{template['name']}.{task['name']}.template"
            raise UserError(field, task.get("template"), "no such template")
    tasks = {task["name"]: task for task in template.get("dag", {}).get("tasks", ())}
    # Argo itself would wait for ever.
    waits = {name: parse_depends(task, tasks)[0] for name, task in tasks.items()}
    circle = [name for name in sorted(tasks) if name in find_ancestors(name, waits)]
    if circle:
        field = f"templates.{template['name']}.dag"
        raise UserError(field, circle, "these tasks wait for one another")


def list_calls(template: JsonMapping) -> list[JsonMapping]:
    """List the tasks of a DAG, or the steps of every group, in the order they are written; none
    of a leaf. The local executor runs no steps: `KINDS` has what it runs.
    """
    tasks = template.get("dag", {}).get("tasks")
    if tasks:
        return list(tasks)
    return [step for group in template.get("steps", ()) for step in group]


def effective_spec(workflow: JsonMapping) -> JsonObject:
    """Return what the controller runs: the workflow's own spec over that of the WorkflowTemplate
    it was made from.
    """
    stored = workflow.get("status", {}).get("storedWorkflowTemplateSpec") or {}
    return dict(stored) | workflow["spec"]


def read_parameters(spec: JsonMapping) -> dict[str, str]:
    """Read the parameters that a workflow is started with: name → value. One without a value is
    left out.
    """
    parameters = spec.get("arguments", {}).get("parameters") or ()
    values: dict[str, str] = {}
    for parameter in parameters:
        if parameter.get("value") is not None:
            values[parameter["name"]] = str(parameter["value"])
    return values


def begin_at_template(
    workflow: JsonMapping,
    entrypoint: str,
    arguments: Mapping[str, str],
) -> JsonObject:
    """Return a workflow that starts at another template.

    Args:
        workflow: as it was rendered.
        entrypoint: the template.
        arguments: name → value, in addition to those of the workflow or in place of them.
    """
    spec = workflow["spec"]
    stated = spec.get("arguments", {})
    # A parameter is replaced in its place, a new one comes last.
    parameters = {parameter["name"]: parameter for parameter in stated.get("parameters", ())}
    for name, value in arguments.items():
        parameters[name] = {"name": name, "value": value}
    new_arguments = dict(stated) | {"parameters": list(parameters.values())}
    new_spec = dict(spec) | {
        "entrypoint": entrypoint,
        "arguments": new_arguments,
    }
    return dict(workflow) | {"spec": new_spec}


def parse_applied_object(template: JsonMapping) -> JsonObject:
    """Parse the object that a resource template applies; empty for any other template."""
    return yaml.safe_load(template["resource"]["manifest"]) if "resource" in template else {}


def labels_of(resource: JsonMapping) -> Mapping[str, str]:
    """Return the labels of any object, or of a template's pod."""
    metadata = resource.get("metadata") or {}
    return metadata.get("labels") or {}


def _check_retries(template: JsonMapping) -> None:
    """Refuse a policy of retries by which the local executor would try nothing again."""
    strategy = template.get("retryStrategy") or {}
    policy = strategy.get("retryPolicy")
    if policy and policy not in RETRIED_PHASES:
        field = f"templates.{template['name']}.retryStrategy.retryPolicy"
        remedy = f"is not supported by the local executor; use {', '.join(RETRIED_PHASES)}"
        raise UserError(field, policy, remedy)


def _check_pod(template: JsonMapping) -> None:
    """Refuse what a container asks of a cluster, and cannot have on this machine."""
    container = template.get("container")
    if container is None:
        return
    field = f"templates.{template['name']}"
    for variable in container.get("env", []):
        source = variable.get("valueFrom") or {}
        path = source.get("fieldRef", {}).get("fieldPath")
        if path and path not in FIELD_PATHS:
            remedy = f"known here: {', '.join(FIELD_PATHS)}"
            raise UserError(
                f"{field}.env.{variable['name']}.fieldRef",
                path,
                remedy,
            )
    # An optional one may be absent, and is.
    for source in container.get("envFrom", []):
        for kind, reference in source.items():
            if not reference.get("optional"):
                remedy = "secrets and config maps are a cluster's; make it optional"
                raise UserError(
                    f"{field}.envFrom.{kind}",
                    reference.get("name"),
                    remedy,
                )
    for volume in template.get("volumes", ()):
        secret = volume.get("secret")
        # The executor has tokens of its own for these two.
        if secret and secret.get("secretName") not in (TOKEN_SECRET, SANDBOX[0]):
            name = secret.get("secretName")
            raise UserError(
                f"{field}.volumes.{volume['name']}",
                name,
                UNSUPPORTED,
            )
    for sidecar in template.get("initContainers", ()):
        # The executor runs none: an extension does the same in another way (`PodHook.hold_pod`).
        if not any(hook.replaces_container(sidecar) for hook in list_pod_hooks()):
            raise UserError(
                f"spec.{field}.initContainers",
                sidecar.get("name"),
                UNSUPPORTED,
            )
    if not container.get("command"):
        remedy = "is needed: without the image, its entrypoint is not known"
        raise UserError(f"{field}.command", None, remedy)


def mounts_token(spec: JsonMapping) -> bool:
    """Say whether pods of a workflow mount the token of its servers; pods of a WorkflowTemplate
    elsewhere may.
    """
    return TOKEN_SECRET in json.dumps(spec) or "workflowTemplateRef" in spec


@functools.cache
def _read_fields() -> dict[str, dict[str, str]]:
    """Read the fields that the local executor knows: kind → field → the kind of its value, empty
    for a plain one.
    """
    path = Path(__file__).with_name("local_fields.yaml")
    # A dash marks what has no effect on one machine, and is known all the same.
    fields: dict[str, dict[str, str]] = {}
    for kind, words in yaml.load(path.read_text(), yaml.CSafeLoader).items():
        pairs = [word.removeprefix("-").partition(":") for word in words.split()]
        fields[kind] = {field: value_kind for field, _, value_kind in pairs}
    return fields


def _find_unknown_fields(
    value: Any,
    kind: str,
    path: str,
) -> Iterator[str]:
    """Yield the paths of all fields in a value that its kind does not have.

    Args:
        value: an object, or a list of objects of the same kind.
        kind: a key of ``local_fields.yaml``.
        path: the value's own.
    """
    if isinstance(value, list):
        for index, item in enumerate(value):
            # A name is easier to find in a manifest than a number.
            label = item.get("name", index) if isinstance(item, dict) else index
            yield from _find_unknown_fields(
                item,
                kind,
                f"{path}.{label}",
            )
    elif isinstance(value, dict):
        kinds = _read_fields()[kind]
        for field, item in value.items():
            if field not in kinds:
                yield f"{path}.{field}"
            elif kinds[field]:
                yield from _find_unknown_fields(
                    item,
                    kinds[field],
                    f"{path}.{field}",
                )


_SECONDS = {
    "ns": 1e-9,
    "us": 1e-6,
    "ms": 1e-3,
    "s": 1.0,
    "m": 60.0,
    "h": 3600.0,
    "d": 86400.0,
}
_DURATION = r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h|d)"


def parse_duration(duration: str | int | float) -> float:
    """Parse a duration of Argo into seconds: ``30`` or ``"30"``, ``"1m30s"``, ``"2h"``,
    ``"500ms"``.
    """
    text = str(duration).strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not re.fullmatch(f"({_DURATION})+", text):
        raise UserError("duration", duration, "write seconds, or units as in 1m30s")
    return sum(float(number) * _SECONDS[unit] for number, unit in re.findall(_DURATION, text))


RESULTS = (
    "Succeeded",
    "Failed",
    "Errored",
    "Skipped",
    "Omitted",
    "Daemoned",
    "AnySucceeded",
    "AllFailed",
)
"""What ``depends`` may ask of a task. `local/graph.py: build_dependency_scope` gives each its
value."""
_DEPENDENCY = re.compile(
    r"([a-zA-Z0-9][-a-zA-Z0-9]*?)\.([A-Z][a-zA-Z]+)|([a-zA-Z0-9][-a-zA-Z0-9]*)"
)


def parse_depends(
    task: JsonMapping,
    tasks: Mapping[str, JsonMapping],
) -> tuple[list[str], str]:
    """Parse what a task waits for.

    A task without a result means ``Succeeded || Skipped || Daemoned``, as in Argo.

    Args:
        task: the task.
        tasks: name → task, of its DAG.

    Returns:
        The tasks that it waits for, and the condition on their results: an expression over ``<task,
        hyphens as underscores>.<result>``, empty without dependencies.

    Raises:
        UserError: a name is not a task of the same DAG, or not a result.
    """
    logic = task.get("depends") or " && ".join(task.get("dependencies") or [])
    # A dict for the order, each name once.
    names: dict[str, None] = {}

    def expand(match: re.Match[str]) -> str:
        name = match[1] or match[3]
        result = match[2]
        field = f"tasks.{task['name']}.depends"
        if name not in tasks:
            raise UserError(
                field,
                name,
                f"is not a task; known: {', '.join(tasks)}",
            )
        if result and result not in RESULTS:
            raise UserError(
                field,
                f"{name}.{result}",
                f"known results: {', '.join(RESULTS)}",
            )
        names[name] = None
        results = [result] if result else ["Succeeded", "Skipped", "Daemoned"]
        variable = name.replace("-", "_")
        return "(" + " || ".join(f"{variable}.{result}" for result in results) + ")"

    condition = _DEPENDENCY.sub(expand, logic)
    return list(names), condition


def find_ancestors(
    name: str,
    waits: Mapping[str, Sequence[str]],
) -> set[str]:
    """Return all tasks that a task waits for, also through others, and itself if they form a
    circle.

    Args:
        name: the task's.
        waits: task → the tasks that it waits for itself.
    """
    ancestors: set[str] = set()
    unvisited = list(waits[name])
    while unvisited:
        ancestor = unvisited.pop()
        if ancestor not in ancestors:
            ancestors.add(ancestor)
            unvisited += waits[ancestor]
    return ancestors
