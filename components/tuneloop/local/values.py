"""What goes into and comes out of a template: parameters, artifacts, items; and the names by which tags find them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneloop.local.results import Result, Scope
from tuneloop.workflow import expressions
from tuneloop.workflow.expression_values import ExpressionError, format_value
from tuneloop.workflow.expressions import substitute_tags


@dataclass(frozen=True)
class Inputs:
    """A template's inputs, resolved.

    Attributes:
        scope: the tags they stand for.
    """

    parameters: dict[str, str]
    artifacts: dict[str, Path | str]
    scope: Scope


def resolve_inputs(
    template: Mapping[str, Any], parameters: Mapping[str, str], artifacts: Mapping[str, Path | str], scope: Scope
) -> Inputs:
    """Return a template's inputs: arguments over defaults.

    Raises:
        ExpressionError: an input without value, or with one that its ``enum`` does not have.
    """
    declared = template.get("inputs", {})
    values: dict[str, str] = {}
    for parameter in declared.get("parameters", []):
        name = parameter["name"]
        value = parameters.get(name, parameter.get("value", parameter.get("default")))
        if value is None:
            raise ExpressionError(f"inputs.parameters.{name} of template {template['name']} was not supplied")
        values[name] = value if name in parameters else format_value(substitute_tags(value, scope))
        if parameter.get("enum") and values[name] not in map(format_value, parameter["enum"]):
            raise ExpressionError(f"inputs.parameters.{name}: {values[name]!r} is not one of {parameter['enum']}")
    resolved: dict[str, Path | str] = {}
    for artifact in declared.get("artifacts", []):
        name = artifact["name"]
        if name in artifacts:
            resolved[name] = artifacts[name]
        elif "raw" in artifact:
            resolved[name] = substitute_tags(artifact["raw"]["data"], scope | _prefixed("inputs.parameters", values))
        elif not artifact.get("optional"):
            raise ExpressionError(f"inputs.artifacts.{name} of template {template['name']} was not supplied")
    return Inputs(values, resolved, _prefixed("inputs.parameters", values) | _paths(template, values))


def _paths(template: Mapping[str, Any], values: Mapping[str, str]) -> Scope:
    scope: Scope = {"inputs.parameters": format_value([{"name": k, "value": v} for k, v in values.items()])}
    for side in ("inputs", "outputs"):
        for artifact in template.get(side, {}).get("artifacts", []):
            if "path" in artifact:
                scope[f"{side}.artifacts.{artifact['name']}.path"] = artifact["path"]
    for parameter in template.get("outputs", {}).get("parameters", []):
        if "path" in parameter.get("valueFrom", {}):
            scope[f"outputs.parameters.{parameter['name']}.path"] = parameter["valueFrom"]["path"]
    return scope


def _prefixed(prefix: str, values: Mapping[str, Any]) -> Scope:
    return {f"{prefix}.{name}": value for name, value in values.items()}


def resolve_arguments(given: Mapping[str, Any], scope: Scope) -> tuple[dict[str, str], dict[str, Path | str]]:
    """Return the arguments of a task or step, by name."""
    parameters = {}
    for parameter in given.get("parameters", []):
        source = parameter.get("valueFrom") or {}
        if "expression" in source:
            parameters[parameter["name"]] = format_value(
                expressions.evaluate_expression(substitute_tags(source["expression"], scope), scope)
            )
        elif parameter.get("value") is not None:
            parameters[parameter["name"]] = format_value(substitute_tags(parameter["value"], scope))
    artifacts: dict[str, Path | str] = {}
    for artifact in given.get("artifacts", []):
        value = _artifact(artifact, scope)
        if value is not None:
            artifacts[artifact["name"]] = value
    return parameters, artifacts


def resolve_outputs(declared: Mapping[str, Any], scope: Scope) -> tuple[dict[str, str], dict[str, Path | str]]:
    """Return the outputs of a DAG or steps template whose tasks have settled."""
    parameters = {parameter["name"]: _output(parameter, scope) for parameter in declared.get("parameters", [])}
    artifacts = {artifact["name"]: _artifact(artifact, scope) for artifact in declared.get("artifacts", [])}
    return parameters, {name: place for name, place in artifacts.items() if place is not None}


def _output(parameter: Mapping[str, Any], scope: Scope) -> str:
    source = parameter.get("valueFrom") or {}
    try:
        if "expression" not in source:
            return format_value(
                substitute_tags(source["parameter"] if "parameter" in source else parameter["value"], scope)
            )
        # The controller knows inputs, tasks and global outputs in here, but no other workflow.…: tags, yes; names, no.
        known = {k: v for k, v in scope.items() if not k.startswith("workflow.") or k.startswith("workflow.outputs.")}
        value = expressions.evaluate_expression(substitute_tags(source["expression"], scope), known)
        if value is None:
            raise ExpressionError(f"output {parameter['name']}: {source['expression']!r} has no value (nil)")
        return format_value(value)
    except (ExpressionError, KeyError):
        if "default" in source:
            return format_value(source["default"])
        raise


def _artifact(artifact: Mapping[str, Any], scope: Scope) -> Path | str | None:
    """Return where an artifact lies, or its text; None for an optional one without source."""
    if "raw" in artifact:
        return format_value(substitute_tags(artifact["raw"]["data"], scope))
    if "fromExpression" in artifact:
        value = expressions.evaluate_expression(artifact["fromExpression"], scope)
    else:
        tag = str(artifact.get("from", "")).strip().removeprefix("{{").removesuffix("}}").strip()
        value = expressions.evaluate_expression(tag[1:], scope) if tag.startswith("=") else scope.get(tag)
    if value is None:
        if artifact.get("optional"):
            return None
        raise ExpressionError(f"artifact {artifact['name']}: unable to resolve {artifact.get('from', 'its source')}")
    below = substitute_tags(artifact.get("subPath", ""), scope)
    return Path(value) / below if below else value  # type: ignore[no-any-return]


def list_items(task: Mapping[str, Any], scope: Scope) -> list[Any] | None:
    """Return what a task loops over; None if it does not."""
    if task.get("withItems") is not None:
        return list(substitute_tags(task["withItems"], scope))
    if task.get("withParam"):
        value = substitute_tags(task["withParam"], scope)
        try:
            items = json.loads(value)
        except json.JSONDecodeError:
            items = None
        if not isinstance(items, list):
            raise ExpressionError(f"withParam value could not be parsed as a JSON list: {value[:80]}")
        return items
    if task.get("withSequence"):
        return _sequence(
            {key: substitute_tags(format_value(value), scope) for key, value in task["withSequence"].items()}
        )
    return None


def _sequence(given: Mapping[str, str]) -> list[Any]:
    try:
        start = int(given.get("start") or 0)
        if "end" in given:
            last = int(given["end"])
        elif int(given["count"]) == 0:
            return []
        else:
            last = start + int(given["count"]) - 1
        step = 1 if last >= start else -1
        return [given.get("format", "%d") % number for number in range(start, last + step, step)]
    except (KeyError, ValueError, TypeError) as error:
        raise ExpressionError(f"withSequence {dict(given)}: {error}") from None


def label_item(item: Any) -> str:
    """Return an item as it appears in a node's name."""
    name = (
        ",".join(sorted(f"{k}:{format_value(v)}" for k, v in item.items()))
        if isinstance(item, dict)
        else format_value(item)
    )
    return name.replace("(", "").replace(")", "")


def result_scope(prefix: str, name: str, result: Result) -> Scope:
    """Return the tags of a task or step that has settled (or of a daemon that is ready)."""
    at = f"{prefix}.{name}"
    scope: Scope = {} if result.phases else {f"{at}.status": result.phase}  # a loop has none in Argo 3.7
    if result.exit_code is not None:
        scope[f"{at}.exitCode"] = str(result.exit_code)
    if result.daemon is not None:
        scope[f"{at}.ip"] = "127.0.0.1"
    if result.everything is not None:
        scope[f"{at}.outputs.parameters"] = result.everything
    for key, value in result.parameters.items():
        scope[f"{at}.outputs.parameters.{key}"] = value
    return scope | {f"{at}.outputs.artifacts.{key}": place for key, place in result.artifacts.items()}
