"""Graphs of a local run: tasks and steps, conditions, loops over items, recursion, retries, exit hooks.

The semantics are those of the Argo controller (https://argo-workflows.readthedocs.io/en/latest/: enhanced depends
logic, retries, loops, exit handlers). Each task runs on a thread of its own; what bounds the work is how many
pods may run at a time.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuneloop.argo import expressions
from tuneloop.argo.expressions import ExpressionError, substitute, text
from tuneloop.argo.pod import Daemon, Result, run_pod, suspend
from tuneloop.argo.spec import depends, seconds
from tuneloop.argo.state import Node

if TYPE_CHECKING:
    from tuneloop.argo.executor import Session

Scope = dict[str, Any]
MAX_DEPTH = 100
"""As the controller's maxAllowedStackDepth."""
WORST = ("Succeeded", "Skipped", "Omitted", "Failed", "Error")


@dataclass(frozen=True)
class Call:
    """One use of a template.

    Attributes:
        template: its name.
        name: the node's path, ``grpo.loop.next``.
        parent: id of the node it belongs to.
        depth: templates entered above it.
        parameters, artifacts: arguments, substituted.
    """

    template: str
    name: str
    parent: str
    depth: int
    parameters: Mapping[str, str]
    artifacts: Mapping[str, Path | str]


def call(session: Session, what: Call) -> Result:
    """Run a template; never raises for what a workflow can do wrong."""
    template = session.templates.get(what.template)
    node = session.node(what, _kind(template))
    try:
        if template is None:
            raise ExpressionError(f"template {what.template} does not exist")
        if what.depth + 1 >= MAX_DEPTH:
            raise ExpressionError("Maximum recursion depth exceeded. See Argo's DISABLE_MAX_RECURSION")
        inputs, artifacts = _inputs(session, template, what)
        node.inputs = {**inputs, **{f"artifact:{k}": str(v) for k, v in artifacts.items()}}
        scope = session.scope | {f"inputs.parameters.{k}": v for k, v in inputs.items()}
        scope |= {f"inputs.artifacts.{k}.path": str(v) for k, v in artifacts.items()} | {"node.name": node.name}
        if "dag" in template or "steps" in template:
            result = _graph(session, template, node, what, scope, artifacts)
        elif "retryStrategy" in template:
            result = _retried(session, template, node, what, scope, artifacts)
        else:
            result = _leaf(session, template, node, scope, artifacts)
    except ExpressionError as error:
        result = Result("Error", str(error))
    except Exception as error:  # the machine's fault (no disk, no such file): this node's error, not the run's end
        result = Result("Error", f"{type(error).__name__}: {error}")
    _settle(session, template or {}, node, result)
    return result


def _kind(template: Mapping[str, Any] | None) -> str:
    template = template or {}
    for key, kind in (("dag", "DAG"), ("steps", "Steps"), ("retryStrategy", "Retry"), ("suspend", "Suspend")):
        if key in template:
            return kind
    return "Pod"


def _settle(session: Session, template: Mapping[str, Any], node: Node, result: Result) -> None:
    for parameter in template.get("outputs", {}).get("parameters", []):
        if "globalName" in parameter and parameter["name"] in result.parameters:
            session.publish(parameter["globalName"], result.parameters[parameter["name"]])
    node.outputs = {**result.parameters, **{f"artifact:{k}": str(v) for k, v in result.artifacts.items()}}
    node.exit_code = result.exit_code
    if result.daemon is None or result.daemon.node is not node:
        phase = "Succeeded" if result.phase == "Running" else result.phase
        session.finish(node, phase, result.message)


def _inputs(session: Session, template: Mapping[str, Any], what: Call) -> tuple[dict[str, str], dict[str, Path | str]]:
    declared = template.get("inputs", {})
    parameters = {}
    for parameter in declared.get("parameters", []):
        name = parameter["name"]
        value = what.parameters.get(name, parameter.get("value", parameter.get("default")))
        if value is None:
            raise ExpressionError(f"inputs.parameters.{name} of template {template['name']} was not supplied")
        parameters[name] = text(substitute(value, session.scope))
        if parameter.get("enum") and parameters[name] not in map(str, parameter["enum"]):
            raise ExpressionError(f"inputs.parameters.{name}: {parameters[name]!r} is not one of {parameter['enum']}")
    artifacts: dict[str, Path | str] = {}
    for artifact in declared.get("artifacts", []):
        name = artifact["name"]
        if name in what.artifacts:
            artifacts[name] = what.artifacts[name]
        elif "raw" in artifact:
            artifacts[name] = str(artifact["raw"]["data"])
        elif not artifact.get("optional"):
            raise ExpressionError(f"inputs.artifacts.{name} of template {template['name']} was not supplied")
    return parameters, artifacts


def _leaf(
    session: Session, template: Mapping[str, Any], node: Node, scope: Scope, artifacts: Mapping[str, Path | str]
) -> Result:
    filled = substitute(dict(template), scope | {"pod.name": node.id})
    result = suspend(session, filled, node) if "suspend" in filled else run_pod(session, filled, node, artifacts)
    if node.started == 0.0:
        session.start(node)
    return result


# Retries ------------------------------------------------------------------------------------------------------------


def _retried(
    session: Session,
    template: Mapping[str, Any],
    node: Node,
    what: Call,
    scope: Scope,
    artifacts: Mapping[str, Path | str],
) -> Result:
    strategy = substitute(dict(template["retryStrategy"]), scope)
    single = {key: value for key, value in template.items() if key != "retryStrategy"}
    session.start(node)
    began = time.monotonic()
    attempt = 0
    while True:
        pod = session.node(Call(what.template, f"{what.name}({attempt})", node.id, what.depth, {}, {}), "Pod")
        pod.inputs = node.inputs
        try:
            result = _leaf(session, single, pod, scope | {"retries": str(attempt)}, artifacts)
        except ExpressionError as error:
            result = Result("Error", str(error))
        _settle(session, {}, pod, result)
        if not result.broken or session.stopping.is_set():
            return result
        pause = _pause(strategy, attempt)
        if not _again(strategy, scope, result, pod, attempt, time.monotonic() - began + pause):
            return result
        node.message = f"attempt {attempt + 1}: {result.message}; again in {pause:g} s"
        session.tell(node)
        if session.stopping.wait(pause):
            return result
        attempt += 1


def _again(strategy: Mapping[str, Any], scope: Scope, result: Result, pod: Node, attempt: int, elapsed: float) -> bool:
    limit = strategy.get("limit")
    if limit is not None and attempt >= int(limit):
        return False
    longest = (strategy.get("backoff") or {}).get("maxDuration")
    if longest is not None and elapsed > seconds(longest):
        return False
    expression = strategy.get("expression")
    policy = strategy.get("retryPolicy") or ("Always" if expression else "OnFailure")
    allowed = {"Always": ("Failed", "Error"), "OnFailure": ("Failed",), "OnError": ("Error",)}.get(policy, ())
    if result.phase not in allowed:
        return False
    if not expression:
        return True
    last = {
        "lastRetry.status": result.phase,
        "lastRetry.exitCode": str(-1 if result.exit_code is None else result.exit_code),
        "lastRetry.message": result.message,
        "lastRetry.duration": str(max(0.0, time.time() - pod.started)),
        "retries": str(attempt),
    }
    return expressions.truth(expression, scope | last)


def _pause(strategy: Mapping[str, Any], attempt: int) -> float:
    backoff = strategy.get("backoff") or {}
    if not backoff.get("duration"):
        return 0.0
    pause = seconds(backoff["duration"]) * float(backoff.get("factor") or 1) ** attempt
    return min(pause, seconds(backoff["cap"])) if backoff.get("cap") else pause


# DAG and steps ------------------------------------------------------------------------------------------------------


def _graph(
    session: Session,
    template: Mapping[str, Any],
    node: Node,
    what: Call,
    scope: Scope,
    artifacts: Mapping[str, Path | str],
) -> Result:
    session.start(node)
    daemons: list[Daemon] = []
    held: Scope = dict(scope) | {f"inputs.artifacts.{k}": v for k, v in artifacts.items()}
    try:
        run = _dag if "dag" in template else _steps
        phase, message, inner = run(session, template, node, what, held, daemons)
        if phase in ("Failed", "Error"):
            return Result(phase, message)
        parameters, found = _outputs(template, inner)
        return Result("Succeeded", parameters=parameters, artifacts=found)
    finally:
        for daemon in daemons:
            daemon.close()


Ran = tuple[str, str, Scope]


def _dag(
    session: Session, template: Mapping[str, Any], node: Node, what: Call, scope: Scope, daemons: list[Daemon]
) -> Ran:
    tasks = {task["name"]: task for task in template["dag"]["tasks"]}
    logic = {name: depends(task, tasks) for name, task in tasks.items()}
    ancestors = {name: _ancestors(name, logic) for name in tasks}
    fail_fast = str(template["dag"].get("failFast", True)).lower() != "false"
    results: dict[str, Result] = {}
    done = threading.Condition()
    running: set[str] = set()
    gate = _Gate(template.get("parallelism"))

    def visible(name: str) -> Scope:
        found = dict(scope)
        for other in tasks if not name else ancestors[name]:
            if other in results:
                found |= _task_scope("tasks", other, results[other])
        return found

    def work(name: str) -> None:
        with gate:
            result = _task(session, tasks[name], node, what, visible(name), daemons)
        with done:
            results[name] = result
            running.discard(name)
            done.notify()

    with done:
        while len(results) < len(tasks):
            broken = any(results[n].broken and not _forgiven(tasks[n], results[n]) for n in results)
            for name in tasks:
                names, condition = logic[name]
                if name in results or name in running or any(other not in results for other in names):
                    continue
                halted = session.stopping.is_set() or (broken and fail_fast and not _handles_failure(condition))
                if halted:
                    results[name] = Result("Omitted", "not started: the run is ending")
                elif condition and not expressions.truth(condition, _depend_scope(names, results)):
                    results[name] = _skip(
                        session, node, what, name, tasks[name], "Omitted", "depends condition not met"
                    )
                else:
                    running.add(name)
                    threading.Thread(target=work, args=(name,), daemon=True).start()
            if len(results) < len(tasks) and running:
                done.wait()
    targets = (template["dag"].get("target") or "").split() or [
        name for name in tasks if not any(name in logic[other][0] for other in tasks)
    ]
    phase = max((_branch(name, tasks, logic, results) for name in targets), key=WORST.index)
    return phase, _first_message(results), visible("")


def _steps(
    session: Session, template: Mapping[str, Any], node: Node, what: Call, scope: Scope, daemons: list[Daemon]
) -> Ran:
    for group in template["steps"]:
        results: dict[str, Result] = {}
        gate = _Gate(template.get("parallelism"))

        def work(
            step: Mapping[str, Any], results: dict[str, Result] = results, gate: _Gate = gate, scope: Scope = scope
        ) -> None:
            with gate:
                results[step["name"]] = _task(session, step, node, what, scope, daemons)

        threads = [threading.Thread(target=work, args=(step,), daemon=True) for step in group]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for step in group:
            result = results[step["name"]]
            scope = scope | _task_scope("steps", step["name"], result)
            if result.broken and not _forgiven(step, result):
                return result.phase, _first_message(results), scope
        if session.stopping.is_set():
            return "Failed", "stopped", scope
    return "Succeeded", "", scope


def _task(
    session: Session,
    task: Mapping[str, Any],
    node: Node,
    what: Call,
    scope: Scope,
    daemons: list[Daemon],
) -> Result:
    """One task or step: its items or itself, then its exit hook."""
    try:
        items = _items(task, scope)
        if items is None:
            result = _once(session, task, node, what, scope, task["name"], daemons)
        else:
            result = _each(session, task, node, what, scope, items, daemons)
        hook = (task.get("hooks") or {}).get("exit") or ({"template": task["onExit"]} if task.get("onExit") else None)
        if hook and result.phase not in ("Skipped", "Omitted"):
            own = scope | _task_scope(
                "tasks" if "dag" in session.templates[what.template] else "steps", task["name"], result
            )
            run_hook(session, hook, f"{what.name}.{task['name']}.onExit", node.id, what.depth + 1, own)
        return result
    except ExpressionError as error:
        return _skip(session, node, what, task["name"], task, "Error", str(error))


def _once(
    session: Session,
    task: Mapping[str, Any],
    node: Node,
    what: Call,
    scope: Scope,
    display: str,
    daemons: list[Daemon],
) -> Result:
    if "when" in task:
        when = substitute(task["when"], scope)
        if not expressions.condition(when):
            return _skip(session, node, what, display, task, "Skipped", f"when {when!r} evaluated false")
    name = session.template_name(task)
    parameters, artifacts = _arguments(task.get("arguments") or {}, scope)
    result = call(session, Call(name, f"{what.name}.{display}", node.id, what.depth + 1, parameters, artifacts))
    if result.daemon is not None:
        daemons.append(result.daemon)
        result = Result("Running", parameters={**result.parameters, "ip": "127.0.0.1"})
    return result


def _each(
    session: Session,
    task: Mapping[str, Any],
    node: Node,
    what: Call,
    scope: Scope,
    items: list[Any],
    daemons: list[Daemon],
) -> Result:
    group = session.node(
        Call(str(task.get("template")), f"{what.name}.{task['name']}", node.id, what.depth, {}, {}), "TaskGroup"
    )
    session.start(group)
    results: list[Result | None] = [None] * len(items)
    fail_fast = threading.Event()
    gate = _Gate(session.templates[what.template].get("parallelism"))

    def work(index: int, item: Any) -> None:
        with gate:
            if fail_fast.is_set():
                results[index] = Result("Omitted", "an earlier item failed")
                return
            own = scope | {"item": text(item)}
            if isinstance(item, dict):
                own |= {f"item.{key}": text(value) for key, value in item.items()}
            display = f"{task['name']}({index}:{_label(item)})"
            results[index] = _once(session, task, group, what, own, display, daemons)
            if results[index].broken and not _forgiven(task, results[index]):  # type: ignore[union-attr,arg-type]
                fail_fast.set()

    threads = [threading.Thread(target=work, args=pair, daemon=True) for pair in enumerate(items)]
    for thread in threads:
        thread.start()
        if gate.one_at_a_time:
            thread.join()  # ascending order
    for thread in threads:
        thread.join()
    finished = [result for result in results if result is not None]
    phase = max(
        (r.phase if r.phase != "Running" else "Succeeded" for r in finished), key=WORST.index, default="Skipped"
    )
    phase = "Succeeded" if phase in ("Skipped", "Omitted") and any(r.phase == "Succeeded" for r in finished) else phase
    names = {name for result in finished for name in result.parameters}
    gathered = {n: json.dumps([r.parameters[n] for r in finished if n in r.parameters]) for n in sorted(names)}
    result = Result(phase, next((r.message for r in finished if r.broken), ""), parameters=gathered)
    session.finish(group, phase, result.message)
    return result


def run_hook(
    session: Session, hook: Mapping[str, Any], name: str, parent: str, depth: int, scope: Scope
) -> Result | None:
    """Run an exit hook if its expression holds."""
    if hook.get("expression") and not expressions.truth(hook["expression"], scope):
        return None
    parameters, artifacts = _arguments(hook.get("arguments") or {}, scope)
    return call(session, Call(hook["template"], name, parent, depth, parameters, artifacts))


def _items(task: Mapping[str, Any], scope: Scope) -> list[Any] | None:
    if task.get("withItems") is not None:
        return [substitute(item, scope) for item in task["withItems"]]
    if task.get("withParam"):
        value = substitute(task["withParam"], scope)
        try:
            items = json.loads(value)
        except json.JSONDecodeError:
            raise ExpressionError(f"withParam of {task['name']} is not a JSON list: {value[:80]!r}") from None
        if not isinstance(items, list):
            raise ExpressionError(f"withParam of {task['name']} is not a JSON list: {value[:80]!r}")
        return items
    if task.get("withSequence"):
        given = {key: substitute(str(value), scope) for key, value in task["withSequence"].items()}
        start = int(given.get("start", 0))
        last = start + int(given["count"]) - 1 if "count" in given else int(given["end"])
        if "count" in given and int(given["count"]) == 0:
            return []
        step = 1 if last >= start else -1
        form = given.get("format", "%d")
        return [form % number for number in range(start, last + step, step)]
    return None


def _label(item: Any) -> str:
    return ",".join(f"{k}:{text(v)}" for k, v in item.items()) if isinstance(item, dict) else text(item)


def _arguments(arguments: Mapping[str, Any], scope: Scope) -> tuple[dict[str, str], dict[str, Path | str]]:
    parameters = {}
    for parameter in arguments.get("parameters", []):
        source = parameter.get("valueFrom") or {}
        if "expression" in source:
            parameters[parameter["name"]] = text(expressions.evaluate(source["expression"], scope))
        elif parameter.get("value") is not None:
            parameters[parameter["name"]] = text(substitute(parameter["value"], scope))
    artifacts: dict[str, Path | str] = {}
    for artifact in arguments.get("artifacts", []):
        found = _artifact(artifact, scope)
        if found is not None:
            artifacts[artifact["name"]] = found
        elif not artifact.get("optional"):
            raise ExpressionError(f"artifact {artifact['name']} has no source here")
    return parameters, artifacts


def _artifact(artifact: Mapping[str, Any], scope: Scope) -> Path | str | None:
    if "raw" in artifact:
        return text(substitute(artifact["raw"]["data"], scope))
    if "fromExpression" in artifact:
        found = expressions.evaluate(artifact["fromExpression"], scope)
    else:
        tag = str(artifact.get("from", "")).strip().removeprefix("{{").removesuffix("}}").strip()
        found = scope.get(tag)
    if found is None:
        return None
    path = Path(found)
    return path / artifact["subPath"] if artifact.get("subPath") else path


def _outputs(template: Mapping[str, Any], scope: Scope) -> tuple[dict[str, str], dict[str, Path | str]]:
    declared = template.get("outputs", {})
    parameters = {}
    for parameter in declared.get("parameters", []):
        source = parameter.get("valueFrom") or {}
        try:
            if "expression" in source:
                parameters[parameter["name"]] = text(expressions.evaluate(source["expression"], scope))
            else:
                parameters[parameter["name"]] = text(substitute(source.get("parameter", parameter.get("value")), scope))
        except ExpressionError:
            if "default" not in source:
                raise
            parameters[parameter["name"]] = text(source["default"])
    found = {a["name"]: _artifact(a, scope) for a in declared.get("artifacts", [])}
    for artifact in declared.get("artifacts", []):
        if found[artifact["name"]] is None and not artifact.get("optional"):
            raise ExpressionError(f"output artifact {artifact['name']} has no source")
    return parameters, {name: place for name, place in found.items() if place is not None}


def _task_scope(prefix: str, name: str, result: Result) -> Scope:
    at = f"{prefix}.{name}"
    scope: Scope = {f"{at}.status": "Daemoned" if result.phase == "Running" else result.phase}
    if result.exit_code is not None:
        scope[f"{at}.exitCode"] = str(result.exit_code)
    for key, value in result.parameters.items():
        place = {"result": f"{at}.outputs.result", "ip": f"{at}.ip"}.get(key, f"{at}.outputs.parameters.{key}")
        scope[place] = value
    return scope | {f"{at}.outputs.artifacts.{k}": str(v) for k, v in result.artifacts.items()}


def _depend_scope(names: list[str], results: Mapping[str, Result]) -> Scope:
    scope: Scope = {}
    for name in names:
        phase = {"Running": "Daemoned", "Error": "Errored"}.get(results[name].phase, results[name].phase)
        flags = dict.fromkeys(("Succeeded", "Failed", "Errored", "Skipped", "Omitted", "Daemoned"), False)
        flags[phase] = True
        flags["AnySucceeded"], flags["AllFailed"] = phase == "Succeeded", phase == "Failed"
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
) -> str:
    """A task's phase; one that did not run takes over what it was waiting for."""
    phase = results[name].phase
    if phase in ("Omitted", "Skipped"):
        above = (_branch(other, tasks, logic, results) for other in logic[name][0])
        return max((p for p in above if p in ("Failed", "Error")), key=WORST.index, default="Succeeded")
    if results[name].broken and _forgiven(tasks[name], results[name]):
        return "Succeeded"
    return "Succeeded" if phase == "Running" else phase


def _forgiven(task: Mapping[str, Any], result: Result) -> bool:
    allowed = task.get("continueOn") or {}
    return bool(allowed.get("failed") if result.phase == "Failed" else allowed.get("error"))


def _handles_failure(condition: str) -> bool:
    return ".Failed" in condition or ".Errored" in condition


def _first_message(results: Mapping[str, Result]) -> str:
    return next((f"{name}: {r.message}" for name, r in results.items() if r.broken), "")


def _skip(
    session: Session, node: Node, what: Call, display: str, task: Mapping[str, Any], phase: str, message: str
) -> Result:
    skipped = session.node(
        Call(session.template_name(task), f"{what.name}.{display}", node.id, what.depth, {}, {}), "Skipped"
    )
    session.finish(skipped, phase, message)
    return Result(phase, message)


class _Gate:
    """At most so many at a time; None: any number."""

    def __init__(self, limit: Any) -> None:
        self._slots = threading.BoundedSemaphore(int(limit)) if limit else None
        self.one_at_a_time = bool(limit) and int(limit) == 1

    def __enter__(self) -> None:
        if self._slots:
            self._slots.acquire()

    def __exit__(self, *_: object) -> None:
        if self._slots:
            self._slots.release()


__all__ = ["Call", "call", "run_hook"]
