"""The state of one run that all its nodes share, and that the journal shows to others."""

import contextlib
import dataclasses
import hashlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tuneloop.core.json_types import JsonMapping
from tuneloop.core.threads import forward_signals
from tuneloop.local.journal import DONE, Journal, Node, Workflow
from tuneloop.local.processes import Launcher, Process, end_process
from tuneloop.local.results import Call, Result, Scope
from tuneloop.workflow.expression_values import format_value

OnNode = Callable[[Node], None]
"""Called with a copy of a node each time it changes, one call at a time, in the order of ``nodes.jsonl``."""
OnLog = Callable[[Node, str], None]
"""Called with each line (without its end) a pod writes, one call at a time."""


class Execution:
    """What the nodes of a run share: its tags, its journal, and the pods that run.

    Attributes:
        stopping: set when the run is to end; nothing starts any more.
        published: global outputs by their tags; replaced, never changed, because threads read it.
        slots: limits the number of pods that run at a time; daemons do not count.
    """

    def __init__(
        self,
        workflow: JsonMapping,
        parameters: Mapping[str, str],
        workdir: Path,
        *,
        parallelism: int | None,
        launcher: Launcher,
        env: Mapping[str, str],
        cwd: Path,
        grace: float,
        on_node: OnNode | None,
        on_log: OnLog | None,
    ) -> None:
        metadata = workflow.get("metadata", {})
        spec = workflow["spec"]
        self.name = str(metadata.get("name") or metadata.get("generateName", "run-").rstrip("-"))
        self.templates = {template["name"]: template for template in spec["templates"]}
        self.parameters = dict(parameters)
        self.workdir = workdir
        self.launcher = launcher
        self.cwd = cwd
        self.grace = grace
        self.began = time.time()
        self.status = "Running"
        self.stopping = threading.Event()
        self.stopped_by: int | None = None
        self.nodes: dict[str, Node] = {}
        self.outputs: dict[str, str] = {}
        self.published: Scope = {}
        self._tags = _workflow_tags(workflow, self.name, workdir, parameters)
        self.env = env
        self._on_node = on_node
        self._on_log = on_log
        limit = parallelism or int(spec.get("parallelism") or max(4, os.cpu_count() or 1))
        self.slots = threading.BoundedSemaphore(limit)
        self._lock = threading.RLock()
        self._running: dict[str, tuple[Node, Process, float]] = {}
        self._log_offsets: dict[str, int] = {}
        self._servers: dict[str, int] = {}
        self._end_reasons: dict[str, str] = {}
        self._journal = Journal(workdir)

    # Nodes

    def create_node(self, call: Call, kind: str) -> Node:
        """Create a node; its id is the same in every execution of the same graph."""
        base = call.name.removesuffix(
            ".onExit"
        )  # the exit handler has the workflow's name before it
        display = base.rpartition(".")[2] + call.name[len(base) :]
        slug = re.sub(r"[^a-z0-9]+", "-", display.lower()).strip("-")[:40]
        identity = f"{slug}-{hashlib.sha256(call.name.encode()).hexdigest()[:10]}"
        node = Node(identity, call.name, display, call.template, kind, parent=call.parent)
        self.record(node)
        return node

    def start(self, node: Node) -> None:
        """Record that a node runs."""
        node.phase = "Running"
        node.started = time.time()
        self.record(node)

    def set_message(self, node: Node, message: str) -> None:
        """Change a node's message."""
        node.message = message
        self.record(node)

    def settle(self, node: Node, result: Result) -> None:
        """Record the result of a node; a daemon that is ready keeps running."""
        node.outputs = result.parameters
        node.exit_code = result.exit_code
        if node.phase in DONE:
            return
        if result.daemon:
            node.daemoned = True
            node.message = ""
        else:
            node.phase = result.phase
            node.message = result.message
            node.finished = time.time()
            node.started = node.started or node.finished
            self._follow_log(node)
        self.record(node)

    def record(self, node: Node) -> None:
        """Write a node to the journal as it is, and pass it to whoever watches the run."""
        with self._lock:
            self.nodes[node.id] = node
            self._journal.write(node)
            if self._on_node:
                self._on_node(dataclasses.replace(node))

    def record_workflow(self, workflow: Workflow) -> None:
        """Write the state of the whole run to the journal; close the journal if the run has finished."""
        self._journal.write(workflow)
        if workflow.finished:
            self._journal.close()

    def attempt_type(self, template: str) -> str:
        """Return the type of node that an attempt of a template is."""
        return "DAG" if "dag" in self.templates.get(template, {}) else "Pod"

    def global_scope(self) -> Scope:
        """Return the tags that every template may use."""
        duration = f"{time.time() - self.began:f}"
        return (
            self._tags
            | self.published
            | {"workflow.duration": duration, "workflow.status": self.status}
        )

    def publish_output(self, name: str, value: str) -> None:
        """Set a global output."""
        with self._lock:
            self.published = {**self.published, f"workflow.outputs.parameters.{name}": value}
            self.outputs[name] = value

    # Pods

    def get_address(self, node: Node) -> str:
        """Return the address of a pod; each server has its own, as they listen at one port, and keeps it."""
        if not self.templates[node.template].get("daemon"):
            return "127.0.0.1"
        with self._lock:
            task = node.name.rpartition("(")[0] or node.name  # the same for all attempts
            return f"127.0.0.{1 + self._servers.setdefault(task, len(self._servers))}"

    @contextlib.contextmanager
    def watch_pod(self, node: Node, process: Process, grace: float) -> Iterator[None]:
        """Follow progress and log of a running pod, and end the pod when the run is stopped."""
        with self._lock:
            self._running[node.id] = (node, process, grace)
            self._log_offsets.setdefault(node.id, (self.workdir / node.log).stat().st_size)
            if self.find_end_reason(node.name):
                _end_apart(process, grace)
        try:
            yield
        finally:
            with self._lock:
                self._running.pop(node.id, None)

    def follow_pods(self) -> None:
        """Read what running pods have written since the last time to their progress files and logs."""
        with self._lock:
            running = [node for node, _, _ in self._running.values()]
        for node in running:
            self._follow_log(node)
            with contextlib.suppress(OSError):
                progress = (self.workdir / "nodes" / node.id / "progress").read_text().strip()
                if progress and progress != node.progress:
                    node.progress = progress
                    self.record(node)

    def _follow_log(self, node: Node) -> None:
        if not self._on_log or not node.log:
            return
        with self._lock, contextlib.suppress(OSError), (self.workdir / node.log).open("rb") as file:
            file.seek(self._log_offsets.get(node.id, 0))
            data = file.read()
            complete = data if node.phase in DONE else data[: data.rfind(b"\n") + 1]
            self._log_offsets[node.id] = self._log_offsets.get(node.id, 0) + len(complete)
            for line in complete.decode(errors="replace").splitlines():
                self._on_log(node, line)

    # The end of the run, or of a part of it

    def handle_signals(self) -> contextlib.AbstractContextManager[None]:
        """Stop the run at SIGTERM and SIGINT; Python itself handles a second SIGINT."""

        def stop(number: int) -> None:
            self.stopped_by = number
            self.stopping.set()
            if number == signal.SIGINT:
                signal.signal(signal.SIGINT, signal.default_int_handler)

        return forward_signals(stop)

    def pause(self, seconds: float, name: str) -> bool:
        """Wait for `seconds`; return True, without waiting further, once the run or the node `name` is to end."""
        deadline = time.monotonic() + seconds
        while not self.stopping.is_set() and not self.find_end_reason(name):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self.stopping.wait(min(left, 0.1))
        return True

    def end_pods(self) -> None:
        """End all pods that run."""
        with self._lock:
            running = list(self._running.values())
            self._running = {}
        for _, process, grace in running:
            _end_apart(process, grace)

    def end_nodes(self, paths: Iterable[str], reason: str) -> None:
        """End the pods at or below nodes of these names, and let no pod start there any more."""
        with self._lock:
            self._end_reasons = self._end_reasons | dict.fromkeys(
                paths, reason
            )  # replaced: threads read it
            for node, process, grace in self._running.values():
                if self.find_end_reason(node.name):
                    _end_apart(process, grace)

    def find_end_reason(self, name: str) -> str | None:
        """Say why nothing may run at the node `name`; None where it may."""
        for path, reason in self._end_reasons.items():
            if re.match(rf"{re.escape(path)}([.(]|$)", name):
                return reason
        return None


def _end_apart(process: Process, grace: float) -> None:
    threading.Thread(target=end_process, args=(process, grace), daemon=True).start()


def _workflow_tags(
    workflow: JsonMapping, name: str, workdir: Path, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the tags ``workflow.…``, but for those that change while it runs."""
    own = {
        f"workflow.{kind}": workflow.get("metadata", {}).get(kind) or {}
        for kind in ("labels", "annotations")
    }
    return {
        "workflow.name": name,
        "workflow.namespace": "local",
        "workflow.uid": hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:32],
        "workflow.parameters": format_value([{"name": k, "value": v} for k, v in given.items()]),
        **{f"workflow.parameters.{key}": value for key, value in given.items()},
        **{
            f"{kind}.{key}": format_value(value)
            for kind, values in own.items()
            for key, value in values.items()
        },
    }
