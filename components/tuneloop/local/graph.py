"""Graphs of a local run: templates, DAGs, recursion; the names by which tags find their inputs and outputs. The
semantics are those of the Argo controller 3.7 (https://argo-workflows.readthedocs.io/en/release-3.7/). Each task has a
thread of its own; the work is bounded by the number of pods that may run at a time."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tuneloop.core.json_types import JsonMapping
from tuneloop.local.execution import Execution
from tuneloop.local.journal import Node
from tuneloop.local.pod import run_pod
from tuneloop.local.results import Call, Daemon, Result, Scope
from tuneloop.local.retries import Attempts
from tuneloop.workflow import expressions
from tuneloop.workflow.expression_values import ExpressionError, format_value
from tuneloop.workflow.expressions import substitute_tags
from tuneloop.workflow.manifest import find_ancestors, parse_depends

MAX_DEPTH = 100
"""The controller's maxAllowedStackDepth: what would be this deep is an error."""
TOO_DEEP = "Maximum recursion depth exceeded: at most 99 templates within one another, as in Argo"
UNMET = "omitted: depends condition not met"


def run_template(execution: Execution, call: Call) -> Result:
    """Run a template; an error in the workflow becomes the result, and is not raised."""
    template = execution.templates.get(call.template)
    retried = template is not None and "retryStrategy" in template
    node = execution.create_node(
        call, "Retry" if retried else execution.attempt_type(call.template)
    )
    try:
        if template is None:
            raise ExpressionError(f"template {call.template} does not exist")
        if call.depth + 1 >= MAX_DEPTH:
            raise ExpressionError(TOO_DEEP)
        scope = execution.global_scope() | {"node.name": node.name}
        node.inputs = resolve_inputs(template, call.parameters, scope)
        scope |= input_scope(template, node.inputs)

        def attempt(node: Node, extra: Scope) -> Result:
            result = _attempt(execution, template, node, call, scope | extra)
            return _omit_ended(execution, template, node, result)

        if retried:
            result = Attempts(
                execution, substitute_tags(template["retryStrategy"], scope), node, call, attempt
            ).run()
        else:
            result = attempt(node, {})
    except ExpressionError as error:
        result = Result("Error", str(error))
    except (
        Exception
    ) as error:  # the machine's fault (no disk, no such file): this node's error, not the run's end
        result = Result("Error", f"{type(error).__name__}: {error}")
    result = _omit_ended(execution, template or {}, node, result)
    for parameter in (template or {}).get("outputs", {}).get("parameters", []):
        if "globalName" in parameter and parameter["name"] in result.parameters:
            execution.publish_output(parameter["globalName"], result.parameters[parameter["name"]])
    execution.settle(node, result)
    return result


def _attempt(
    execution: Execution, template: JsonMapping, node: Node, call: Call, scope: Scope
) -> Result:
    if "dag" in template:
        return Graph(execution, template, node, call.depth, scope).run()
    filled = substitute_tags(
        {k: v for k, v in template.items() if k != "retryStrategy"}, scope | {"pod.name": node.id}
    )
    return run_pod(execution, filled, node)


def _omit_ended(execution: Execution, template: JsonMapping, node: Node, result: Result) -> Result:
    """Return `result`, or ``Omitted`` if a server's end caused it, so that only the server counts as failed."""
    reason = execution.find_end_reason(node.name)
    if reason is None or (result.phase == "Succeeded" and "dag" not in template):
        return result
    if result.daemon:
        result.daemon.close()
    return Result("Omitted", reason)


class Graph:
    """One execution of a DAG template: the state that its tasks share."""

    def __init__(
        self,
        execution: Execution,
        template: JsonMapping,
        node: Node,
        depth: int,
        scope: Scope,
    ) -> None:
        self.execution = execution
        self.template = template
        self.node = node
        self.depth = depth
        self.scope = scope
        self.tasks = {task["name"]: task for task in template["dag"]["tasks"]}
        logic = {name: parse_depends(task, self.tasks) for name, task in self.tasks.items()}
        self.waits = {name: names for name, (names, _) in logic.items()}
        self.conditions = {name: condition for name, (_, condition) in logic.items()}
        self.daemons: list[Daemon] = []

    def run(self) -> Result:
        """Run all tasks, then end the daemons among them."""
        self.execution.start(self.node)
        try:
            results = self._run_tasks()
            leaves = [
                name
                for name in self.tasks
                if not any(name in names for names in self.waits.values())
            ]
            branches = [get_branch_result(leaf, self.waits, results) for leaf in leaves]
            broken = next((result.phase for result in branches if result.broken), None)
            if broken:
                return Result(
                    broken,
                    next((f"{k}: {r.message}" for k, r in results.items() if r.broken), "stopped"),
                )
            scope = self._scope_behind(results)
            declared = self.template.get("outputs", {}).get("parameters", [])
            return Result(
                "Succeeded", "", {each["name"]: resolve_output(each, scope) for each in declared}
            )
        finally:
            threads = [_thread(daemon.close) for daemon in self.daemons]
            for thread in threads:
                thread.join()

    def _scope_behind(self, results: Mapping[str, Result]) -> Scope:
        """Return the tags that tasks after those with these results can use."""
        scope = dict(self.scope)
        for name, result in results.items():
            scope |= result_scope(name, result)
        return scope

    def _run_tasks(self) -> dict[str, Result]:
        """Start each task as soon as what it depends on has settled."""
        results: dict[str, Result] = {}
        started: set[str] = set()
        changed = threading.Condition()
        above = {name: find_ancestors(name, self.waits) for name in self.tasks}

        def work(name: str) -> None:
            with changed:
                scope = self._scope_behind({other: results[other] for other in above[name]})
            result = self.run_task(self.tasks[name], scope)
            with changed:
                results[name] = result
                changed.notify()
            if result.daemon:
                _thread(follow, name, result.daemon)

        def follow(name: str, daemon: Daemon) -> None:
            daemon.over.wait()
            with changed:
                left = [n for n in self.tasks if n not in results and name in above[n]]
                if left and daemon.result.broken and not self.execution.stopping.is_set():
                    results[name] = daemon.result
                    paths = (f"{self.node.name}.{n}" for n in left)
                    self.execution.end_nodes(paths, f"{name}: {daemon.result.message}")
                    changed.notify()

        with changed:
            while len(results) < len(self.tasks):
                waiting = [name for name in self.tasks if name not in started]
                ready = [
                    name for name in waiting if all(other in results for other in self.waits[name])
                ]
                started |= set(ready)
                for name in ready:
                    condition = self.conditions[name]
                    facts = dependency_scope(self.waits[name], results)
                    if condition and not expressions.evaluate_boolean(condition, facts):
                        results[name] = self.skip(self._call(self.tasks[name]), "Omitted", UNMET)
                    else:
                        _thread(work, name)
                if not ready:
                    changed.wait()
        return results

    # One task

    def run_task(self, task: JsonMapping, scope: Scope) -> Result:
        """Run a task: its condition, its template."""
        call = self._call(task)
        scope = scope | self.execution.published
        try:
            when = substitute_tags(task.get("when", ""), scope)
            if not expressions.evaluate_when(when):
                return self.skip(call, "Skipped", f"when '{when}' evaluated false")
            given = [
                p
                for p in (task.get("arguments") or {}).get("parameters", [])
                if p.get("value") is not None
            ]
            parameters = {
                p["name"]: format_value(substitute_tags(p["value"], scope)) for p in given
            }
        except Exception as error:  # whatever is wrong with it, the graph goes on
            message = (
                str(error)
                if isinstance(error, ExpressionError)
                else f"{type(error).__name__}: {error}"
            )
            return self.skip(call, "Error", message)
        if self.execution.stopping.is_set() or self.execution.find_end_reason(call.name):
            return Result("Omitted", "not started: the run is ending")
        result = run_template(self.execution, replace(call, parameters=parameters))
        if result.daemon:
            self.daemons.append(result.daemon)
        return result

    def skip(self, call: Call, phase: str, message: str) -> Result:
        """Record the node of a task that does not run."""
        node = self.execution.create_node(call, "Skipped")
        result = Result(phase, message)
        self.execution.settle(node, result)
        return result

    def _call(self, task: JsonMapping) -> Call:
        return Call(
            task["template"], f"{self.node.name}.{task['name']}", self.node.id, self.depth + 1
        )


def _thread(work: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def dependency_scope(names: Sequence[str], results: Mapping[str, Result]) -> Scope:
    """Return the names that a ``depends`` condition can use for the tasks `names`."""
    scope: Scope = {}
    for name in names:
        result = results[name]
        flags = {
            flag: result.phase == flag for flag in ("Succeeded", "Failed", "Skipped", "Omitted")
        }
        flags |= {"Errored": result.phase == "Error", "Daemoned": result.daemon is not None}
        flags |= {
            "AnySucceeded": False,
            "AllFailed": False,
        }  # for loops over items, which are not supported here
        scope |= {f"{name.replace('-', '_')}.{flag}": value for flag, value in flags.items()}
    return scope


def get_branch_result(
    name: str, waits: Mapping[str, Sequence[str]], results: Mapping[str, Result]
) -> Result:
    """Return the result of a leaf's branch: its own, or if it did not complete, that of the tasks it depends on."""
    result = results[name]
    if result.phase in ("Succeeded", "Failed", "Error"):
        return result
    above = [get_branch_result(other, waits, results) for other in waits[name]]
    return next((each for each in above if each.broken), Result("Succeeded"))


def resolve_inputs(
    template: JsonMapping, parameters: Mapping[str, str], scope: Scope
) -> dict[str, str]:
    """Return a template's inputs: arguments over defaults.

    Raises ExpressionError at one without a value.
    """
    values: dict[str, str] = {}
    for parameter in template.get("inputs", {}).get("parameters", []):
        name = parameter["name"]
        value = parameters.get(name, parameter.get("value", parameter.get("default")))
        if value is None:
            raise ExpressionError(
                f"inputs.parameters.{name} of template {template['name']} was not supplied"
            )
        values[name] = value if name in parameters else format_value(substitute_tags(value, scope))
    return values


def input_scope(template: JsonMapping, inputs: Mapping[str, str]) -> Scope:
    """Return the tags of a template's inputs, and of the paths of its outputs."""
    scope: Scope = {
        "inputs.parameters": format_value([{"name": k, "value": v} for k, v in inputs.items()])
    }
    scope |= {f"inputs.parameters.{name}": value for name, value in inputs.items()}
    for parameter in template.get("outputs", {}).get("parameters", []):
        if "path" in parameter.get("valueFrom", {}):
            scope[f"outputs.parameters.{parameter['name']}.path"] = parameter["valueFrom"]["path"]
    return scope


def resolve_output(parameter: JsonMapping, scope: Scope) -> str:
    """Return an output of a DAG whose tasks have settled."""
    source = parameter.get("valueFrom") or {}
    try:
        if "expression" not in source:
            given = source["parameter"] if "parameter" in source else parameter["value"]
            return format_value(substitute_tags(given, scope))
        # Inside an expression the controller knows inputs, tasks and global outputs by name, and no
        # other workflow.… tag.
        known = {
            k: v
            for k, v in scope.items()
            if not k.startswith("workflow.") or k.startswith("workflow.outputs.")
        }
        value = expressions.evaluate_expression(substitute_tags(source["expression"], scope), known)
        if value is None:
            raise ExpressionError(
                f"output {parameter['name']}: {source['expression']!r} has no value (nil)"
            )
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
    return scope | {
        f"{at}.outputs.parameters.{key}": value for key, value in result.parameters.items()
    }
