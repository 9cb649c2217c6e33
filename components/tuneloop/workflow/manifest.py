"""The fields of a Workflow that the local executor supports: any other is refused by name before anything runs."""

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.settings import SANDBOX, TOKEN_SECRET

KINDS = ("container", "dag")
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
"""What ``env.valueFrom.fieldRef`` may name."""


def check_workflow(spec: JsonMapping) -> None:
    """Raise UserError at the first field that the local executor does not support, or the first fault of a graph."""
    templates: Sequence[JsonMapping] = spec.get("templates", [])
    for template in templates:
        if "resource" in template:
            told = "needs a cluster: submit it to one, or set nodes=1, and processes to their total"
            raise UserError(
                f"spec.templates.{template['name']}.resource",
                template["resource"].get("action"),
                told,
            )
    for path in _unknown(spec, "spec", "spec"):
        raise UserError(path, "…", UNSUPPORTED)
    if output := re.search(r"(?:steps|tasks)\.[\w-]+\.outputs\.result\b", json.dumps(templates)):
        raise UserError(
            "spec.templates",
            output[0],
            "is not supported here; let the pod write a file (valueFrom.path)",
        )
    names = {template["name"] for template in templates}
    for field in ("entrypoint", "onExit"):
        if spec.get(field) and spec[field] not in names:
            raise UserError(f"spec.{field}", spec[field], "no such template")
    for template in templates:
        kinds = [kind for kind in KINDS if kind in template]
        if len(kinds) != 1:
            raise UserError(
                f"templates.{template['name']}", kinds, f"needs one of {', '.join(KINDS)}"
            )
        _check_pod(template)
        for task in list_calls(template):
            if task.get("template") not in names:
                field = f"templates.{template['name']}.{task['name']}.template"
                raise UserError(field, task.get("template"), "no such template")
        tasks = {task["name"]: task for task in template.get("dag", {}).get("tasks", ())}
        waits = {name: parse_depends(task, tasks)[0] for name, task in tasks.items()}
        if circle := sorted(name for name in tasks if name in find_ancestors(name, waits)):
            raise UserError(
                f"templates.{template['name']}.dag", circle, "these tasks wait for one another"
            )


def list_calls(template: JsonMapping) -> list[JsonMapping]:
    """List the tasks of a DAG, or the steps of every group, in the order they are written; none of a leaf."""
    return template.get("dag", {}).get("tasks") or [
        step for group in template.get("steps", ()) for step in group
    ]


def effective_spec(workflow: JsonMapping) -> JsonObject:
    """Return what the controller runs: the workflow's own spec over that of the WorkflowTemplate it was made from."""
    return {
        **(workflow.get("status", {}).get("storedWorkflowTemplateSpec") or {}),
        **workflow["spec"],
    }


def begin_at_template(
    workflow: JsonMapping, entrypoint: str, arguments: Mapping[str, str]
) -> JsonObject:
    """Return `workflow` with another template as its entrypoint, which gets `arguments`."""
    spec = workflow["spec"]
    given = {p["name"]: p for p in spec.get("arguments", {}).get("parameters", ())}
    given |= {name: {"name": name, "value": value} for name, value in arguments.items()}
    arguments_of = {**spec.get("arguments", {}), "parameters": list(given.values())}
    return {**workflow, "spec": {**spec, "entrypoint": entrypoint, "arguments": arguments_of}}


def parse_applied_object(template: JsonMapping) -> JsonObject:
    """Parse the object that a resource template applies; empty for any other template."""
    return yaml.safe_load(template["resource"]["manifest"]) if "resource" in template else {}


def labels_of(found: JsonMapping) -> Mapping[str, str]:
    """Return the labels of any object, or of a template's pod."""
    return (found.get("metadata") or {}).get("labels") or {}


def _check_pod(template: JsonMapping) -> None:
    if (container := template.get("container")) is None:
        return
    at = f"templates.{template['name']}"
    for item in container.get("env", []):
        path = (item.get("valueFrom") or {}).get("fieldRef", {}).get("fieldPath")
        if path and path not in FIELD_PATHS:
            raise UserError(
                f"{at}.env.{item['name']}.fieldRef", path, f"known here: {', '.join(FIELD_PATHS)}"
            )
    for source in container.get("envFrom", []):
        for kind, named in source.items():
            if not named.get("optional"):
                told = "secrets and config maps are a cluster's; make it optional"
                raise UserError(f"{at}.envFrom.{kind}", named.get("name"), told)
    for volume in template.get("volumes", ()):
        if (secret := volume.get("secret")) and secret.get("secretName") not in (
            TOKEN_SECRET,
            SANDBOX[0],
        ):
            raise UserError(f"{at}.volumes.{volume['name']}", secret.get("secretName"), UNSUPPORTED)
    for each in template.get("initContainers", ()):
        if each.get("command") != ["python", "-m", "tuneloop.sharing.sidecar"]:
            raise UserError(f"spec.{at}.initContainers", each.get("name"), UNSUPPORTED)
    if not container.get("command"):
        raise UserError(
            f"{at}.command", None, "is needed: without the image, its entrypoint is not known"
        )


def mounts_token(spec: JsonMapping) -> bool:
    """Say whether pods of a workflow mount the token of its servers; pods of a WorkflowTemplate elsewhere may."""
    return TOKEN_SECRET in json.dumps(spec) or "workflowTemplateRef" in spec


@functools.cache
def _fields() -> dict[str, str]:
    """Read the kinds and their fields, in words."""
    read: dict[str, str] = yaml.load(
        Path(__file__).with_name("local_fields.yaml").read_text(), yaml.CSafeLoader
    )
    return read


def _unknown(value: Any, kind: str, path: str) -> Iterator[str]:
    """Yield the paths of all fields in `value`, an object or a list of them, that its kind does not have."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unknown(
                item, kind, f"{path}.{item.get('name', index) if isinstance(item, dict) else index}"
            )
    elif isinstance(value, dict):
        known = dict(word.removeprefix("-").partition(":")[::2] for word in _fields()[kind].split())
        for key, item in value.items():
            if key not in known:
                yield f"{path}.{key}"
            elif known[key]:
                yield from _unknown(item, known[key], f"{path}.{key}")


_UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(duration: str | int | float) -> float:
    """Parse a duration of Argo into seconds: ``30`` or ``"30"``, ``"1m30s"``, ``"2h"``, ``"500ms"``."""
    text = str(duration).strip()
    if re.fullmatch(r"\d+(\.\d+)?", text):
        return float(text)
    if not re.fullmatch(r"(\d+(\.\d+)?(ns|us|ms|s|m|h|d))+", text):
        raise UserError("duration", duration, "write seconds, or units as in 1m30s")
    return sum(
        float(n) * _UNITS[unit]
        for n, unit in re.findall(r"(\d+(?:\.\d+)?)(ns|us|ms|s|m|h|d)", text)
    )


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
_DEPENDENCY = re.compile(
    r"([a-zA-Z0-9][-a-zA-Z0-9]*?)\.([A-Z][a-zA-Z]+)|([a-zA-Z0-9][-a-zA-Z0-9]*)"
)


def parse_depends(task: JsonMapping, tasks: Mapping[str, JsonMapping]) -> tuple[list[str], str]:
    """Return the tasks that `task` waits for, and the condition on their results: an expression over ``<task, hyphens
    as underscores>.<result>``, empty without dependencies. A task without a result means ``Succeeded || Skipped ||
    Daemoned``. Raises UserError at a name that is not a task of the same DAG, or not a result."""
    logic = task.get("depends") or " && ".join(task.get("dependencies") or [])
    names: dict[str, None] = {}

    def expand(match: re.Match[str]) -> str:
        name, result = (match[1], match[2]) if match[1] else (match[3], None)
        if name not in tasks:
            raise UserError(
                f"tasks.{task['name']}.depends", name, f"is not a task; known: {', '.join(tasks)}"
            )
        if result not in (None, *RESULTS):
            raise UserError(
                f"tasks.{task['name']}.depends",
                f"{name}.{result}",
                f"known results: {', '.join(RESULTS)}",
            )
        names[name] = None
        results = [result] if result else ["Succeeded", "Skipped", "Daemoned"]
        return "(" + " || ".join(f"{name.replace('-', '_')}.{each}" for each in results) + ")"

    condition = _DEPENDENCY.sub(expand, logic)  # fills names
    return list(names), condition


def find_ancestors(name: str, waits: Mapping[str, Sequence[str]]) -> set[str]:
    """Return all tasks that `name` waits for by `waits`, also through others, and itself where they form a cycle."""
    ancestors: set[str] = set()
    queue = list(waits[name])
    while queue:
        if (other := queue.pop()) not in ancestors:
            ancestors.add(other)
            queue += waits[other]
    return ancestors
