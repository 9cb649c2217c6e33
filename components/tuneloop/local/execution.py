"""The state of one run that all its nodes share, and that the journal shows to others.

The executor makes one for each workflow. Each task of a graph has a thread, so what is not under
the lock is set before the threads start, or replaced and never changed.
"""

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
"""Called with a copy of a node whenever it changes, one call at a time, in the order of
``nodes.jsonl``. `tuneloop run` gives `cli/live.py: Display.node`."""
OnLog = Callable[[Node, str], None]
"""Called with each line (without its end) that a pod writes, one call at a time. `tuneloop run`
gives `cli/live.py: Display.log`."""


@dataclasses.dataclass(frozen=True)
class RunningPod:
    """A pod whose process runs, and the seconds it gets between SIGTERM and SIGKILL."""

    node: Node
    process: Process
    grace: float

    def end(self) -> None:
        """Begin to end the pod; do not wait for its end."""
        threading.Thread(target=end_process, args=(self.process, self.grace), daemon=True).start()


class Execution:
    """What the nodes of a run share: its tags, its journal, and the pods that run.

    Every public method may be called from any thread.

    Attributes:
        workdir: the directory that `tuneloop.local.journal` describes.
        cwd: the working directory of every pod.
        grace: seconds between SIGTERM and SIGKILL for pods that name none.
        began: when this session of the run began, in Unix seconds; a resumed run has a later one.
            So a tag that stages take as a parameter must not be made of it: a stage that is resumed
            refuses other parameters.
        status: the value of the tag ``workflow.status``, which an exit handler reads.
        stopped_by: the number of the signal that stopped the run, if any.
        nodes: all nodes of this session, by id.
        outputs: global outputs by name.
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
        spec = workflow["spec"]
        self.name = name_run(workflow)
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
        self._tags = _build_workflow_tags(workflow, self.name, workdir, parameters)
        self.env = env
        self._on_node = on_node
        self._on_log = on_log
        limit = parallelism or int(spec.get("parallelism") or max(4, os.cpu_count() or 1))
        self.slots = threading.BoundedSemaphore(limit)
        self._lock = threading.RLock()
        self._running_pods: dict[str, RunningPod] = {}
        # Node id → the bytes of its log that `on_log` has got.
        self._log_offsets: dict[str, int] = {}
        # Name of a server's node → its number, which is the last part of its address.
        self._server_numbers: dict[str, int] = {}
        # Name of a node → why nothing may run at or below it any more.
        self._end_reasons: dict[str, str] = {}
        self._journal = Journal(workdir)

    # Nodes

    def create_node(self, call: Call, kind: str) -> Node:
        """Create a node; its id is the same in every execution of the same graph."""
        # The exit handler is shown with the workflow's name before it.
        base = call.name.removesuffix(".onExit")
        display = base.rpartition(".")[2] + call.name[len(base) :]
        slug = re.sub(r"[^a-z0-9]+", "-", display.lower())
        # Two nodes may be shown alike; their paths differ.
        digest = hashlib.sha256(call.name.encode()).hexdigest()
        node = Node(
            id=f"{slug.strip('-')[:40]}-{digest[:10]}",
            name=call.name,
            display_name=display,
            template=call.template,
            type=kind,
            parent=call.parent,
        )
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
        """Record the result of a node; a daemon that is ready keeps running.

        Of a `Result` only what is copied here is written to the journal.
        """
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

    def get_node_type(self, template: str) -> str:
        """Return the type of the node that one attempt of a template becomes."""
        return "DAG" if "dag" in self.templates.get(template, {}) else "Pod"

    def build_scope(self) -> Scope:
        """Return the tags that every template may use."""
        scope: Scope = self._tags | self.published
        scope["workflow.duration"] = f"{time.time() - self.began:f}"
        scope["workflow.status"] = self.status
        return scope

    def publish_output(self, name: str, value: str) -> None:
        """Set a global output."""
        with self._lock:
            self.published = self.published | {f"workflow.outputs.parameters.{name}": value}
            self.outputs[name] = value

    # Pods

    def get_address(self, node: Node) -> str:
        """Return the address of a pod.

        Servers listen at the same port, so each has an address to itself, which it keeps.
        """
        if not self.templates[node.template].get("daemon"):
            return "127.0.0.1"
        # All attempts of a server have one address: the attempt's number is left out.
        server = node.name.rpartition("(")[0] or node.name
        with self._lock:
            number = self._server_numbers.setdefault(server, len(self._server_numbers))
        return f"127.0.0.{1 + number}"

    @contextlib.contextmanager
    def watch_pod(self, node: Node, process: Process, grace: float) -> Iterator[None]:
        """Follow progress and log of a running pod, and end the pod when the run is stopped."""
        pod = RunningPod(node, process, grace)
        with self._lock:
            self._running_pods[node.id] = pod
            # An earlier session may have written to the log.
            size = (self.workdir / node.log).stat().st_size
            self._log_offsets.setdefault(node.id, size)
            # The end may have been asked for while the process was started.
            if self.find_end_reason(node.name):
                pod.end()
        try:
            yield
        finally:
            with self._lock:
                self._running_pods.pop(node.id, None)

    def follow_pods(self) -> None:
        """Read what running pods have written to their progress files and logs since the last time."""
        with self._lock:
            nodes = [pod.node for pod in self._running_pods.values()]
        for node in nodes:
            self._follow_log(node)
            file = self.workdir / "nodes" / node.id / "progress"
            with contextlib.suppress(OSError):
                progress = file.read_text().strip()
                if progress and progress != node.progress:
                    node.progress = progress
                    self.record(node)

    def _follow_log(self, node: Node) -> None:
        """Pass the whole lines that a log has got since the last time to `on_log`."""
        if not self._on_log or not node.log:
            return
        with self._lock, contextlib.suppress(OSError), (self.workdir / node.log).open("rb") as file:
            offset = self._log_offsets.get(node.id, 0)
            file.seek(offset)
            data = file.read()
            # The last line of a pod that runs may be half written.
            complete = data if node.phase in DONE else data[: data.rfind(b"\n") + 1]
            self._log_offsets[node.id] = offset + len(complete)
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
        """Wait for `seconds`.

        Returns True, without waiting further, once the run or the node `name` is to end.
        """
        deadline = time.monotonic() + seconds
        while not self.stopping.is_set() and not self.find_end_reason(name):
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                return False
            # The end of a single node sets no event, so that is looked at ten times a second.
            self.stopping.wait(min(remaining_s, 0.1))
        return True

    def end_pods(self) -> None:
        """End all pods that run."""
        with self._lock:
            pods = list(self._running_pods.values())
            self._running_pods = {}
        for pod in pods:
            pod.end()

    def end_nodes(self, paths: Iterable[str], reason: str) -> None:
        """End the pods at or below nodes of these names, and let no pod start there any more."""
        with self._lock:
            # It is replaced and not changed, because other threads read it without the lock.
            self._end_reasons = self._end_reasons | dict.fromkeys(paths, reason)
            for pod in self._running_pods.values():
                if self.find_end_reason(pod.node.name):
                    pod.end()

    def find_end_reason(self, name: str) -> str | None:
        """Return why nothing may run at the node `name`; None where it may."""
        for path, reason in self._end_reasons.items():
            if re.match(rf"{re.escape(path)}([.(]|$)", name):
                return reason
        return None


def name_run(workflow: JsonMapping) -> str:
    """Return the name of a workflow's run; where a cluster would generate one, its beginning."""
    metadata = workflow.get("metadata", {})
    prefix = metadata.get("generateName", "run-")
    return str(metadata.get("name") or prefix.rstrip("-"))


def _build_workflow_tags(
    workflow: JsonMapping,
    name: str,
    workdir: Path,
    parameters: Mapping[str, str],
) -> dict[str, str]:
    """Return the tags ``workflow.…``, but for those that change while it runs.

    A tag that is neither here nor in `Execution.build_scope` ends the node whose template has it
    with an error.
    """
    pairs = [{"name": key, "value": value} for key, value in parameters.items()]
    tags = {
        "workflow.name": name,
        "workflow.namespace": "local",
        "workflow.uid": hashlib.sha256(str(workdir.absolute()).encode()).hexdigest()[:32],
        "workflow.parameters": format_value(pairs),
    }
    for key, value in parameters.items():
        tags[f"workflow.parameters.{key}"] = value
    for kind in ("labels", "annotations"):
        for key, value in (workflow.get("metadata", {}).get(kind) or {}).items():
            tags[f"workflow.{kind}.{key}"] = format_value(value)
    return tags
