"""Find problems of a rendered Workflow that a controller reports only at run time.

``argo lint --offline`` checks the syntax. These rules add names that Argo or Kubernetes refuse,
fields that our pods must have, expressions, bounds of recursions, and outputs that a skipped task
lacks. Problems of pods are looked for in templates with a container or a script: a JobSet in a
resource template, sidecars and init containers are not examined. Extensions add rules
(`PodHook.find_errors`).

`tuneloop lint` prints all problems, and `run` refuses the first (`cli/checks.py`); `submit` does
not lint. A rule is a
function here and a line of `RULES` in `tests/unit/argo/test_lint.py`; every shipped pipeline has to
pass it.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.workflow.expression_values import ExpressionError
from tuneloop.workflow.expressions import TAG, check_expression
from tuneloop.workflow.manifest import find_ancestors, labels_of, list_calls, parse_depends
from tuneloop.workflow.pod_hook import list_pod_hooks
from tuneloop.workflow.settings import QUEUE_LABEL

NAME = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
"""Names of templates, which are parts of the names of their pods."""
CALL_NAME = re.compile(r"^[a-zA-Z0-9][-a-zA-Z0-9]{0,127}$")
"""Argo's own rule for the names of tasks and steps (`workflowFieldNameFmt`,
`workflowFieldMaxLength`).
"""
PARAMETER_NAME = re.compile(r"^[-a-zA-Z0-9_]+$")
"""Argo's own rule for the names of parameters and artifacts (`paramOrArtifactNameRegex`)."""
OBJECT_NAME = re.compile(r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")
"""Names of objects in Kubernetes, as RFC 1123 has them."""
LONGEST_WORKFLOW = 63
"""Argo labels pods with the name of their workflow, and labels are not longer."""
SUFFIX_LENGTH = 5
"""Characters that Kubernetes adds to `generateName`."""
REFERENCE = re.compile(r"\btasks\.([a-zA-Z0-9][\w-]*)\.|\btasks\['([^']+)'\]")
"""A task whose result a tag or a condition takes, in either notation: ``tasks.NAME.`` or
``tasks['NAME']``, as `argo/tasks.py: build_term` writes them."""
BOOLEANS = ("y", "n", "Y", "N")
"""Names that YAML 1.1 reads as booleans. PyYAML writes them without quotes all the same."""
SOURCES = frozenset(["default", "value", "optional", "raw", "s3", "http", "git"])
"""An input of a template with one of these fields needs no argument from its caller."""
NO_TEMPLATE = "no such template"
"""The message for a call or hook whose template is not in the workflow."""

_WORKFLOW_NAME = re.compile(r"\bworkflow\.(?!outputs\b)[\w.]+")
_TEXT_CODE = re.compile(r"(?<!asInt\()\blastRetry\.exitCode\s*(==|!=|<|>|in\b|not\b)\s*[\d\[]")

Templates = Mapping[str, JsonMapping]
"""Name of a template → the template."""


def lint_workflow(workflow: JsonMapping) -> list[UserError]:
    """Return all problems of a Workflow or WorkflowTemplate, as loaded from YAML."""
    spec = workflow.get("spec") or {}
    templates = {template.get("name"): template for template in spec.get("templates", [])}
    problems = list(_check_spec(spec, templates))
    problems += _check_expressions(spec)
    problems += _check_workflow_names(workflow.get("metadata") or {})
    problems += _check_boolean_names(spec)
    for hook in list_pod_hooks():
        problems += hook.find_errors(workflow)
    for name, template in templates.items():
        field = f"templates.{name}"
        if not NAME.match(str(name)):
            remedy = "names are at most 63 lower-case letters, digits and dashes"
            problems.append(UserError(field, name, remedy))
        problems += _check_names(field, template)
        if "dag" in template:
            problems += _check_dag(field, template, templates)
        elif "steps" in template:
            # Steps run in their order and need no names of others to wait for.
            for step in list_calls(template):
                problems += _check_call(f"{field}.steps.{step['name']}", step, templates)
        elif "container" in template or "script" in template:
            problems += _check_pod(field, template)
    return problems


def _check_spec(spec: JsonMapping, templates: Templates) -> Iterator[UserError]:
    """Find templates that the workflow names and does not have, and pods that can never start."""
    entrypoint = spec.get("entrypoint")
    if entrypoint not in templates and "workflowTemplateRef" not in spec:
        remedy = f"no such template; there are {', '.join(map(str, templates))}"
        yield UserError("spec.entrypoint", entrypoint, remedy)
    for name, target in _read_hooks(spec).items():
        if target not in templates:
            yield UserError(f"spec.{name}", target, NO_TEMPLATE)
    daemons = [name for name, template in templates.items() if template.get("daemon")]
    parallelism = int(spec.get("parallelism") or 0)
    # A daemon runs until the end: with no pod beside it the workflow makes no progress.
    if daemons and parallelism == len(daemons):
        remedy = f"the daemon {daemons[0]} counts, too: add one"
        yield UserError("spec.parallelism", parallelism, remedy)


def _read_hooks(caller: JsonMapping) -> dict[str, str]:
    """Read the hooks of a workflow or of a call: name → template; the exit handler is one."""
    hooks: dict[str, str] = {}
    for name, hook in (caller.get("hooks") or {}).items():
        # A hook may also refer to a template of another object, which is not known here.
        if hook.get("template"):
            hooks[name] = hook["template"]
    if caller.get("onExit"):
        hooks["onExit"] = caller["onExit"]
    return hooks


def _check_workflow_names(metadata: JsonMapping) -> Iterator[UserError]:
    """Find a name of the workflow that Kubernetes refuses, or with which its pods have no label."""
    for field, suffix in (("name", 0), ("generateName", SUFFIX_LENGTH)):
        name = metadata.get(field)
        if not name:
            continue
        # The limits hold for the name that Kubernetes completes.
        longest = name + "0" * suffix
        if not OBJECT_NAME.match(longest) or len(longest) > LONGEST_WORKFLOW:
            limit = LONGEST_WORKFLOW - suffix
            remedy = f"name the pipeline with at most {limit} lower-case letters, digits and dashes"
            yield UserError(f"metadata.{field}", name, remedy)


def _check_boolean_names(spec: JsonMapping) -> Iterator[UserError]:
    """Find names that are read as booleans once the workflow is written as YAML."""
    for field, value in _walk(spec, "spec"):
        if isinstance(value, Mapping) and value.get("name") in BOOLEANS:
            remedy = "YAML 1.1 reads it as true or false; choose a longer name"
            yield UserError(f"{field}.name", value["name"], remedy)


def _check_names(field: str, template: JsonMapping) -> Iterator[UserError]:
    """Find names of a template's calls and parameters that Argo refuses."""
    kind = "dag.tasks" if "dag" in template else "steps"
    for call in list_calls(template):
        if not CALL_NAME.match(str(call.get("name"))):
            remedy = (
                "names of stages in a graph are at most 128 letters, digits and dashes, "
                "and begin with a letter or digit"
            )
            yield UserError(
                f"{field}.{kind}",
                call.get("name"),
                remedy,
            )
    for side in ("inputs", "outputs"):
        for kind in ("parameters", "artifacts"):
            for item in (template.get(side) or {}).get(kind) or ():
                if not PARAMETER_NAME.match(str(item.get("name"))):
                    remedy = "names are letters, digits, dashes and underscores"
                    yield UserError(
                        f"{field}.{side}.{kind}",
                        item.get("name"),
                        remedy,
                    )


def _check_dag(field: str, template: JsonMapping, templates: Templates) -> Iterator[UserError]:
    """Find faults of a graph, and of its tasks."""
    calls = list_calls(template)
    tasks = {task["name"]: task for task in calls}
    if len(tasks) < len(calls):
        yield UserError(f"{field}.dag.tasks", len(calls), "two tasks have the same name")
    if "timeout" in template:
        remedy = "a DAG has no timeout; set it on the pods"
        yield UserError(f"{field}.timeout", template["timeout"], remedy)
    waits: dict[str, list[str]] = {}
    for name, task in tasks.items():
        # A task whose condition cannot be read waits for nothing: the other rules go on.
        waits[name] = []
        try:
            waits[name], _ = parse_depends(task, tasks)
        except UserError as error:
            yield UserError(f"{field}.{error.field}", error.value, error.remedy)
    for name, task in tasks.items():
        path = f"{field}.tasks.{name}"
        yield from _check_references(path, task, tasks, waits)
        yield from _check_call(path, task, templates)
        # Without a condition the recursion never ends by itself.
        if task.get("template") == template["name"] and not task.get("when"):
            yield UserError(path, task["template"], "a template that calls itself needs a when")
    yield from _check_skipped_outputs(field, tasks)


def _check_references(
    field: str,
    task: JsonMapping,
    tasks: Templates,
    waits: Mapping[str, Sequence[str]],
) -> Iterator[UserError]:
    """Find tasks whose results a task takes without waiting for them."""
    ancestors = find_ancestors(task["name"], waits)
    if task["name"] in ancestors:
        yield UserError(field, task["name"], "waits for itself; break the cycle")
    for name in sorted(_find_references(task)):
        if name not in tasks:
            yield UserError(field, f"tasks.{name}", "is not a task of this DAG")
        elif name not in ancestors:
            remedy = f"is used, but not waited for; depends: {name}"
            yield UserError(field, f"tasks.{name}", remedy)


def _check_skipped_outputs(field: str, tasks: Templates) -> Iterator[UserError]:
    """Find outputs of a task that may be skipped.

    Such a task has none in Argo 3.7, whatever defaults its template declares. A task that takes them
    has to test the task's status first.
    """
    conditional = {name for name, task in tasks.items() if task.get("when")}
    for name, task in tasks.items():
        text = f"{task.get('arguments')} {task.get('when', '')}"
        if "outputs" not in text:
            continue
        for skipped in conditional & _find_references(task):
            # Either notation of the task's name, as in REFERENCE.
            guards = [f"{skipped}.status", f"['{skipped}'].status"]
            if not any(guard in text for guard in guards):
                remedy = f"may be skipped; guard by tasks.{skipped}.status"
                yield UserError(
                    f"{field}.tasks.{name}",
                    f"tasks.{skipped}.outputs",
                    remedy,
                )


def _check_call(field: str, call: JsonMapping, templates: Templates) -> Iterator[UserError]:
    """Find faults of a call: of its template, its hooks and its arguments."""
    for target in _read_hooks(call).values():
        if target not in templates:
            yield UserError(f"{field}.hooks", target, NO_TEMPLATE)
    # A template of another object is not known here.
    if "templateRef" in call:
        return
    template = templates.get(call.get("template", ""))
    if template is None:
        yield UserError(f"{field}.template", call.get("template"), NO_TEMPLATE)
        return
    for kind in ("parameters", "artifacts"):
        path = f"{field}.arguments.{kind}"
        arguments = (call.get("arguments") or {}).get(kind, [])
        inputs = (template.get("inputs") or {}).get(kind, [])
        passed_names = {item["name"] for item in arguments}
        input_names = {item["name"] for item in inputs}
        for item in inputs:
            if item["name"] not in passed_names and not SOURCES & item.keys():
                remedy = f"is required by template {template['name']}"
                yield UserError(path, item["name"], remedy)
        # Argo reports no argument too many, so that a misspelled one would go unnoticed.
        for name in sorted(passed_names - input_names):
            yield UserError(path, name, f"template {template['name']} has no such input")


def _check_pod(field: str, template: JsonMapping) -> Iterator[UserError]:
    """Find what a pod lacks to be admitted, retried and started with the same program again.

    A limit counts as an accelerator if its name contains ``gpu``: a device of another name is not
    examined for the queue's label.
    """
    container = template.get("container") or template["script"]
    resources = container.get("resources") or {}
    if not resources.get("requests"):
        remedy = "request cpu and memory: a scheduler and Kueue count them"
        yield UserError(f"{field}.resources", None, remedy)
    # An empty one is meant: `cluster.pod.security` is none.
    if container.get("securityContext") is None:
        remedy = "a restricted namespace refuses the pod without one"
        yield UserError(f"{field}.securityContext", None, remedy)
    if "retryStrategy" not in template:
        remedy = "an evicted pod would end the run; retry Error and exit 75"
        yield UserError(f"{field}.retryStrategy", None, remedy)
    backoff = (template.get("retryStrategy") or {}).get("backoff") or {}
    if backoff.get("maxDuration"):
        remedy = (
            "counts from the start of the first attempt, so a longer stage is never retried; "
            "leave it out"
        )
        path = f"{field}.retryStrategy.backoff.maxDuration"
        yield UserError(path, backoff["maxDuration"], remedy)
    # A registry may have a port, so that only the last part of the path tells the tag.
    image = str(container.get("image", "")).rpartition("/")[2]
    is_pinned = "@" in image
    if ":" in image and not image.endswith(":latest"):
        is_pinned = True
    if not is_pinned:
        # A retry must not start another program than the attempt before.
        remedy = "name a version: a tag other than latest, or a digest"
        yield UserError(f"{field}.image", container.get("image"), remedy)
    has_gpus = any("gpu" in name for name in resources.get("limits") or {})
    if has_gpus and QUEUE_LABEL not in labels_of(template):
        remedy = "an accelerator stage carries the queue's label"
        yield UserError(f"{field}.metadata.labels", QUEUE_LABEL, remedy)


def _check_expressions(spec: JsonMapping) -> Iterator[UserError]:
    """Find expressions that the controller would refuse at run time, in tags and in the fields that
    hold one.
    """
    for field, value in _walk(spec, "spec"):
        if not isinstance(value, str):
            continue
        if field.endswith((".expression", ".fromExpression")):
            yield from _check_expression(value, field)
        # An output sees the workflow's values in tags only, which are replaced before.
        if field.endswith(".valueFrom.expression") and ".outputs." in field:
            name = _WORKFLOW_NAME.search(TAG.sub("", value))
            if name:
                remedy = f"is not a name in an output's expression; write '{{{{{name[0]}}}}}'"
                yield UserError(field, name[0], remedy)
        for tag in TAG.findall(value):
            if tag.strip().startswith("="):
                yield from _check_expression(tag.strip()[1:], field)


def _check_expression(source: str, field: str) -> Iterator[UserError]:
    # Tags in expressions are replaced by text first.
    plain = TAG.sub("'x'", source)
    try:
        check_expression(plain)
    except ExpressionError as error:
        yield UserError(field, source, str(error).removeprefix(f"{plain!r}: "))
    if _TEXT_CODE.search(source):
        remedy = "lastRetry.exitCode is text; write asInt(lastRetry.exitCode)"
        yield UserError(field, source, remedy)


def _walk(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for `value` and all values below it; an item of a list is called by its
    name, or else by its number.
    """
    yield path, value
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _walk(item, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            label = index
            if isinstance(item, Mapping):
                # A path by names stays readable in a workflow of fifty templates.
                label = item.get("name", index)
            yield from _walk(item, f"{path}.{label}")


def _find_references(task: JsonMapping) -> set[str]:
    """Find the tasks whose results a task's tags and conditions name."""
    texts = TAG.findall(str(task.get("arguments") or {}))
    # A condition is an expression as a whole, without the braces of a tag.
    texts.append(str(task.get("when", "")))
    names: set[str] = set()
    for text in texts:
        for match in REFERENCE.finditer(text):
            names.add(match[1] or match[2])
    return names
