"""Find problems of a rendered Workflow that a controller reports only at run time. ``argo lint --offline`` checks the
syntax; these rules add fields that our pods must have, bounds of recursions, and outputs that a skipped task lacks."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tuneloop.argo.claims import find_placement_errors
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.workflow.expression_values import ExpressionError
from tuneloop.workflow.expressions import TAG, check_expression
from tuneloop.workflow.manifest import find_ancestors, list_calls, parse_depends
from tuneloop.workflow.settings import QUEUE_LABEL

NAME = re.compile(r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
CALL_NAME = re.compile(r"^[a-zA-Z0-9][-a-zA-Z0-9]{0,127}$")
"""Argo's own rule for the names of tasks and steps (`workflowFieldNameFmt`, `workflowFieldMaxLength`)."""
PARAMETER_NAME = re.compile(r"^[-a-zA-Z0-9_]+$")
"""Argo's own rule for the names of parameters and artifacts (`paramOrArtifactNameRegex`)."""
OBJECT_NAME = re.compile(r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$")
"""Names of objects in Kubernetes, as RFC 1123 has them."""
LONGEST_WORKFLOW = 63
"""Argo labels pods with the name of their workflow, and labels are not longer."""
SUFFIX_LENGTH = 5
"""Characters that Kubernetes adds to `generateName`."""
REFERENCE = re.compile(r"\btasks\.([a-zA-Z0-9][\w-]*)\.|\btasks\['([^']+)'\]")


def lint_workflow(workflow: JsonMapping) -> list[UserError]:
    """Return all problems found in a Workflow or WorkflowTemplate, as loaded from YAML."""
    spec = workflow.get("spec") or {}
    templates = {template.get("name"): template for template in spec.get("templates", [])}
    found = [*_spec(spec, templates), *_expressions(spec), *_names(workflow, templates)]
    for at, value in _walk(spec, "spec"):
        if isinstance(value, Mapping) and value.get("name") in (
            "y",
            "n",
            "Y",
            "N",
        ):  # PyYAML does not quote them
            remedy = "YAML 1.1 reads it as true or false; choose a longer name"
            found.append(UserError(f"{at}.name", value["name"], remedy))
    found += find_placement_errors(workflow)
    for name, template in templates.items():
        at = f"templates.{name}"
        if not NAME.match(str(name)):
            found.append(
                UserError(at, name, "names are at most 63 lower-case letters, digits and dashes")
            )
        if "dag" in template:
            found += _dag(at, template, templates)
        elif "steps" in template:
            for step in list_calls(template):
                found += _call(f"{at}.steps.{step['name']}", step, templates)
        elif "container" in template or "script" in template:
            found += _leaf(at, template)
    return found


def _spec(spec: JsonMapping, templates: Mapping[Any, Any]) -> Iterator[UserError]:
    entry = spec.get("entrypoint")
    if entry not in templates and "workflowTemplateRef" not in spec:
        yield UserError(
            "spec.entrypoint",
            entry,
            f"no such template; there are {', '.join(map(str, templates))}",
        )
    for field, hook in {
        "onExit": {"template": spec.get("onExit")},
        **(spec.get("hooks") or {}),
    }.items():
        if hook["template"] and hook["template"] not in templates:
            yield UserError(f"spec.{field}", hook["template"], "no such template")
    daemons = [name for name, template in templates.items() if template.get("daemon")]
    if daemons and int(spec.get("parallelism") or 0) == len(daemons):
        yield UserError(
            "spec.parallelism", spec["parallelism"], f"the daemon {daemons[0]} counts, too: add one"
        )


def _names(workflow: JsonMapping, templates: Mapping[Any, Any]) -> Iterator[UserError]:
    """Find names of the workflow, of calls and of parameters that Kubernetes or Argo refuse."""
    metadata = workflow.get("metadata") or {}
    for field, suffix in (("name", 0), ("generateName", SUFFIX_LENGTH)):
        name = metadata.get(field)
        if not name:
            continue
        whole = f"{name}{'0' * suffix}"
        if not OBJECT_NAME.match(whole) or len(whole) > LONGEST_WORKFLOW:
            most = LONGEST_WORKFLOW - suffix
            remedy = f"name the pipeline with at most {most} lower-case letters, digits and dashes"
            yield UserError(f"metadata.{field}", name, remedy)
    for template in templates.values():
        kind = "dag.tasks" if "dag" in template else "steps"
        for call in list_calls(template):
            if not CALL_NAME.match(str(call.get("name"))):
                remedy = (
                    "names of stages in a graph are at most 128 letters, digits and dashes, "
                    "and begin with a letter or digit"
                )
                yield UserError(f"templates.{template['name']}.{kind}", call.get("name"), remedy)
        for side in ("inputs", "outputs"):
            for kind in ("parameters", "artifacts"):
                for item in (template.get(side) or {}).get(kind) or ():
                    if not PARAMETER_NAME.match(str(item.get("name"))):
                        at = f"templates.{template['name']}.{side}.{kind}"
                        remedy = "names are letters, digits, dashes and underscores"
                        yield UserError(at, item.get("name"), remedy)


def _dag(at: str, template: JsonMapping, templates: Mapping[Any, Any]) -> Iterator[UserError]:
    listed = template["dag"].get("tasks", [])
    tasks = {task["name"]: task for task in listed}
    if len(tasks) < len(listed):
        yield UserError(f"{at}.dag.tasks", len(listed), "two tasks have the same name")
    if "timeout" in template:
        yield UserError(
            f"{at}.timeout", template["timeout"], "a DAG has no timeout; set it on the pods"
        )
    waits: dict[str, list[str]] = {}
    for name, task in tasks.items():
        try:
            waits[name] = parse_depends(task, tasks)[0]
        except UserError as error:
            yield UserError(f"{at}.{error.field}", error.value, error.remedy)
            waits[name] = []
    for name, task in tasks.items():
        above = find_ancestors(name, waits)
        place = f"{at}.tasks.{name}"
        if name in above:
            yield UserError(place, name, "waits for itself; break the cycle")
        for other in sorted(_references(task)):
            if other not in tasks:
                yield UserError(place, f"tasks.{other}", "is not a task of this DAG")
            elif other not in above:
                yield UserError(
                    place, f"tasks.{other}", f"is used, but not waited for; depends: {other}"
                )
        yield from _call(place, task, templates)
        if task.get("template") == template["name"] and not task.get("when"):
            yield UserError(place, task["template"], "a template that calls itself needs a when")
    yield from _skipped_outputs(at, tasks)


def _skipped_outputs(at: str, tasks: JsonMapping) -> Iterator[UserError]:
    """Find outputs of a skipped task: it has none in Argo 3.7, whatever defaults its template declares."""
    conditional = {name for name, task in tasks.items() if task.get("when")}
    for name, task in tasks.items():
        text = f"{task.get('arguments')} {task.get('when', '')}"
        for other in conditional & _references(task):
            if (
                "outputs" in text
                and f"{other}.status" not in text
                and f"['{other}'].status" not in text
            ):
                remedy = f"may be skipped; guard by tasks.{other}.status"
                yield UserError(f"{at}.tasks.{name}", f"tasks.{other}.outputs", remedy)


def _call(at: str, task: JsonMapping, templates: Mapping[Any, Any]) -> Iterator[UserError]:
    for hook in [{"template": task.get("onExit")}, *(task.get("hooks") or {}).values()]:
        if hook["template"] and hook["template"] not in templates:
            yield UserError(f"{at}.hooks", hook["template"], "no such template")
    if "templateRef" in task:
        return
    if (target := templates.get(task.get("template"))) is None:
        yield UserError(f"{at}.template", task.get("template"), "no such template")
        return
    arguments = task.get("arguments") or {}
    for kind in ("parameters", "artifacts"):
        given = {item["name"] for item in arguments.get(kind, [])}
        declared = {item["name"]: item for item in (target.get("inputs") or {}).get(kind, [])}
        for name, item in declared.items():
            if (
                name not in given
                and not {"default", "value", "optional", "raw", "s3", "http", "git"} & item.keys()
            ):
                yield UserError(
                    f"{at}.arguments.{kind}", name, f"is required by template {target['name']}"
                )
        for name in sorted(given - declared.keys()):
            yield UserError(
                f"{at}.arguments.{kind}", name, f"template {target['name']} has no such input"
            )


def _leaf(at: str, template: JsonMapping) -> Iterator[UserError]:
    container = template.get("container") or template["script"]
    resources = container.get("resources") or {}
    if not resources.get("requests"):
        yield UserError(
            f"{at}.resources", None, "request cpu and memory: a scheduler and Kueue count them"
        )
    if not container.get("securityContext"):
        yield UserError(
            f"{at}.securityContext", None, "a restricted namespace refuses the pod without one"
        )
    if "retryStrategy" not in template:
        yield UserError(
            f"{at}.retryStrategy", None, "an evicted pod would end the run; retry Error and exit 75"
        )
    elif longest := ((template["retryStrategy"] or {}).get("backoff") or {}).get("maxDuration"):
        remedy = "counts from the start of the first attempt, so a longer stage is never retried; leave it out"
        yield UserError(f"{at}.retryStrategy.backoff.maxDuration", longest, remedy)
    image = str(container.get("image", "")).rpartition("/")[2]
    if "@" not in image and (":" not in image or image.endswith(":latest")):
        yield UserError(
            f"{at}.image",
            container.get("image"),
            "name a version: a tag other than latest, or a digest",
        )
    gpus = any("gpu" in name for name in (resources.get("limits") or {}))
    if gpus and QUEUE_LABEL not in ((template.get("metadata") or {}).get("labels") or {}):
        yield UserError(
            f"{at}.metadata.labels", QUEUE_LABEL, "an accelerator stage carries the queue's label"
        )


def _walk(value: Any, at: str) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) for `value` and all values below it; items of a list are named by their names."""
    yield at, value
    below: Iterable[tuple[object, Any]] = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list):
        below = (
            (item.get("name", i) if isinstance(item, Mapping) else i, item)
            for i, item in enumerate(value)
        )
    for name, item in below:
        yield from _walk(item, f"{at}.{name}")


def _expressions(spec: JsonMapping) -> Iterator[UserError]:
    """Find expressions, in tags and in fields that hold one, that the controller would refuse at run time."""
    for at, value in _walk(spec, "spec"):
        if not isinstance(value, str):
            continue
        if at.endswith((".expression", ".fromExpression")):
            yield from _expression(value, at)
            output = at.endswith(".valueFrom.expression") and ".outputs." in at
            if output and (match := _WORKFLOW.search(TAG.sub("", value))):
                yield UserError(
                    at,
                    match[0],
                    f"is not a name in an output's expression; write '{{{{{match[0]}}}}}'",
                )
        for tag in TAG.findall(value):
            if tag.strip().startswith("="):
                yield from _expression(tag.strip()[1:], at)


_WORKFLOW = re.compile(r"\bworkflow\.(?!outputs\b)[\w.]+")
_TEXT_CODE = re.compile(r"(?<!asInt\()\blastRetry\.exitCode\s*(==|!=|<|>|in\b|not\b)\s*[\d\[]")


def _expression(source: str, at: str) -> Iterator[UserError]:
    plain = TAG.sub("'x'", source)  # tags in expressions are replaced by text first
    try:
        check_expression(plain)
    except ExpressionError as error:
        yield UserError(at, source, str(error).removeprefix(f"{plain!r}: "))
    if _TEXT_CODE.search(source):
        yield UserError(at, source, "lastRetry.exitCode is text; write asInt(lastRetry.exitCode)")


def _references(task: JsonMapping) -> set[str]:
    """Find the tasks whose results a task's tags and conditions name."""
    texts = [str(task.get("when", "")), *TAG.findall(str(task.get("arguments") or {}))]
    return {match[1] or match[2] for text in texts for match in REFERENCE.finditer(text)}
