"""Run an Argo Workflow on this machine: the very one that `render` writes and `submit` sends.

    outcome = execute(workflow, arguments={"iterations": "3"}, workdir=Path("runs/a/local"), on_node=show)

A pod is a process group. What a run leaves behind, and how to read it live: `tuneloop.argo.state`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneloop.argo import graph, spec
from tuneloop.argo.box import Box
from tuneloop.argo.expressions import ExpressionError, text
from tuneloop.argo.graph import Call
from tuneloop.argo.pod import end
from tuneloop.argo.processes import Launcher, Process, base_environment
from tuneloop.argo.state import DONE, Journal, Node, Workflow, hold, outcome_code
from tuneloop.argo.warm import warmable
from tuneloop.errors import UserError

OnNode = Callable[[Node], None]
"""Called with a copy of a node whenever its phase, message, progress or `daemoned` changes, one call at a time, in the
order of ``nodes.jsonl``."""
OnLog = Callable[[Node, str], None]
"""Called with each line (without its end) a pod writes, one call at a time."""
Ask = Callable[[Node, Mapping[str, Mapping[str, Any]]], Mapping[str, str]]
"""Answers a `suspend` node: (node, name → {"description", "enum", "default"} of what it must supply) → values."""


@dataclass
class Outcome:
    """How a run ended.

    Attributes:
        phase: ``Succeeded``, ``Failed`` or ``Error``.
        message: why, in one line.
        nodes: id → node.
        outputs: the workflow's global output parameters (``globalName``).
        exit_code: 0; 130/75 stopped by SIGINT/SIGTERM; 2 or 75 if a pod failed so; else 1.
    """

    phase: str
    message: str
    nodes: dict[str, Node]
    outputs: dict[str, str]
    exit_code: int


def execute(
    workflow: Mapping[str, Any],
    *,
    workdir: Path,
    arguments: Mapping[str, str] | None = None,
    templates: Sequence[Mapping[str, Any]] = (),
    entrypoint: str | None = None,
    parallelism: int | None = None,
    warm: bool = True,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    grace: float = 60.0,
    on_node: OnNode | None = None,
    on_log: OnLog | None = None,
    ask: Ask | None = None,
) -> Outcome:
    """Run `workflow` to its end.

    Args:
        workflow: a Workflow, WorkflowTemplate or CronWorkflow, as loaded from YAML.
        workdir: state and logs of this run; see `tuneloop.argo.state`.
        arguments: values of workflow parameters, over those in the spec.
        templates: WorkflowTemplates that `templateRef` and `workflowTemplateRef` may name.
        entrypoint: another template to start at; its inputs are taken from `arguments`.
        parallelism: pods at a time, daemons apart; default: the spec's, else the number of cores, at least 4.
        warm: start tuneloop's own stages as forks of a process that has imported torch (`tuneloop.argo.warm`).
        env: added to every pod's environment (the container's own wins).
        cwd: of every pod; default: the current directory.
        grace: seconds between SIGTERM and SIGKILL, when the template names no terminationGracePeriodSeconds.
        ask: answers `suspend`; default: a prompt on the terminal, UserError without one.

    Raises:
        UserError: a field the executor has no meaning for, an unknown argument, a missing one: before anything runs.
    """
    document, known = _resolve(workflow, templates)
    spec.check(document)
    parameters = _parameters(document, arguments or {}, strict=entrypoint is None)
    start = entrypoint or document.get("entrypoint")
    if not start:
        raise UserError("spec.entrypoint", None, "is required: the template to start at")
    with hold(workdir):
        session = Session(
            name=str(
                workflow.get("metadata", {}).get("name") or workflow["metadata"].get("generateName", "run-").rstrip("-")
            ),
            templates={t["name"]: spec.merged(t, document.get("templateDefaults", {})) for t in known},
            parameters=parameters,
            workdir=workdir,
            parallelism=parallelism or int(document.get("parallelism") or max(4, os.cpu_count() or 1)),
            launcher=Launcher(base_environment(env or {}), warm and any(map(_is_stage, known))),
            env=base_environment(env or {}),
            cwd=cwd or Path.cwd(),
            grace=grace,
            on_node=on_node,
            on_log=on_log,
            ask=ask or _prompt,
        )
        with session.signals(), session.ticking():
            return session.run(start, document, arguments or {})


class Session:
    """One execution: what its nodes share."""

    def __init__(
        self,
        *,
        name: str,
        templates: Mapping[str, Mapping[str, Any]],
        parameters: Mapping[str, str],
        workdir: Path,
        parallelism: int,
        launcher: Launcher,
        env: Mapping[str, str],
        cwd: Path,
        grace: float,
        on_node: OnNode | None,
        on_log: OnLog | None,
        ask: Ask,
    ) -> None:
        self.name, self.templates, self.workdir, self.launcher = name, templates, workdir, launcher
        self.cwd, self.grace, self.ask = cwd, grace, ask
        self.parameters = dict(parameters)
        self.scope = {
            "workflow.name": name,
            "workflow.namespace": "local",
            "workflow.uid": hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:32],
            **{f"workflow.parameters.{key}": value for key, value in parameters.items()},
        }
        self.stopping = threading.Event()
        self.nodes: dict[str, Node] = {}
        self.outputs: dict[str, str] = {}
        self._env, self._on_node, self._on_log = env, on_node, on_log
        self._slots = threading.BoundedSemaphore(parallelism)
        self._lock = threading.RLock()
        self._running: dict[str, tuple[Node, Process, float]] = {}
        self._read: dict[str, int] = {}
        self._journal = Journal(workdir)
        self._signal: int | None = None

    def run(self, entrypoint: str, document: Mapping[str, Any], arguments: Mapping[str, str]) -> Outcome:
        """Run to the end, exit handlers included."""
        record = Workflow(self.name, started=time.time(), pid=os.getpid(), parameters=self.parameters)
        self._journal.write(record)
        seconds = document.get("activeDeadlineSeconds")
        late = threading.Timer(float(seconds), self.stopping.set) if seconds else None
        if late:
            late.daemon = True
            late.start()
        try:
            result = self._wait(lambda: graph.call(self, Call(entrypoint, self.name, "", 0, dict(arguments), {})))
            if late and late.finished.is_set() and self.stopping.is_set() and self._signal is None:
                result.phase, result.message = "Failed", f"exceeded its deadline of {seconds} s"
            result = self._on_exit(document, result)
        finally:
            self.launcher.close()
        record.phase = "Succeeded" if result.phase in ("Running", "Skipped", "Omitted") else result.phase
        record.message, record.finished, record.outputs = result.message, time.time(), self.outputs
        if self._signal is not None:
            record.phase, record.message = "Failed", f"stopped by {signal.Signals(self._signal).name}"
        self._journal.write(record)
        self._journal.close()
        code = outcome_code(record.phase, self.nodes, self._signal)
        return Outcome(record.phase, record.message, self.nodes, self.outputs, code)

    def _wait(self, work: Callable[[], graph.Result]) -> graph.Result:
        """Run `work` on another thread, so that signals reach this one."""
        box: list[graph.Result] = []
        thread = threading.Thread(target=lambda: box.append(work()), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05 if not self.stopping.is_set() else 0.01)
            if self.stopping.is_set():
                self._end_pods()
        return box[0]

    def _end_pods(self) -> None:
        with self._lock:
            running, self._running = list(self._running.values()), {}
        for _, process, grace in running:
            threading.Thread(target=end, args=(process, grace), daemon=True).start()

    def _on_exit(self, document: Mapping[str, Any], result: graph.Result) -> graph.Result:
        hook = (document.get("hooks") or {}).get("exit")
        hook = hook or ({"template": document["onExit"]} if document.get("onExit") else None)
        if hook is None or self._signal is not None:
            return result
        self.stopping.clear()
        failures = [
            {"displayName": n.display_name, "message": n.message, "templateName": n.template, "phase": n.phase}
            for n in self.nodes.values()
            if n.phase in ("Failed", "Error") and n.type == "Pod"
        ]
        phase = "Succeeded" if result.phase == "Running" else result.phase
        self.scope |= {"workflow.status": phase, "workflow.failures": text(failures)}
        try:
            after = self._wait(lambda: graph.run_hook(self, hook, f"{self.name}.onExit", "", 0, self.scope) or result)
        except ExpressionError as error:
            after = graph.Result("Error", str(error))
        return after if after.broken and not result.broken else result

    # What graph and pod ask of a session

    def node(self, what: Call, kind: str) -> Node:
        """A new node; its id is the same in every execution of the same graph."""
        display = what.name.rpartition(".")[2] if "(" not in what.name else what.name[_last_dot(what.name) + 1 :]
        slug = re.sub(r"[^a-z0-9]+", "-", display.lower()).strip("-")[:40]
        identity = f"{slug}-{hashlib.sha256(what.name.encode()).hexdigest()[:10]}"
        node = Node(identity, what.name, display, what.template, kind, parent=what.parent)
        self.tell(node)
        return node

    def start(self, node: Node) -> None:
        node.phase, node.started = "Running", time.time()
        self.tell(node)

    def finish(self, node: Node, phase: str, message: str = "") -> None:
        if node.phase in DONE:
            return
        node.phase, node.message, node.finished = phase, message, time.time()
        node.started = node.started or node.finished
        self._tail(node)
        self.tell(node)

    def tell(self, node: Node) -> None:
        """Write the node down as it is, and say so."""
        with self._lock:
            self.nodes[node.id] = node
            self._journal.write(node)
            if self._on_node:
                self._on_node(dataclasses.replace(node))

    def publish(self, name: str, value: str) -> None:
        """Set a global output parameter."""
        self.outputs[name] = value
        self.scope[f"workflow.outputs.parameters.{name}"] = value

    def template_name(self, task: Mapping[str, Any]) -> str:
        """The template a task names, by itself or by reference."""
        reference = task.get("templateRef")
        return f"{reference['name']}/{reference['template']}" if reference else str(task["template"])

    @contextlib.contextmanager
    def slot(self, daemon: bool) -> Iterator[None]:
        """A place among the pods that may run at a time; daemons take none."""
        if daemon:
            yield
            return
        with self._slots:
            yield

    @contextlib.contextmanager
    def watched(self, node: Node, process: Process, grace: float) -> Iterator[None]:
        """Have progress and log of a running pod followed, and the pod ended when the run is stopped."""
        with self._lock:
            self._running[node.id] = (node, process, grace)
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(node.id, None)

    def environment(self, container: Mapping[str, Any], node: Node, box: Box) -> dict[str, str]:
        """A pod's environment: the machine's, then the container's."""
        progress = self.workdir / "nodes" / node.id / "progress"
        env = {**self._env, "ARGO_PROGRESS_FILE": str(progress)}
        fields = {"metadata.name": node.id, "metadata.namespace": "local", "spec.nodeName": socket.gethostname()}
        for item in container.get("env", []):
            if "value" in item:
                env[item["name"]] = box.translate(str(item["value"]))
            elif path := (item.get("valueFrom") or {}).get("fieldRef", {}).get("fieldPath"):
                env[item["name"]] = fields.get(path, "")
        return env

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """SIGTERM and SIGINT stop the run; a second SIGINT is Python's own."""

        def stop(number: int, frame: object) -> None:
            self._signal = number
            self.stopping.set()
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)

        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def ticking(self) -> Iterator[None]:
        """Follow progress files and logs of running pods."""
        over = threading.Event()

        def tick() -> None:
            while not over.wait(0.2):
                with self._lock:
                    running = [node for node, _, _ in self._running.values()]
                for node in running:
                    self._tail(node)
                    self._progress(node)

        thread = threading.Thread(target=tick, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _progress(self, node: Node) -> None:
        with contextlib.suppress(OSError):
            said = (self.workdir / "nodes" / node.id / "progress").read_text().strip()
            if said and said != node.progress:
                node.progress = said
                self.tell(node)

    def _tail(self, node: Node) -> None:
        if not self._on_log or not node.log:
            return
        with self._lock, contextlib.suppress(OSError), (self.workdir / node.log).open("rb") as file:
            file.seek(self._read.get(node.id, 0))
            data = file.read()
            whole = data if node.phase in DONE else data[: data.rfind(b"\n") + 1]
            self._read[node.id] = self._read.get(node.id, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines():
                self._on_log(node, line)


def _resolve(
    workflow: Mapping[str, Any], others: Sequence[Mapping[str, Any]]
) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """The spec that runs, and all templates that it can name."""
    document = dict(workflow.get("spec") or {})
    if "workflowSpec" in document:  # a CronWorkflow
        document = dict(document["workflowSpec"])
    by_name = {other["metadata"]["name"]: other["spec"] for other in others}
    if reference := document.pop("workflowTemplateRef", None):
        if reference["name"] not in by_name:
            raise UserError("spec.workflowTemplateRef", reference["name"], "is not among the given WorkflowTemplates")
        document = spec.merged(document, by_name[reference["name"]])
    known = list(document.get("templates", []))
    for name, other in by_name.items():
        known += [{**template, "name": f"{name}/{template['name']}"} for template in other.get("templates", [])]
    return document, known


def _is_stage(template: Mapping[str, Any]) -> bool:
    container = template.get("container") or {}
    return warmable([*container.get("command", []), *container.get("args", [])])


def _parameters(document: Mapping[str, Any], given: Mapping[str, str], strict: bool) -> dict[str, str]:
    declared = document.get("arguments", {}).get("parameters", [])
    names = [parameter["name"] for parameter in declared]
    if strict and (unknown := [name for name in given if name not in names]):
        raise UserError(f"parameter {unknown[0]}", given[unknown[0]], f"is no parameter; known: {', '.join(names)}")
    values = {}
    for parameter in declared:
        name = parameter["name"]
        value = given.get(name, parameter.get("value", parameter.get("default")))
        if value is None:
            raise UserError(f"parameter {name}", None, "is required")
        values[name] = text(value)
        if parameter.get("enum") and values[name] not in map(str, parameter["enum"]):
            raise UserError(f"parameter {name}", values[name], f"use one of {', '.join(map(str, parameter['enum']))}")
    return values


def _prompt(node: Node, wanted: Mapping[str, Mapping[str, Any]]) -> Mapping[str, str]:
    if not sys.stdin.isatty():
        raise UserError(f"suspend {node.display_name}", None, "waits for a person; run it on a terminal")
    if not wanted:
        input(f"{node.display_name}: press Enter to go on ")
    answers = {}
    for name, about in wanted.items():
        choices = f" [{'/'.join(map(str, about['enum']))}]" if about.get("enum") else ""
        answer = input(f"{node.display_name}: {about.get('description') or name}{choices}: ")
        answers[name] = answer or str(about.get("default") or "")
    return answers


def _last_dot(name: str) -> int:
    """The last dot outside parentheses: items may hold dots."""
    depth = 0
    for index in range(len(name) - 1, -1, -1):
        depth += (name[index] == ")") - (name[index] == "(")
        if name[index] == "." and depth == 0:
            return index
    return -1
