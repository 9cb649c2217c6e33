"""Run an Argo Workflow on this machine: the very one that `render` writes and `submit` sends.

    outcome = execute(workflow, arguments={"iterations": "3"}, workdir=Path("runs/a/local"), on_node=show)

A pod is a process group. What a run leaves behind, and how to read it live: `tuneloop.local.journal`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuneloop.core.errors import UserError
from tuneloop.local import graph
from tuneloop.local.graph import Call
from tuneloop.local.journal import BROKEN, DONE, Journal, Node, Workflow, hold, outcome_code
from tuneloop.local.pod import end
from tuneloop.local.pod_files import Box
from tuneloop.local.processes import Launcher, Launches, Process, base_environment
from tuneloop.local.warm import Kind, serves, warmable
from tuneloop.workflow import manifest
from tuneloop.workflow.expressions import text

OnNode = Callable[[Node], None]
"""Called with a copy of a node whenever its phase, message, progress or `daemoned` changes, one call at a time, in the
order of ``nodes.jsonl``."""
OnLog = Callable[[Node, str], None]
"""Called with each line (without its end) a pod writes, one call at a time."""


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
    entrypoint: str | None = None,
    parallelism: int | None = None,
    warm: bool = True,
    launcher: Launches | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    grace: float = 60.0,
    on_node: OnNode | None = None,
    on_log: OnLog | None = None,
) -> Outcome:
    """Run `workflow` to its end.

    Args:
        workflow: a Workflow or WorkflowTemplate, as loaded from YAML.
        workdir: state and logs of this run; see `tuneloop.local.journal`.
        arguments: values of workflow parameters, over those in the spec.
        entrypoint: another template to start at; its inputs are taken from `arguments`.
        parallelism: pods at a time, daemons apart; default: the spec's, else the number of cores, at least 4.
        warm: start tuneloop's own stages as forks of a process that has imported torch (`tuneloop.local.warm`).
        launcher: starts the processes of pods, in place of `warm`; closed at the end.
        env: added to every pod's environment (the container's own wins).
        cwd: of every pod; default: the current directory.
        grace: seconds between SIGTERM and SIGKILL, when the template names no terminationGracePeriodSeconds.

    Raises:
        UserError: a field the executor has no meaning for, an unknown argument, a missing one: before anything runs.
    """
    document = workflow.get("spec") or {}
    manifest.check(document)
    templates = document.get("templates", [])
    parameters = _parameters(document, arguments or {}, strict=entrypoint is None)
    start = entrypoint or document.get("entrypoint")
    if not start:
        raise UserError("spec.entrypoint", None, "is required: the template to start at")
    with hold(workdir):
        metadata = workflow.get("metadata", {})
        session = Session(
            workflow=workflow,
            name=str(metadata.get("name") or metadata.get("generateName", "run-").rstrip("-")),
            templates={t["name"]: manifest.merged(t, document.get("templateDefaults", {})) for t in templates},
            parameters=parameters,
            workdir=workdir,
            parallelism=parallelism or int(document.get("parallelism") or max(4, os.cpu_count() or 1)),
            launcher=launcher or Launcher(base_environment(env or {}), _kinds(templates) if warm else ()),
            env=base_environment(env or {}),
            cwd=cwd or Path.cwd(),
            grace=grace,
            on_node=on_node,
            on_log=on_log,
        )
        with session.signals(), session.ticking():
            return session.run(start, document, arguments or {})


class Session:
    """One execution: what its nodes share."""

    def __init__(
        self,
        *,
        workflow: Mapping[str, Any],
        name: str,
        templates: Mapping[str, Mapping[str, Any]],
        parameters: Mapping[str, str],
        workdir: Path,
        parallelism: int,
        launcher: Launches,
        env: Mapping[str, str],
        cwd: Path,
        grace: float,
        on_node: OnNode | None,
        on_log: OnLog | None,
    ) -> None:
        self.name, self.templates, self.workdir, self.launcher = name, templates, workdir, launcher
        self.cwd, self.grace = cwd, grace
        self.parameters = dict(parameters)
        self.begun = time.time()
        self.status = "Running"
        self._fixed = _workflow_tags(workflow, name, workdir, self.begun, self.parameters)
        self.stopping = threading.Event()
        self.nodes: dict[str, Node] = {}
        self.outputs: dict[str, str] = {}
        self.published: dict[str, Any] = {}  # replaced, never changed: threads read it
        self._env, self._on_node, self._on_log = env, on_node, on_log
        self._slots = threading.BoundedSemaphore(parallelism)
        self._lock = threading.RLock()
        self._running: dict[str, tuple[Node, Process, float]] = {}
        self._read: dict[str, int] = {}
        self._end_reasons: dict[str, str] = {}
        self._journal = Journal(workdir)
        self._signal: int | None = None

    def run(self, entrypoint: str, document: Mapping[str, Any], arguments: Mapping[str, str]) -> Outcome:
        """Run to the end, exit handler included."""
        record = Workflow(self.name, started=self.begun, pid=os.getpid(), parameters=self.parameters)
        self._journal.write(record)
        seconds = document.get("activeDeadlineSeconds")
        late = threading.Event()

        def expire() -> None:
            late.set()
            self.stopping.set()

        timer = threading.Timer(float(seconds or 0), expire)
        timer.daemon = True
        if seconds:
            timer.start()
        try:
            given = self.parameters | dict(arguments)
            call = Call(entrypoint, self.name, "", 0, given)
            result = self._wait(lambda: self._entry(call))
            timer.cancel()
            if late.is_set() and self._signal is None:
                result.phase, result.message = "Failed", f"exceeded its deadline of {seconds} s"
                self.stopping.clear()
            self.status = "Succeeded" if result.phase in ("Skipped", "Omitted") else result.phase
            result = self._wait(lambda: self._ending(document.get("onExit"), result))
        finally:
            self.launcher.close()
        record.phase, record.message = (
            ("Succeeded" if result.phase in ("Skipped", "Omitted") else result.phase),
            result.message,
        )
        if self._signal is not None:
            record.phase, record.message = "Failed", f"stopped by {signal.Signals(self._signal).name}"
        record.finished, record.outputs = time.time(), self.outputs
        self._journal.write(record)
        self._journal.close()
        code = outcome_code(record.phase, self.nodes, self._signal)
        return Outcome(record.phase, record.message, self.nodes, self.outputs, code)

    def _entry(self, call: Call) -> graph.Result:
        result = graph.call(self, call)
        if result.daemon:  # nothing is left that it could serve
            result.daemon.close()
            result.phase = "Succeeded"
        return result

    def _ending(self, handler: str | None, result: graph.Result) -> graph.Result:
        """Run the exit handler, which gets the workflow's parameters; it can only make a result worse."""
        if handler is None or self._signal is not None:
            return result
        after = self._entry(Call(handler, f"{self.name}.onExit", "", 0, self.parameters))
        return after if after.broken and not result.broken else result

    def _wait(self, work: Callable[[], graph.Result]) -> graph.Result:
        """Run `work` on another thread, so that signals reach this one."""
        results: list[graph.Result] = []
        thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
        thread.start()
        while thread.is_alive():
            thread.join(0.05)
            if self.stopping.is_set():
                self._end_pods()
        return results[0]

    def _end_pods(self) -> None:
        with self._lock:
            running, self._running = list(self._running.values()), {}
        for _, process, grace in running:
            _end_apart(process, grace)

    # What graph and pod ask of a session

    def end_nodes(self, paths: Iterable[str], reason: str) -> None:
        """End what runs at or below nodes of these names, and let nothing start there any more."""
        with self._lock:
            self._end_reasons = self._end_reasons | dict.fromkeys(paths, reason)  # replaced: threads read it
            for node, process, grace in self._running.values():
                if self.find_end_reason(node.name):
                    _end_apart(process, grace)

    def find_end_reason(self, name: str) -> str | None:
        """Say why nothing may run at the node `name`; None where it may."""
        for path, reason in self._end_reasons.items():
            if re.match(rf"{re.escape(path)}([.(\[]|$)", name):
                return reason
        return None

    def pause(self, seconds: float, name: str) -> bool:
        """Wait, and say whether the run, or what is at the node `name`, is to end; at once if that is so."""
        deadline = time.monotonic() + seconds
        while not self.stopping.is_set() and not self.find_end_reason(name):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.stopping.wait(min(left, 0.1))
        return True

    def node(self, what: Call, kind: str) -> Node:
        """A new node; its id is the same in every execution of the same graph."""
        display = _display(what.name)
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

    def say(self, node: Node, message: str) -> None:
        """Change a node's message."""
        node.message = message
        self.tell(node)

    def settle(self, node: Node, result: graph.Result) -> None:
        """Write down what a node came to; a daemon that is ready goes on."""
        node.outputs = result.parameters | {f"artifact:{k}": str(v) for k, v in result.artifacts.items()}
        node.exit_code = result.exit_code
        if result.daemon is None:
            self.finish(node, result.phase, result.message)
        elif node.phase not in DONE:
            node.daemoned, node.message = True, ""
            self.tell(node)

    def globals(self) -> dict[str, Any]:
        """The tags that every template may use."""
        scope = self._fixed | self.published | {"workflow.duration": f"{time.time() - self.begun:f}"}
        if self.status != "Running":
            failures = [_failure(node) for node in self.nodes.values() if node.phase in BROKEN]
            scope["workflow.failures"] = json.dumps(text(failures))  # text within text, as Argo has it
        return scope | {"workflow.status": self.status}

    def publish(self, kind: str, name: str, value: Any) -> None:
        """Set a global output."""
        with self._lock:
            self.published = {**self.published, f"workflow.outputs.{kind}.{name}": value}
            if kind == "parameters":
                self.outputs[name] = value

    def kind(self, template: str) -> str:
        """What type of node a template's attempts are."""
        kinds = {"dag": "DAG", "steps": "Steps"}
        return next((kind for key, kind in kinds.items() if key in self.templates[template]), "Pod")

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
            self._read.setdefault(node.id, (self.workdir / node.log).stat().st_size)
            if self.find_end_reason(node.name):
                _end_apart(process, grace)
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(node.id, None)

    def environment(self, container: Mapping[str, Any], node: Node, box: Box) -> dict[str, str]:
        """A pod's environment: the machine's, then the container's."""
        progress = self.workdir / "nodes" / node.id / "progress"
        env = {**self._env, "ARGO_PROGRESS_FILE": str(progress)}
        values = (node.id, "local", node.id, socket.gethostname(), "local", "127.0.0.1", "127.0.0.1")
        fields = dict(zip(manifest.FIELD_PATHS, values))
        for item in container.get("env", []):
            if "value" in item:
                env[item["name"]] = box.translate(str(item["value"]))
            elif path := (item.get("valueFrom") or {}).get("fieldRef", {}).get("fieldPath"):
                env[item["name"]] = fields[path]
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


def _end_apart(process: Process, grace: float) -> None:
    threading.Thread(target=end, args=(process, grace), daemon=True).start()


def _workflow_tags(
    workflow: Mapping[str, Any], name: str, workdir: Path, begun: float, parameters: Mapping[str, str]
) -> dict[str, str]:
    """``workflow.…``, but for what changes while it runs."""
    metadata, document = workflow.get("metadata", {}), workflow["spec"]
    created = time.gmtime(begun)
    at = "workflow.creationTimestamp"
    own = {f"workflow.{kind}": metadata.get(kind) or {} for kind in ("labels", "annotations")}
    return {
        "workflow.name": name,
        "workflow.namespace": "local",
        "workflow.uid": hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:32],
        "workflow.mainEntrypoint": str(document.get("entrypoint", "")),
        "workflow.serviceAccountName": str(document.get("serviceAccountName", "")),
        "workflow.parameters": text([{"name": k, "value": v} for k, v in parameters.items()]),
        **{f"workflow.parameters.{key}": value for key, value in parameters.items()},
        **{f"{kind}.{key}": text(value) for kind, values in own.items() for key, value in values.items()},
        **{f"{at}{suffix}": time.strftime("%Y-%m-%dT%H:%M:%SZ", created) for suffix in ("", ".RFC3339")},
        **{f"{at}.{letter}": time.strftime(f"%{letter}", created) for letter in "YmdHMSjyBbAapIZ"},
        f"{at}.s": str(int(begun)),
    }


def _failure(node: Node) -> dict[str, str]:
    """A failed node as ``workflow.failures`` lists it."""
    finished = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(node.finished))
    return {
        "displayName": node.display_name,
        "message": node.message,
        "templateName": node.template,
        "phase": node.phase,
        "podName": node.id,
        "finishedAt": finished,
    }


def _kinds(templates: Iterable[Mapping[str, Any]]) -> list[Kind]:
    """What the templates have for which a warm process pays."""
    containers = [template.get("container") or {} for template in templates]
    commands = [[*container.get("command", []), *container.get("args", [])] for container in containers]
    found: dict[Kind, bool] = {"stages": any(map(warmable, commands)), "server": any(map(serves, commands))}
    return [kind for kind, there in found.items() if there]


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


def _display(path: str) -> str:
    """A node's own part of its path; the exit handler has the workflow's name before it."""
    base = path.removesuffix(".onExit")
    own = re.search(r"\[\d+\]$", base)  # a group of steps
    return (own[0] if own else base[_last_dot(base) + 1 :]) + path[len(base) :]


def _last_dot(name: str) -> int:
    """The last dot outside parentheses: items may hold dots."""
    depth = 0
    for index in range(len(name) - 1, -1, -1):
        depth += (name[index] == ")") - (name[index] == "(")
        if name[index] == "." and depth == 0:
            return index
    return -1
