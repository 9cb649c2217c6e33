"""Graphs of a local run: templates, DAGs, recursion, and the tags of inputs and outputs.

The semantics are those of the Argo controller 3.7
(https://argo-workflows.readthedocs.io/en/release-3.7/), but for `failFast` (a comment in
``workflow/local_fields.yaml``). Each task has a thread of its own; the work
is bounded by the number of pods that may run at a time.

`tests/unit/local/parity` has workflows with the controller's own answers: a change of semantics is
compared with these (`tests/unit/local/test_parity.py`).

Which fields a template may have is in ``workflow/local_fields.yaml``; expressions are evaluated in
`workflow/expressions.py`, and ``depends`` is parsed by `workflow/manifest.py: parse_depends`.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tuneloop.core.json_types import JsonMapping
from tuneloop.local.execution import Execution
from tuneloop.local.journal import Node
from tuneloop.local.pod import run_pod
from tuneloop.local.results import Call, Daemon, Result, Scope, list_outputs
from tuneloop.local.retries import Attempts
from tuneloop.workflow import expressions
from tuneloop.workflow.expression_values import ExpressionError, format_value
from tuneloop.workflow.expressions import substitute_tags
from tuneloop.workflow.manifest import find_ancestors, parse_depends

MAX_DEPTH = 100
"""The controller's maxAllowedStackDepth: a template at this depth is an error."""
TOO_DEEP = "Maximum recursion depth exceeded: at most 99 templates within one another, as in Argo"
UNMET = "omitted: depends condition not met"


def run_template(execution: Execution, call: Call) -> Result:
    """Run a template, with its retries, and record its node.

    Returns:
        The result; of a daemon, once it is ready. An error in the workflow or of this machine
        becomes the result, and is not raised.
    """
    template = execution.templates.get(call.template)
    is_retried = template is not None and "retryStrategy" in template
    node_type = "Retry" if is_retried else execution.get_node_type(call.template)
    node = execution.create_node(call, node_type)
    try:
        if template is None:
            raise ExpressionError(f"template {call.template} does not exist")
        if call.depth + 1 >= MAX_DEPTH:
            raise ExpressionError(TOO_DEEP)
        scope = execution.build_scope() | {"node.name": node.name}
        node.inputs = resolve_inputs(template, call.parameters, scope)
        scope |= build_input_scope(template, node.inputs)

        def attempt(node: Node, extra: Scope) -> Result:
            result = _attempt(execution, template, node, call, scope | extra)
            return _omit_ended(execution, template, node, result)

        if is_retried:
            strategy = substitute_tags(template["retryStrategy"], scope)
            result = Attempts(execution, strategy, node, call, attempt).run()
        else:
            result = attempt(node, {})
    except Exception as error:
        # A fault of the machine (no disk, no such file) is this node's error, not the run's end.
        result = Result("Error", _describe_error(error))
    result = _omit_ended(execution, template or {}, node, result)
    for parameter in list_outputs(template or {}):
        name = parameter["name"]
        if "globalName" in parameter and name in result.parameters:
            execution.publish_output(parameter["globalName"], result.parameters[name])
    execution.settle(node, result)
    return result


def _attempt(
    execution: Execution,
    template: JsonMapping,
    node: Node,
    call: Call,
    scope: Scope,
) -> Result:
    """Run a template once, as a graph or as a pod."""
    if "dag" in template:
        return Graph(execution, template, node, call.depth, scope).run()
    # The tags of a retry strategy are substituted once for all attempts.
    pod_template = {key: value for key, value in template.items() if key != "retryStrategy"}
    pod_scope = scope | {"pod.name": node.id}
    return run_pod(execution, substitute_tags(pod_template, pod_scope), node)


def _describe_error(error: Exception) -> str:
    """Return the message of a node that has failed by an exception of this process."""
    if isinstance(error, ExpressionError):
        return str(error)
    return f"{type(error).__name__}: {error}"


def _omit_ended(execution: Execution, template: JsonMapping, node: Node, result: Result) -> Result:
    """Return `result`, or ``Omitted`` if a server's end caused it.

    So only the server counts as failed, and not the tasks that needed it.
    """
    reason = execution.find_end_reason(node.name)
    if reason is None or (result.phase == "Succeeded" and "dag" not in template):
        return result
    if result.daemon:
        result.daemon.close()
    return Result("Omitted", reason)


class Graph:
    """One execution of a DAG template: the state that its tasks share.

    Attributes:
        depth: the number of templates entered above it.
        scope: the tags of the template's inputs, and those of the whole run.
        tasks: the tasks by name.
        waits: for each task, the names of those that it depends on.
        conditions: for each task, the expression of its ``depends``; empty for one without.
        daemons: the daemons that are ready; they end with the graph.
    """

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
        self.waits: dict[str, list[str]] = {}
        self.conditions: dict[str, str] = {}
        for name, task in self.tasks.items():
            dependencies, condition = parse_depends(task, self.tasks)
            self.waits[name] = dependencies
            self.conditions[name] = condition
        self.daemons: list[Daemon] = []

    def run(self) -> Result:
        """Run all tasks, then end the daemons among them.

        Returns:
            The outputs, if all leaves have succeeded; else the failure of the first task.

        Raises:
            ExpressionError, KeyError: an output has no value.
        """
        self.execution.start(self.node)
        try:
            results = self._run_tasks()
            awaited: set[str] = set()
            awaited.update(*self.waits.values())
            for name in self.tasks:
                # As in Argo, the leaves decide how the graph has ended.
                if name in awaited:
                    continue
                branch = get_branch_result(name, self.waits, results)
                if branch.broken:
                    return Result(branch.phase, self._explain_failure(results))
            scope = self._build_scope_after(results)
            outputs = {
                parameter["name"]: resolve_output(parameter, scope)
                for parameter in list_outputs(self.template)
            }
            return Result("Succeeded", "", outputs)
        finally:
            # Each may take its whole grace period, so all are ended at the same time.
            threads = [_start_thread(daemon.close) for daemon in self.daemons]
            for thread in threads:
                thread.join()

    def _explain_failure(self, results: Mapping[str, Result]) -> str:
        """Return the message of the first task that has failed."""
        for name, result in results.items():
            if result.broken:
                return f"{name}: {result.message}"
        return "stopped"

    def _build_scope_after(self, results: Mapping[str, Result]) -> Scope:
        """Return the tags that tasks after those with these results can use."""
        scope = dict(self.scope)
        for name, result in results.items():
            scope |= build_result_scope(name, result)
        return scope

    def _run_tasks(self) -> dict[str, Result]:
        """Start each task as soon as what it depends on has settled.

        Returns:
            The results of all tasks, in the order in which they settled.
        """
        results: dict[str, Result] = {}
        started: set[str] = set()
        changed = threading.Condition()
        ancestors = {name: find_ancestors(name, self.waits) for name in self.tasks}

        def work(name: str) -> None:
            with changed:
                earlier = {ancestor: results[ancestor] for ancestor in ancestors[name]}
            result = self.run_task(self.tasks[name], self._build_scope_after(earlier))
            with changed:
                results[name] = result
                changed.notify()
            if result.daemon:
                _start_thread(follow, name, result.daemon)

        def follow(name: str, daemon: Daemon) -> None:
            # A server that fails while tasks still need it ends them.
            daemon.over.wait()
            with changed:
                dependents = [
                    task for task in self.tasks if task not in results and name in ancestors[task]
                ]
                if dependents and daemon.result.broken and not self.execution.stopping.is_set():
                    results[name] = daemon.result
                    paths = [f"{self.node.name}.{task}" for task in dependents]
                    self.execution.end_nodes(paths, f"{name}: {daemon.result.message}")
                    changed.notify()

        with changed:
            while len(results) < len(self.tasks):
                ready = [
                    name
                    for name in self.tasks
                    if name not in started and results.keys() >= set(self.waits[name])
                ]
                started.update(ready)
                for name in ready:
                    condition = self.conditions[name]
                    scope = build_dependency_scope(self.waits[name], results)
                    if condition and not expressions.evaluate_boolean(condition, scope):
                        call = self._build_call(self.tasks[name])
                        results[name] = self.skip(call, "Omitted", UNMET)
                    else:
                        _start_thread(work, name)
                # A task that was omitted may have made others ready, so these are looked at first.
                if not ready:
                    changed.wait()
        return results

    # One task

    def run_task(self, task: JsonMapping, scope: Scope) -> Result:
        """Run a task, if its ``when`` is true, with its arguments from `scope`."""
        call = self._build_call(task)
        scope = scope | self.execution.published
        try:
            when = substitute_tags(task.get("when", ""), scope)
            if not expressions.evaluate_when(when):
                return self.skip(call, "Skipped", f"when '{when}' evaluated false")
            parameters: dict[str, str] = {}
            arguments = task.get("arguments") or {}
            for parameter in arguments.get("parameters", []):
                value = parameter.get("value")
                if value is not None:
                    value = substitute_tags(value, scope)
                    parameters[parameter["name"]] = format_value(value)
        except Exception as error:
            # Whatever is wrong with one task, the graph goes on.
            return self.skip(call, "Error", _describe_error(error))
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

    def _build_call(self, task: JsonMapping) -> Call:
        return Call(
            template=task["template"],
            name=f"{self.node.name}.{task['name']}",
            parent=self.node.id,
            depth=self.depth + 1,
        )


def _start_thread(work: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def build_dependency_scope(names: Sequence[str], results: Mapping[str, Result]) -> Scope:
    """Return the names that a ``depends`` condition can use for the tasks `names`.

    They are those of `workflow/manifest.py: RESULTS`, which refuses any other before a run.
    """
    scope: Scope = {}
    for name in names:
        result = results[name]
        # Names of an expression cannot have a hyphen; the controller replaces it in the same way.
        prefix = name.replace("-", "_")
        for phase in ("Succeeded", "Failed", "Skipped", "Omitted"):
            scope[f"{prefix}.{phase}"] = result.phase == phase
        scope[f"{prefix}.Errored"] = result.phase == "Error"
        scope[f"{prefix}.Daemoned"] = result.daemon is not None
        # These are about loops over items, which are not supported here.
        scope[f"{prefix}.AnySucceeded"] = False
        scope[f"{prefix}.AllFailed"] = False
    return scope


def get_branch_result(
    name: str,
    waits: Mapping[str, Sequence[str]],
    results: Mapping[str, Result],
) -> Result:
    """Return the result of a leaf's branch.

    It is that of the leaf or, if the leaf did not complete, that of the tasks it depends on.
    """
    result = results[name]
    if result.phase in ("Succeeded", "Failed", "Error"):
        return result
    for dependency in waits[name]:
        branch = get_branch_result(dependency, waits, results)
        if branch.broken:
            return branch
    return Result("Succeeded")


def resolve_inputs(
    template: JsonMapping,
    parameters: Mapping[str, str],
    scope: Scope,
) -> dict[str, str]:
    """Return a template's inputs: arguments over defaults.

    Raises ExpressionError at one without a value.
    """
    values: dict[str, str] = {}
    for parameter in template.get("inputs", {}).get("parameters", []):
        name = parameter["name"]
        if name in parameters:
            # The tags of an argument were substituted where the call was made.
            values[name] = parameters[name]
            continue
        value = parameter.get("value", parameter.get("default"))
        if value is None:
            raise ExpressionError(
                f"inputs.parameters.{name} of template {template['name']} was not supplied"
            )
        values[name] = format_value(substitute_tags(value, scope))
    return values


def build_input_scope(template: JsonMapping, inputs: Mapping[str, str]) -> Scope:
    """Return the tags of a template's inputs, and of the paths of its outputs."""
    pairs = [{"name": name, "value": value} for name, value in inputs.items()]
    scope: Scope = {"inputs.parameters": format_value(pairs)}
    for name, value in inputs.items():
        scope[f"inputs.parameters.{name}"] = value
    for parameter in list_outputs(template):
        source = parameter.get("valueFrom", {})
        if "path" in source:
            scope[f"outputs.parameters.{parameter['name']}.path"] = source["path"]
    return scope


def resolve_output(parameter: JsonMapping, scope: Scope) -> str:
    """Return an output of a DAG whose tasks have settled.

    Raises ExpressionError or KeyError at one that has no value and no default.
    """
    source = parameter.get("valueFrom") or {}
    try:
        if "expression" not in source:
            text = source["parameter"] if "parameter" in source else parameter["value"]
            return format_value(substitute_tags(text, scope))
        # Inside an expression the controller knows inputs, tasks and global outputs by name, and no
        # other workflow.… tag.
        names = {
            name: value
            for name, value in scope.items()
            if not name.startswith("workflow.") or name.startswith("workflow.outputs.")
        }
        expression = substitute_tags(source["expression"], scope)
        value = expressions.evaluate_expression(expression, names)
        if value is None:
            message = f"output {parameter['name']}: {source['expression']!r} has no value (nil)"
            raise ExpressionError(message)
        return format_value(value)
    except (ExpressionError, KeyError):
        if "default" in source:
            return format_value(source["default"])
        raise


def build_result_scope(name: str, result: Result) -> Scope:
    """Return the tags of a task that has settled (or of a daemon that is ready)."""
    prefix = f"tasks.{name}"
    scope: Scope = {f"{prefix}.status": result.phase}
    if result.exit_code is not None:
        scope[f"{prefix}.exitCode"] = str(result.exit_code)
    if result.daemon is not None:
        scope[f"{prefix}.ip"] = result.address
    for key, value in result.parameters.items():
        scope[f"{prefix}.outputs.parameters.{key}"] = value
    return scope
