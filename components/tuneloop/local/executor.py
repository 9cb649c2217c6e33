"""Run an Argo Workflow on this machine, as `render` writes it and `submit` sends it.

Each pod is a process group. The workflows of a run of several (`execute_parts`) share a work
directory, which `tuneloop.local.journal` describes.

`tuneloop run`, `demo`, `resume` and `fork` call `execute_parts` in their own process
(`cli/execute.py: Executor.execute`); most tests call `execute_workflow`. The modules below it:
`graph` (tasks), `retries` (attempts), `pod` (one container), `processes` (its process), `journal`
(what others read), `execution` (the run as a whole: once it is being stopped, nothing is started).

A field of a Workflow that is read anywhere in `local/` has to be allowed in
``workflow/local_fields.yaml``, else `workflow/manifest.py: check_workflow` refuses it first.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.threads import repeat_in_background
from tuneloop.local.execution import Execution, OnLog, OnNode, name_run
from tuneloop.local.graph import run_template
from tuneloop.local.journal import (
    STOPPED,
    Node,
    Workflow,
    lock_workdir,
    outcome_code,
    read_state,
)
from tuneloop.local.processes import Launcher, base_environment
from tuneloop.local.results import Call, Result
from tuneloop.local.warm import Kind, is_server, is_stage
from tuneloop.workflow import manifest
from tuneloop.workflow.expression_values import format_value
from tuneloop.workflow.settings import LOCAL, NEXT


@dataclass
class Outcome:
    """How a run ended, or with `execute_parts` its last workflow.

    Attributes:
        phase: ``Succeeded``, ``Failed`` or ``Error``.
        exit_code: as `outcome_code` returns it.
    """

    phase: str
    message: str
    nodes: dict[str, Node]
    outputs: dict[str, str]
    exit_code: int


def execute_workflow(
    workflow: JsonMapping,
    *,
    workdir: Path,
    arguments: Mapping[str, str] | None = None,
    entrypoint: str | None = None,
    parallelism: int | None = None,
    warm: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    grace: float = 60.0,
    on_node: OnNode | None = None,
    on_log: OnLog | None = None,
) -> Outcome:
    """Run `workflow`.

    Args:
        entrypoint: another template to start at; its inputs are taken from `arguments`.
        parallelism: the number of pods at a time, daemons not counted; by default the spec's, else
            the number of cores, at least 4.
        warm: start tuneloop's own stages as forks of a process that has imported torch
            (`tuneloop.local.warm`).
        env: added to every pod's environment (the container's own wins).
        grace: seconds between SIGTERM and SIGKILL, when the template names no
            terminationGracePeriodSeconds.

    Raises UserError, before it starts, at an unsupported field or an unknown or missing argument.
    """
    # All checks come before the lock and the processes: bad input leaves nothing behind.
    spec = workflow.get("spec") or {}
    manifest.check_workflow(spec)
    parameters = _resolve_parameters(spec, arguments or {}, strict=entrypoint is None)
    start = entrypoint or spec.get("entrypoint")
    if not start:
        raise UserError("spec.entrypoint", None, "is required: the template to start at")
    environment = base_environment(env or {})
    with lock_workdir(workdir):
        execution = Execution(
            workflow,
            parameters,
            workdir,
            parallelism=parallelism,
            launcher=Launcher(environment, _list_warm_kinds(spec["templates"]) if warm else ()),
            env=environment,
            cwd=cwd or Path.cwd(),
            grace=grace,
            on_node=on_node,
            on_log=on_log,
        )
        # Inputs of another entrypoint are no parameters of the workflow.
        inputs = dict(parameters)
        for name, value in (arguments or {}).items():
            inputs[name] = format_value(value)
        entry = Call(
            template=start,
            name=execution.name,
            parent="",
            depth=0,
            parameters=inputs,
        )
        with execution.handle_signals(), repeat_in_background(execution.follow_pods, 0.2):
            return _run(execution, entry, spec.get("onExit"))


def execute_parts(
    workflow: JsonMapping,
    *,
    workdir: Path,
    arguments: Mapping[str, str] | None = None,
    **options: Any,
) -> Outcome:
    """Run `workflow` and the workflows that continue it (`tuneloop.cluster.continue_run`), and
    return the outcome of the last.

    Each has the name that it would have on a cluster; `tuneloop.local.journal.read_state` shows all
    of them as one run. A resumed run starts at the workflow that did not succeed. Raises UserError
    as `execute_workflow`.

    Args:
        workflow, workdir, arguments: as `execute_workflow` takes them.
        options: its other arguments, except for `entrypoint` and `env`, which are set here: the
            environment has `LOCAL`, by which steps that talk to a cluster know to leave it alone.
    """
    # A resumed run has the continuations of its earlier workflows in the journal.
    state = read_state(workdir)
    continuations = list(state.parts) if state else []
    run = name_run(workflow)
    while True:
        name = run
        entrypoint: str | None = None
        part_arguments = dict(arguments or {})
        if continuations:
            name = f"{run}-{len(continuations) + 1}"
            continuation = json.loads(continuations[-1])
            entrypoint = continuation["entrypoint"]
            part_arguments |= continuation["arguments"]
        part = dict(workflow)
        part["metadata"] = dict(workflow.get("metadata", {}))
        part["metadata"]["name"] = name
        outcome = execute_workflow(
            part,
            workdir=workdir,
            arguments=part_arguments,
            entrypoint=entrypoint,
            env={LOCAL: "1"},
            **options,
        )
        if outcome.phase != "Succeeded" or NEXT not in outcome.outputs:
            return outcome
        continuations.append(outcome.outputs[NEXT])


def _run(execution: Execution, entry: Call, exit_handler: str | None) -> Outcome:
    """Run a workflow to its end, exit handler included."""
    record = Workflow(
        execution.name,
        started=execution.began,
        pid=os.getpid(),
        parameters=execution.parameters,
    )
    execution.record_workflow(record)
    try:
        result = _run_in_thread(execution, entry)
        execution.status = "Succeeded" if result.phase in ("Skipped", "Omitted") else result.phase
        record.phase = execution.status
        record.message = result.message
        # Who stops a run here does not wait for its exit handler.
        if exit_handler and execution.stopped_by is None:
            handler = Call(
                template=exit_handler,
                name=f"{execution.name}.onExit",
                parent="",
                depth=0,
                parameters=execution.parameters,
            )
            handler_result = _run_in_thread(execution, handler)
            # As in Argo, a handler that fails makes a run fail that had succeeded.
            if handler_result.broken and not result.broken:
                record.phase = handler_result.phase
                record.message = handler_result.message
    finally:
        execution.launcher.close()
    if execution.stopped_by is not None:
        record.phase = "Failed"
        record.message = f"{STOPPED} {signal.Signals(execution.stopped_by).name}"
    record.finished = time.time()
    record.outputs = execution.outputs
    execution.record_workflow(record)
    return Outcome(
        phase=record.phase,
        message=record.message,
        nodes=execution.nodes,
        outputs=execution.outputs,
        exit_code=outcome_code(record.phase, execution.nodes, execution.stopped_by),
    )


def _run_entry(execution: Execution, call: Call) -> Result:
    """Run the template that a workflow starts at."""
    result = run_template(execution, call)
    if result.daemon:
        # Nothing is left that it could serve.
        result.daemon.close()
        result.phase = "Succeeded"
    return result


def _run_in_thread(execution: Execution, call: Call) -> Result:
    """Run a template that a workflow starts at in a thread, so that signals reach this one."""
    results: list[Result] = []
    thread = threading.Thread(
        target=lambda: results.append(_run_entry(execution, call)),
        daemon=True,
    )
    thread.start()
    while thread.is_alive():
        # Python runs signal handlers in the main thread, between two waits.
        thread.join(0.05)
        if execution.stopping.is_set():
            execution.end_pods()
    return results[0]


def _list_warm_kinds(templates: Iterable[JsonMapping]) -> list[Kind]:
    """Return the kinds of warm processes from which commands of the templates can be forked."""
    commands: list[list[str]] = []
    for template in templates:
        container = template.get("container") or {}
        commands.append(list(container.get("command", [])) + list(container.get("args", [])))
    kinds: list[Kind] = []
    if any(map(is_stage, commands)):
        kinds.append("stages")
    if any(map(is_server, commands)):
        kinds.append("server")
    return kinds


def _resolve_parameters(
    spec: JsonMapping,
    arguments: Mapping[str, str],
    strict: bool,
) -> dict[str, str]:
    """Return the values of a workflow's parameters: arguments over defaults.

    Raises UserError at a parameter without a value and, if `strict`, at an unknown argument.
    """
    declared = spec.get("arguments", {}).get("parameters", [])
    names = [parameter["name"] for parameter in declared]
    for name, value in arguments.items():
        if strict and name not in names:
            reason = f"is not a parameter; known: {', '.join(names)}"
            raise UserError(f"parameter {name}", value, reason)
    values: dict[str, str] = {}
    for parameter in declared:
        name = parameter["name"]
        value = arguments.get(name, parameter.get("value", parameter.get("default")))
        if value is None:
            raise UserError(f"parameter {name}", None, "is required")
        values[name] = format_value(value)
    return values
