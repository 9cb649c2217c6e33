"""Graphs of a local run: templates, DAGs, steps, loops over items, recursion.

The semantics are those of the Argo controller 3.7 (https://argo-workflows.readthedocs.io/en/release-3.7/). Each task
runs on a thread of its own; what bounds the work is how many pods may run at a time.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuneloop.local.journal import Node
from tuneloop.local.pod import Result, Server, run_pod
from tuneloop.local.retries import retried
from tuneloop.local.values import Scope, arguments, inputs, items, label, outputs, results_scope
from tuneloop.workflow import expressions
from tuneloop.workflow.expressions import ExpressionError, substitute, text
from tuneloop.workflow.manifest import depends

if TYPE_CHECKING:
    from tuneloop.local.executor import Session

MAX_DEPTH = 100
"""The controller's maxAllowedStackDepth: what would be this deep is an error."""
TOO_DEEP = "Maximum recursion depth exceeded: at most 99 templates within one another, as in Argo"
UNMET = "omitted: depends condition not met"
ENDED_EARLY = "template has failed or errored children and failFast enabled"


@dataclass(frozen=True)
class Call:
    """One use of a template.

    Attributes:
        template: its name.
        name: the node's path, ``grpo.loop.next``.
        parent: id of the node it belongs to.
        depth: templates entered above it.
        parameters, artifacts: arguments, substituted.
        own: further names that its tags may use: ``tasks.name``, ``steps.name``.
    """

    template: str
    name: str
    parent: str
    depth: int
    parameters: Mapping[str, str] = field(default_factory=dict)
    artifacts: Mapping[str, Path | str] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)


def call(session: Session, what: Call) -> Result:
    """Run a template; never raises for what a workflow can do wrong."""
    template = session.templates.get(what.template)
    node = session.node(what, _kind(template))
    try:
        if template is None:
            raise ExpressionError(f"template {what.template} does not exist")
        if what.depth + 1 >= MAX_DEPTH:
            raise ExpressionError(TOO_DEEP)
        scope = session.globals() | {**what.own, "node.name": node.name}
        given = inputs(template, what.parameters, what.artifacts, scope)
        node.inputs = given.parameters | {f"artifact:{k}": str(v) for k, v in given.artifacts.items()}
        scope |= given.scope

        def attempt(node: Node, extra: Scope) -> Result:
            return _omit_ended(
                session, template, node, _attempt(session, template, node, what, scope | extra, given.artifacts)
            )

        strategy = template.get("retryStrategy")
        result = retried(session, substitute(strategy, scope), node, what, attempt) if strategy else attempt(node, {})
    except ExpressionError as error:
        result = Result("Error", str(error))
    except Exception as error:  # the machine's fault (no disk, no such file): this node's error, not the run's end
        result = Result("Error", f"{type(error).__name__}: {error}")
    result = _omit_ended(session, template or {}, node, result)
    _publish(session, template or {}, result)
    session.settle(node, result)
    return result


def _kind(template: Mapping[str, Any] | None) -> str:
    kinds = {"retryStrategy": "Retry", "dag": "DAG", "steps": "Steps"}
    return next((kind for key, kind in kinds.items() if key in (template or {})), "Pod")


def _attempt(
    session: Session,
    template: Mapping[str, Any],
    node: Node,
    what: Call,
    scope: Scope,
    artifacts: Mapping[str, Path | str],
) -> Result:
    if "dag" in template or "steps" in template:
        return Graph(session, template, node, what, scope, artifacts).run()
    filled = substitute({k: v for k, v in template.items() if k != "retryStrategy"}, scope | {"pod.name": node.id})
    return run_pod(session, filled, node, artifacts)


def _omit_ended(session: Session, template: Mapping[str, Any], node: Node, result: Result) -> Result:
    """`result`, unless the end of a server brought it about: then what failed is the server, and nothing else."""
    reason = session.find_end_reason(node.name)
    if reason is None or (result.phase == "Succeeded" and not {"dag", "steps"} & {*template}):
        return result
    if result.daemon:
        result.daemon.close()
    return Result("Omitted", reason)


def _publish(session: Session, template: Mapping[str, Any], result: Result) -> None:
    for parameter in template.get("outputs", {}).get("parameters", []):
        if "globalName" in parameter and parameter["name"] in result.parameters:
            session.publish("parameters", parameter["globalName"], result.parameters[parameter["name"]])
    for artifact in template.get("outputs", {}).get("artifacts", []):
        if "globalName" in artifact and artifact["name"] in result.artifacts:
            session.publish("artifacts", artifact["globalName"], result.artifacts[artifact["name"]])


class Graph:
    """A DAG or steps template at work: what its tasks share."""

    def __init__(
        self,
        session: Session,
        template: Mapping[str, Any],
        node: Node,
        what: Call,
        scope: Scope,
        artifacts: Mapping[str, Path | str],
    ) -> None:
        self.session, self.template, self.node, self.what = session, template, node, what
        self.prefix = "tasks" if "dag" in template else "steps"
        self.scope = scope | {f"inputs.artifacts.{name}": place for name, place in artifacts.items()}
        self.daemons: list[Server] = []
        self.fail_fast = str(template.get("failFast", False)).lower() == "true"
        self.broken = False
        self.gate = threading.Semaphore(int(template.get("parallelism") or 1 << 30))

    def run(self) -> Result:
        """Run all tasks, then end the daemons among them."""
        self.session.start(self.node)
        try:
            result, scope = self._dag() if self.prefix == "tasks" else self._steps()
            if self.broken and self.fail_fast:
                return Result("Failed", ENDED_EARLY)
            if not result.broken:
                result.parameters, result.artifacts = outputs(self.template.get("outputs", {}), scope)
            return result
        finally:
            threads = [_thread(daemon.close) for daemon in self.daemons]
            for thread in threads:
                thread.join()

    # DAG

    def _dag(self) -> tuple[Result, Scope]:
        tasks = {task["name"]: task for task in self.template["dag"]["tasks"]}
        logic = {name: depends(task, tasks) for name, task in tasks.items()}
        leaves = [name for name in tasks if not any(name in names for names, _ in logic.values())]
        targets = (self.template["dag"].get("target") or "").split() or leaves
        wanted = {name for target in targets for name in (target, *_ancestors(target, logic))}
        results = self._run_dag({name: tasks[name] for name in tasks if name in wanted}, logic)
        branches = [_branch(target, tasks, logic, results) for target in targets]
        scope = self.scope | _merged(results_scope("tasks", name, result) for name, result in results.items())
        broken = next((result.phase for result in branches if result.broken), None)
        return Result(broken, _blame(results)) if broken else Result("Succeeded"), scope

    def _run_dag(
        self, tasks: Mapping[str, Mapping[str, Any]], logic: Mapping[str, tuple[list[str], str]]
    ) -> dict[str, Result]:
        """Start each task as soon as what it depends on has settled."""
        results: dict[str, Result] = {}
        started: set[str] = set()
        changed = threading.Condition()

        def work(name: str) -> None:
            above = _ancestors(name, logic)
            with changed:
                scope = self.scope | _merged(results_scope("tasks", other, results[other]) for other in above)
            result = self.task(tasks[name], Place(self.node.name, self.node.id), scope)
            with changed:
                results[name] = result
                changed.notify()
            if result.daemon:
                _thread(follow, name, result.daemon)

        def follow(name: str, daemon: Server) -> None:
            daemon.over.wait()
            with changed:
                left = [n for n in tasks if n not in results and name in _ancestors(n, logic)]
                if left and daemon.result.broken and not self.session.stopping.is_set():
                    results[name] = daemon.result
                    self.session.end_nodes((f"{self.node.name}.{n}" for n in left), f"{name}: {daemon.result.message}")
                    changed.notify()

        with changed:
            while len(results) < len(tasks):
                ready = [n for n in tasks if n not in started and all(other in results for other in logic[n][0])]
                started |= set(ready)
                for name in ready:
                    names, condition = logic[name]
                    if condition and not expressions.truth(condition, _facts(names, results)):
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
            group = self.session.node(
                Call("", f"{self.what.name}[{index}]", self.node.id, self.what.depth), "StepGroup"
            )
            self.session.start(group)
            results: list[Result] = [Result("Omitted")] * len(steps)

            place = Place(group.name, group.id)

            def work(
                at: int, results: list[Result] = results, steps: Any = steps, place: Place = place, scope: Scope = scope
            ) -> None:
                results[at] = self.task(steps[at], place, scope)

            for thread in [_thread(work, at) for at in range(len(steps))]:
                thread.join()
            named = {step["name"]: result for step, result in zip(steps, results)}
            broken = any(result.broken and not _forgiven(step, result) for step, result in zip(steps, results))
            outcome = Result("Failed", _blame(named)) if broken or self.halted else Result("Succeeded")
            self.session.settle(group, outcome)
            if outcome.broken:
                return outcome, scope
            scope = scope | _merged(results_scope("steps", name, result) for name, result in named.items())
        return Result("Succeeded"), scope

    # One task or step

    @property
    def halted(self) -> bool:
        """Nothing new may start."""
        return self.session.stopping.is_set() or (self.fail_fast and self.broken)

    def task(self, task: Mapping[str, Any], place: Place, scope: Scope) -> Result:
        """A task or step: itself, or each of its items."""
        try:
            scope = scope | self.session.published
            many = items(task, scope)
            if many is None:
                with self.gate:
                    result = self.single(task, task["name"], place, scope)
            else:
                result = self.loop(task, many, place, scope)
        except Exception as error:  # whatever is wrong with it, the graph goes on
            told = str(error) if isinstance(error, ExpressionError) else f"{type(error).__name__}: {error}"
            result = self.skip(task, task["name"], place, "Error", told)
        return result

    def loop(self, task: Mapping[str, Any], many: Sequence[Any], place: Place, scope: Scope) -> Result:
        """All items of a task at a time, but for ``parallelism``, which takes them in order."""
        if not many:
            return self.skip(task, task["name"], place, "Skipped", "Skipped, empty params")
        whole: Node | None = None
        inside = place
        if self.prefix == "tasks":
            whole = self.session.node(self._called(task, task["name"], place), "TaskGroup")
            self.session.start(whole)
            inside = Place(place.path, whole.id)
        results: list[Result] = [Result("Omitted")] * len(many)

        def work(index: int, item: Any) -> None:
            own = scope | {"item": text(item)}
            if isinstance(item, dict):
                own |= {f"item.{key}": text(value) for key, value in item.items()}
            try:
                results[index] = self.single(task, f"{task['name']}({index}:{label(item)})", inside, own)
            finally:
                self.gate.release()

        threads = []
        for index, item in enumerate(many):
            self.gate.acquire()
            threads.append(_thread(work, index, item))
        for thread in threads:
            thread.join()
        result = _gathered(results)
        if whole:
            self.session.settle(whole, Result(result.phase, result.message))
        return result

    def single(self, task: Mapping[str, Any], display: str, place: Place, scope: Scope) -> Result:
        """A task or step without items, or one item of it: its condition, its template."""
        try:
            when = substitute(task.get("when", ""), scope)
            if not expressions.condition(when):
                return self.skip(task, display, place, "Skipped", f"when '{when}' evaluated false")
            parameters, artifacts = arguments(task.get("arguments") or {}, scope)
        except ExpressionError as error:
            return self.skip(task, display, place, "Error", str(error))
        called = self._called(task, display, place)
        if self.halted or self.session.find_end_reason(called.name):
            return Result("Omitted", "not started: the run is ending")
        own = {f"{self.prefix}.name": display}
        result = call(self.session, replace(called, parameters=parameters, artifacts=artifacts, own=own))
        if result.daemon:
            self.daemons.append(result.daemon)
        if result.broken and not _forgiven(task, result):
            self.broken = True
        return result

    def skip(self, task: Mapping[str, Any], display: str, place: Place, phase: str, message: str) -> Result:
        """The node of a task that does not run."""
        node = self.session.node(self._called(task, display, place), "Skipped")
        result = Result(phase, message)
        self.session.settle(node, result)
        return result

    def _called(self, task: Mapping[str, Any], display: str, place: Place) -> Call:
        return Call(task["template"], f"{place.path}.{display}", place.parent, self.what.depth + 1)


@dataclass(frozen=True)
class Place:
    """Where in the graph a task's node goes: the path before its name, and the id of the node it belongs to."""

    path: str
    parent: str


def _gathered(results: Sequence[Result]) -> Result:
    """What a loop comes to: failed if an item failed; the outputs of those that succeeded, in order, as JSON lists."""
    phase = next((result.phase for result in reversed(results) if result.broken), "Succeeded")
    good = [result for result in results if result.phase == "Succeeded"]
    sets = [r.parameters for r in good]
    names = sorted({name for values in sets for name in values})
    parameters = {name: _json_list([values[name] for values in sets if name in values]) for name in names}
    everything = expressions.text([values for values in sets if values])
    message = next((result.message for result in results if result.broken), "")
    return Result(phase, message, parameters, everything=everything, phases=tuple(r.phase for r in results))


def _json_list(values: Sequence[str]) -> str:
    """Lists and maps stay what they are if all are; else every value is text."""
    decoded = [_decoded(value) for value in values]
    return text(decoded if all(isinstance(value, list | dict) for value in decoded) else list(values))


def _decoded(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def _merged(scopes: Iterator[Scope]) -> Scope:
    whole: Scope = {}
    for scope in scopes:
        whole |= scope
    return whole


def _facts(names: Sequence[str], results: Mapping[str, Result]) -> Scope:
    """What a ``depends`` may ask of the tasks `names`."""
    scope: Scope = {}
    for name in names:
        result = results[name]
        flags = {flag: result.phase == flag for flag in ("Succeeded", "Failed", "Skipped", "Omitted")}
        flags |= {"Errored": result.phase == "Error", "Daemoned": result.daemon is not None}
        flags |= {"AnySucceeded": "Succeeded" in result.phases}
        flags |= {"AllFailed": bool(result.phases) and set(result.phases) == {"Failed"}}
        scope |= {f"{name.replace('-', '_')}.{flag}": value for flag, value in flags.items()}
    return scope


def _ancestors(name: str, logic: Mapping[str, tuple[list[str], str]]) -> set[str]:
    found: set[str] = set()
    queue = list(logic[name][0])
    while queue:
        other = queue.pop()
        if other == name:
            raise ExpressionError(f"task {name} depends on itself")
        if other not in found:
            found.add(other)
            queue += logic[other][0]
    return found


def _branch(
    name: str,
    tasks: Mapping[str, Mapping[str, Any]],
    logic: Mapping[str, tuple[list[str], str]],
    results: Mapping[str, Result],
) -> Result:
    """What a target's branch comes to: a task that did not complete takes over from those above it."""
    result = results[name]
    if result.phase in ("Succeeded", "Failed", "Error"):
        return Result("Succeeded") if result.broken and _forgiven(tasks[name], result) else result
    above = [_branch(other, tasks, logic, results) for other in logic[name][0]]
    return next((each for each in above if each.broken), Result("Succeeded"))


def _forgiven(task: Mapping[str, Any], result: Result) -> bool:
    allowed = task.get("continueOn") or {}
    return bool(allowed.get("failed") if result.phase == "Failed" else allowed.get("error"))


def _blame(results: Mapping[str, Result]) -> str:
    return next((f"{name}: {r.message}" for name, r in results.items() if r.broken), "stopped")


def _thread(work: Any, *args: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


__all__ = ["Call", "Result", "call"]
