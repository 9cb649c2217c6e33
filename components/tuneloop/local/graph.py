"""Graphs of a local run: templates, DAGs, steps, loops over items, recursion.

The semantics are those of the Argo controller 3.7 (https://argo-workflows.readthedocs.io/en/release-3.7/). Each task
runs on a thread of its own; what bounds the work is how many pods may run at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuneloop.local import values
from tuneloop.local.execution import Execution
from tuneloop.local.journal import Node
from tuneloop.local.pod import run_pod
from tuneloop.local.results import (
    Call,
    Daemon,
    Result,
    Scope,
    branch_result,
    combine_items,
    dependency_scope,
    find_ancestors,
    find_reason,
    may_continue,
    merge_scopes,
)
from tuneloop.local.retries import run_attempts
from tuneloop.workflow import expressions
from tuneloop.workflow.expression_values import ExpressionError, format_value
from tuneloop.workflow.expressions import substitute_tags
from tuneloop.workflow.manifest import parse_depends

MAX_DEPTH = 100
"""The controller's maxAllowedStackDepth: what would be this deep is an error."""
TOO_DEEP = "Maximum recursion depth exceeded: at most 99 templates within one another, as in Argo"
UNMET = "omitted: depends condition not met"
ENDED_EARLY = "template has failed or errored children and failFast enabled"


def run_template(execution: Execution, call: Call) -> Result:
    """Run a template; never raise for what a workflow can do wrong."""
    template = execution.templates.get(call.template)
    retried = template is not None and "retryStrategy" in template
    node = execution.create_node(call, "Retry" if retried else execution.attempt_type(call.template))
    try:
        if template is None:
            raise ExpressionError(f"template {call.template} does not exist")
        if call.depth + 1 >= MAX_DEPTH:
            raise ExpressionError(TOO_DEEP)
        scope = execution.global_scope() | {**call.own, "node.name": node.name}
        resolved = values.resolve_inputs(template, call.parameters, call.artifacts, scope)
        node.inputs = resolved.parameters | {f"artifact:{k}": str(v) for k, v in resolved.artifacts.items()}
        scope |= resolved.scope

        def attempt(node: Node, extra: Scope) -> Result:
            result = _attempt(execution, template, node, call, scope | extra, resolved.artifacts)
            return _omit_ended(execution, template, node, result)

        if retried:
            strategy = substitute_tags(template["retryStrategy"], scope)
            result = run_attempts(execution, strategy, node, call, attempt)
        else:
            result = attempt(node, {})
    except ExpressionError as error:
        result = Result("Error", str(error))
    except Exception as error:  # the machine's fault (no disk, no such file): this node's error, not the run's end
        result = Result("Error", f"{type(error).__name__}: {error}")
    result = _omit_ended(execution, template or {}, node, result)
    _publish(execution, template or {}, result)
    execution.settle(node, result)
    return result


def _attempt(
    execution: Execution,
    template: Mapping[str, Any],
    node: Node,
    call: Call,
    scope: Scope,
    artifacts: Mapping[str, Path | str],
) -> Result:
    if "dag" in template or "steps" in template:
        return Graph(execution, template, node, call, scope, artifacts).run()
    filled = substitute_tags({k: v for k, v in template.items() if k != "retryStrategy"}, scope | {"pod.name": node.id})
    return run_pod(execution, filled, node, artifacts)


def _omit_ended(execution: Execution, template: Mapping[str, Any], node: Node, result: Result) -> Result:
    """`result`, unless the end of a server brought it about: then what failed is the server, and nothing else."""
    reason = execution.find_end_reason(node.name)
    if reason is None or (result.phase == "Succeeded" and not {"dag", "steps"} & {*template}):
        return result
    if result.daemon:
        result.daemon.close()
    return Result("Omitted", reason)


def _publish(execution: Execution, template: Mapping[str, Any], result: Result) -> None:
    for parameter in template.get("outputs", {}).get("parameters", []):
        if "globalName" in parameter and parameter["name"] in result.parameters:
            execution.publish_output("parameters", parameter["globalName"], result.parameters[parameter["name"]])
    for artifact in template.get("outputs", {}).get("artifacts", []):
        if "globalName" in artifact and artifact["name"] in result.artifacts:
            execution.publish_output("artifacts", artifact["globalName"], result.artifacts[artifact["name"]])


class Graph:
    """A DAG or steps template at work: what its tasks share."""

    def __init__(
        self,
        execution: Execution,
        template: Mapping[str, Any],
        node: Node,
        call: Call,
        scope: Scope,
        artifacts: Mapping[str, Path | str],
    ) -> None:
        self.execution, self.template, self.node, self.call = execution, template, node, call
        self.prefix = "tasks" if "dag" in template else "steps"
        self.scope = scope | {f"inputs.artifacts.{name}": place for name, place in artifacts.items()}
        self.daemons: list[Daemon] = []
        self.fail_fast = str(template.get("failFast", False)).lower() == "true"
        self.broken = False
        self.gate = threading.Semaphore(int(template.get("parallelism") or 1 << 30))

    def run(self) -> Result:
        """Run all tasks, then end the daemons among them."""
        self.execution.start(self.node)
        try:
            result, scope = self._dag() if self.prefix == "tasks" else self._steps()
            if self.broken and self.fail_fast:
                return Result("Failed", ENDED_EARLY)
            if not result.broken:
                result.parameters, result.artifacts = values.resolve_outputs(self.template.get("outputs", {}), scope)
            return result
        finally:
            threads = [_thread(daemon.close) for daemon in self.daemons]
            for thread in threads:
                thread.join()

    # DAG

    def _dag(self) -> tuple[Result, Scope]:
        tasks = {task["name"]: task for task in self.template["dag"]["tasks"]}
        logic = {name: parse_depends(task, tasks) for name, task in tasks.items()}
        leaves = [name for name in tasks if not any(name in names for names, _ in logic.values())]
        targets = (self.template["dag"].get("target") or "").split() or leaves
        wanted = {name for target in targets for name in (target, *find_ancestors(target, logic))}
        results = self._run_dag({name: tasks[name] for name in tasks if name in wanted}, logic)
        branches = [branch_result(target, tasks, logic, results) for target in targets]
        scope = self.scope | merge_scopes(
            values.result_scope("tasks", name, result) for name, result in results.items()
        )
        broken = next((result.phase for result in branches if result.broken), None)
        return Result(broken, find_reason(results)) if broken else Result("Succeeded"), scope

    def _run_dag(
        self, tasks: Mapping[str, Mapping[str, Any]], logic: Mapping[str, tuple[list[str], str]]
    ) -> dict[str, Result]:
        """Start each task as soon as what it depends on has settled."""
        results: dict[str, Result] = {}
        started: set[str] = set()
        changed = threading.Condition()

        def work(name: str) -> None:
            above = find_ancestors(name, logic)
            with changed:
                scope = self.scope | merge_scopes(
                    values.result_scope("tasks", other, results[other]) for other in above
                )
            result = self.task(tasks[name], Place(self.node.name, self.node.id), scope)
            with changed:
                results[name] = result
                changed.notify()
            if result.daemon:
                _thread(follow, name, result.daemon)

        def follow(name: str, daemon: Daemon) -> None:
            daemon.over.wait()
            with changed:
                left = [n for n in tasks if n not in results and name in find_ancestors(n, logic)]
                if left and daemon.result.broken and not self.execution.stopping.is_set():
                    results[name] = daemon.result
                    self.execution.end_nodes(
                        (f"{self.node.name}.{n}" for n in left), f"{name}: {daemon.result.message}"
                    )
                    changed.notify()

        with changed:
            while len(results) < len(tasks):
                ready = [n for n in tasks if n not in started and all(other in results for other in logic[n][0])]
                started |= set(ready)
                for name in ready:
                    names, condition = logic[name]
                    if condition and not expressions.evaluate_boolean(condition, dependency_scope(names, results)):
                        place = Place(self.node.name, self.node.id)
                        results[name] = self.skip(tasks[name], name, place, "Omitted", UNMET)
                    else:
                        _thread(work, name)
                if not ready:
                    changed.wait()
        return results

    # Steps

    def _steps(self) -> tuple[Result, Scope]:
        scope = self.scope
        for index, steps in enumerate(self.template["steps"]):
            group = self.execution.create_node(
                Call("", f"{self.call.name}[{index}]", self.node.id, self.call.depth), "StepGroup"
            )
            self.execution.start(group)
            results: list[Result] = [Result("Omitted")] * len(steps)

            place = Place(group.name, group.id)

            def work(
                at: int, results: list[Result] = results, steps: Any = steps, place: Place = place, scope: Scope = scope
            ) -> None:
                results[at] = self.task(steps[at], place, scope)

            for thread in [_thread(work, at) for at in range(len(steps))]:
                thread.join()
            named = {step["name"]: result for step, result in zip(steps, results)}
            broken = any(result.broken and not may_continue(step, result) for step, result in zip(steps, results))
            outcome = Result("Failed", find_reason(named)) if broken or self.halted else Result("Succeeded")
            self.execution.settle(group, outcome)
            if outcome.broken:
                return outcome, scope
            scope = scope | merge_scopes(values.result_scope("steps", name, result) for name, result in named.items())
        return Result("Succeeded"), scope

    # One task or step

    @property
    def halted(self) -> bool:
        """Nothing new may start."""
        return self.execution.stopping.is_set() or (self.fail_fast and self.broken)

    def task(self, task: Mapping[str, Any], place: Place, scope: Scope) -> Result:
        """A task or step: itself, or each of its items."""
        try:
            scope = scope | self.execution.published
            many = values.list_items(task, scope)
            if many is None:
                with self.gate:
                    result = self.single(task, task["name"], place, scope)
            else:
                result = self.loop(task, many, place, scope)
        except Exception as error:  # whatever is wrong with it, the graph goes on
            message = str(error) if isinstance(error, ExpressionError) else f"{type(error).__name__}: {error}"
            result = self.skip(task, task["name"], place, "Error", message)
        return result

    def loop(self, task: Mapping[str, Any], many: Sequence[Any], place: Place, scope: Scope) -> Result:
        """All items of a task at a time, but for ``parallelism``, which takes them in order."""
        if not many:
            return self.skip(task, task["name"], place, "Skipped", "Skipped, empty params")
        group: Node | None = None
        inside = place
        if self.prefix == "tasks":
            group = self.execution.create_node(self._call(task, task["name"], place), "TaskGroup")
            self.execution.start(group)
            inside = Place(place.path, group.id)
        results: list[Result] = [Result("Omitted")] * len(many)

        def work(index: int, item: Any) -> None:
            own = scope | {"item": format_value(item)}
            if isinstance(item, dict):
                own |= {f"item.{key}": format_value(value) for key, value in item.items()}
            try:
                results[index] = self.single(task, f"{task['name']}({index}:{values.label_item(item)})", inside, own)
            finally:
                self.gate.release()

        threads = []
        for index, item in enumerate(many):
            self.gate.acquire()
            threads.append(_thread(work, index, item))
        for thread in threads:
            thread.join()
        result = combine_items(results)
        if group:
            self.execution.settle(group, Result(result.phase, result.message))
        return result

    def single(self, task: Mapping[str, Any], display: str, place: Place, scope: Scope) -> Result:
        """A task or step without items, or one item of it: its condition, its template."""
        try:
            when = substitute_tags(task.get("when", ""), scope)
            if not expressions.evaluate_when(when):
                return self.skip(task, display, place, "Skipped", f"when '{when}' evaluated false")
            parameters, artifacts = values.resolve_arguments(task.get("arguments") or {}, scope)
        except ExpressionError as error:
            return self.skip(task, display, place, "Error", str(error))
        call = self._call(task, display, place)
        if self.halted or self.execution.find_end_reason(call.name):
            return Result("Omitted", "not started: the run is ending")
        own = {f"{self.prefix}.name": display}
        result = run_template(self.execution, replace(call, parameters=parameters, artifacts=artifacts, own=own))
        if result.daemon:
            self.daemons.append(result.daemon)
        if result.broken and not may_continue(task, result):
            self.broken = True
        return result

    def skip(self, task: Mapping[str, Any], display: str, place: Place, phase: str, message: str) -> Result:
        """The node of a task that does not run."""
        node = self.execution.create_node(self._call(task, display, place), "Skipped")
        result = Result(phase, message)
        self.execution.settle(node, result)
        return result

    def _call(self, task: Mapping[str, Any], display: str, place: Place) -> Call:
        return Call(task["template"], f"{place.path}.{display}", place.parent, self.call.depth + 1)


@dataclass(frozen=True)
class Place:
    """Where in the graph a task's node goes: the path before its name, and the id of the node it belongs to."""

    path: str
    parent: str


def _thread(work: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread
