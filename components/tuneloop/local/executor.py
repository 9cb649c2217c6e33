"""Run an Argo Workflow on this machine, as `render` writes it and `submit` sends it.

Each pod is a process group. The workflows of a run of several (`execute_parts`) share a work
directory, which `tuneloop.local.journal` describes.
"""

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.threads import repeat_in_background
from tuneloop.local.execution import Execution, OnLog, OnNode
from tuneloop.local.graph import run_template
from tuneloop.local.journal import Node, Workflow, lock_workdir, outcome_code, read_state
from tuneloop.local.processes import Launcher, base_environment
from tuneloop.local.results import Call, Result
from tuneloop.local.warm import Kind, is_server, is_stage
from tuneloop.workflow import manifest
from tuneloop.workflow.expression_values import format_value
from tuneloop.workflow.settings import LOCAL, NEXT


@dataclass
class Outcome:
    """How a run ended.

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
        parallelism: pods at a time, daemons apart; default: the spec's, else the number of cores,
            at least 4.
        warm: start tuneloop's own stages as forks of a process that has imported torch
            (`tuneloop.local.warm`).
        env: added to every pod's environment (the container's own wins).
        grace: seconds between SIGTERM and SIGKILL, when the template names no
            terminationGracePeriodSeconds.

    Raises UserError, before it starts, at an unsupported field or an unknown or missing argument.
    """
    spec = workflow.get("spec") or {}
    manifest.check_workflow(spec)
    parameters = _parameters(spec, arguments or {}, strict=entrypoint is None)
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
            launcher=Launcher(environment, _kinds(spec["templates"]) if warm else ()),
            env=environment,
            cwd=cwd or Path.cwd(),
            grace=grace,
            on_node=on_node,
            on_log=on_log,
        )
        given = {name: format_value(value) for name, value in (arguments or {}).items()}
        entry = Call(start, execution.name, "", 0, parameters | given)
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
    """
    state = read_state(workdir)
    done = list(state.parts) if state else []
    metadata = workflow.get("metadata", {})
    run = str(metadata.get("name") or metadata.get("generateName", "run-").rstrip("-"))
    while True:
        start = json.loads(done[-1]) if done else {"entrypoint": None, "arguments": {}}
        name = f"{run}-{len(done) + 1}" if done else run
        outcome = execute_workflow(
            {**workflow, "metadata": {**metadata, "name": name}},
            workdir=workdir,
            arguments={**(arguments or {}), **start["arguments"]},
            entrypoint=start["entrypoint"],
            env={LOCAL: "1"},
            **options,
        )
        if outcome.phase != "Succeeded" or NEXT not in outcome.outputs:
            return outcome
        done.append(outcome.outputs[NEXT])


def _run(execution: Execution, entry: Call, exit_handler: str | None) -> Outcome:
    """Run a workflow to its end, exit handler included."""
    record = Workflow(
        execution.name, started=execution.began, pid=os.getpid(), parameters=execution.parameters
    )
    execution.record_workflow(record)
    try:
        result = _run_apart(execution, lambda: _run_entry(execution, entry))
        execution.status = "Succeeded" if result.phase in ("Skipped", "Omitted") else result.phase
        record.phase, record.message = execution.status, result.message
        if exit_handler and execution.stopped_by is None:
            handler = Call(exit_handler, f"{execution.name}.onExit", "", 0, execution.parameters)
            after = _run_apart(execution, lambda: _run_entry(execution, handler))
            if after.broken and not result.broken:
                record.phase = after.phase
                record.message = after.message
    finally:
        execution.launcher.close()
    if execution.stopped_by is not None:
        record.phase = "Failed"
        record.message = f"stopped by {signal.Signals(execution.stopped_by).name}"
    record.finished = time.time()
    record.outputs = execution.outputs
    execution.record_workflow(record)
    code = outcome_code(record.phase, execution.nodes, execution.stopped_by)
    return Outcome(record.phase, record.message, execution.nodes, execution.outputs, code)


def _run_entry(execution: Execution, call: Call) -> Result:
    result = run_template(execution, call)
    if result.daemon:  # nothing is left that it could serve
        result.daemon.close()
        result.phase = "Succeeded"
    return result


def _run_apart(execution: Execution, work: Callable[[], Result]) -> Result:
    """Run `work` on another thread, so that signals reach this one."""
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.05)
        if execution.stopping.is_set():
            execution.end_pods()
    return results[0]


def _kinds(templates: Iterable[JsonMapping]) -> list[Kind]:
    """Return the kinds of warm processes from which commands of the templates can be forked."""
    containers = [template.get("container") or {} for template in templates]
    commands = [
        [*container.get("command", []), *container.get("args", [])] for container in containers
    ]
    kinds: dict[Kind, bool] = {
        "stages": any(map(is_stage, commands)),
        "server": any(map(is_server, commands)),
    }
    return [kind for kind, used in kinds.items() if used]


def _parameters(spec: JsonMapping, given: Mapping[str, str], strict: bool) -> dict[str, str]:
    declared = spec.get("arguments", {}).get("parameters", [])
    names = [parameter["name"] for parameter in declared]
    if strict and (unknown := [name for name in given if name not in names]):
        raise UserError(
            f"parameter {unknown[0]}",
            given[unknown[0]],
            f"is not a parameter; known: {', '.join(names)}",
        )
    values = {}
    for parameter in declared:
        name = parameter["name"]
        value = given.get(name, parameter.get("value", parameter.get("default")))
        if value is None:
            raise UserError(f"parameter {name}", None, "is required")
        values[name] = format_value(value)
    return values
