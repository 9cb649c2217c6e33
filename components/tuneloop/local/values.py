"""What goes into and comes out of a template, and the names by which tags find them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuneloop.local.results import Result, Scope
from tuneloop.workflow import expressions
from tuneloop.workflow.expression_values import ExpressionError, format_value
from tuneloop.workflow.expressions import substitute_tags


def resolve_inputs(template: Mapping[str, Any], parameters: Mapping[str, str], scope: Scope) -> dict[str, str]:
    """Return a template's inputs: arguments over defaults.

    Raises:
        ExpressionError: an input without value.
    """
    values: dict[str, str] = {}
    for parameter in template.get("inputs", {}).get("parameters", []):
        name = parameter["name"]
        value = parameters.get(name, parameter.get("value", parameter.get("default")))
        if value is None:
            raise ExpressionError(f"inputs.parameters.{name} of template {template['name']} was not supplied")
        values[name] = value if name in parameters else format_value(substitute_tags(value, scope))
    return values


def input_scope(template: Mapping[str, Any], inputs: Mapping[str, str]) -> Scope:
    """Return the tags of a template's inputs, and of the paths of its outputs."""
    scope: Scope = {"inputs.parameters": format_value([{"name": k, "value": v} for k, v in inputs.items()])}
    scope |= {f"inputs.parameters.{name}": value for name, value in inputs.items()}
    for parameter in template.get("outputs", {}).get("parameters", []):
        if "path" in parameter.get("valueFrom", {}):
            scope[f"outputs.parameters.{parameter['name']}.path"] = parameter["valueFrom"]["path"]
    return scope


def resolve_arguments(task: Mapping[str, Any], scope: Scope) -> dict[str, str]:
    """Return the arguments of a task, by name."""
    given = (task.get("arguments") or {}).get("parameters", [])
    return {p["name"]: format_value(substitute_tags(p["value"], scope)) for p in given if p.get("value") is not None}


def resolve_outputs(declared: Mapping[str, Any], scope: Scope) -> dict[str, str]:
    """Return the outputs of a DAG whose tasks have settled."""
    return {parameter["name"]: _output(parameter, scope) for parameter in declared.get("parameters", [])}


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


def result_scope(name: str, result: Result) -> Scope:
    """Return the tags of a task that has settled (or of a daemon that is ready)."""
    at = f"tasks.{name}"
    scope: Scope = {f"{at}.status": result.phase}
    if result.exit_code is not None:
        scope[f"{at}.exitCode"] = str(result.exit_code)
    if result.daemon is not None:
        scope[f"{at}.ip"] = "127.0.0.1"
    return scope | {f"{at}.outputs.parameters.{key}": value for key, value in result.parameters.items()}
