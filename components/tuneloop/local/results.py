"""What goes into a template and what it comes to, the names by which tags find them, and how the results of a graph's
tasks combine into its own."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tuneloop.core.ends import NO_EXIT_CODE
from tuneloop.local.journal import BROKEN
from tuneloop.workflow import expressions
from tuneloop.workflow.expression_values import ExpressionError, format_value
from tuneloop.workflow.expressions import substitute_tags

Scope = dict[str, Any]
"""Tag → value."""


@dataclass(frozen=True)
class Call:
    """One use of a template.

    Attributes:
        name: the node's path, ``grpo.loop.next``.
        parent: id of the node it belongs to.
        depth: templates entered above it.
    """

    template: str
    name: str
    parent: str
    depth: int
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Result:
    """What a node came to.

    Attributes:
        phase: one of `tuneloop.local.journal.DONE`, or ``Running`` for a daemon that is ready.
    """

    phase: str
    message: str = ""
    parameters: dict[str, str] = field(default_factory=dict)
    exit_code: int | None = None
    daemon: "Daemon | None" = None
    address: str = ""

    @property
    def broken(self) -> bool:
        return self.phase in BROKEN

    @property
    def code(self) -> int:
        """The exit code as the controller gives it: `NO_EXIT_CODE` where there is none."""
        return NO_EXIT_CODE if self.exit_code is None else self.exit_code


class Daemon(Protocol):
    """What runs on behind a node that is ready."""

    over: threading.Event
    result: Result

    def close(self) -> None:
        """End it, and wait for its end."""


def dependency_scope(names: Sequence[str], results: Mapping[str, Result]) -> Scope:
    """Return what a ``depends`` may ask of the tasks `names`."""
    scope: Scope = {}
    for name in names:
        result = results[name]
        flags = {flag: result.phase == flag for flag in ("Succeeded", "Failed", "Skipped", "Omitted")}
        flags |= {"Errored": result.phase == "Error", "Daemoned": result.daemon is not None}
        flags |= {"AnySucceeded": False, "AllFailed": False}  # of loops over items, which are not run here
        scope |= {f"{name.replace('-', '_')}.{flag}": value for flag, value in flags.items()}
    return scope


def branch_result(name: str, waits: Mapping[str, Sequence[str]], results: Mapping[str, Result]) -> Result:
    """Return the result of a leaf's branch: a task that did not complete takes over from those above it."""
    result = results[name]
    if result.phase in ("Succeeded", "Failed", "Error"):
        return result
    above = [branch_result(other, waits, results) for other in waits[name]]
    return next((each for each in above if each.broken), Result("Succeeded"))


def find_reason(results: Mapping[str, Result]) -> str:
    """Return the message of the first task that is broken."""
    return next((f"{name}: {r.message}" for name, r in results.items() if r.broken), "stopped")


def resolve_inputs(template: Mapping[str, Any], parameters: Mapping[str, str], scope: Scope) -> dict[str, str]:
    """Return a template's inputs: arguments over defaults. Raises ExpressionError at one without a value."""
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
            given = source["parameter"] if "parameter" in source else parameter["value"]
            return format_value(substitute_tags(given, scope))
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
        scope[f"{at}.ip"] = result.address
    return scope | {f"{at}.outputs.parameters.{key}": value for key, value in result.parameters.items()}
