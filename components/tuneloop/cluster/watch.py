"""Follow a run on a cluster: its nodes, under the local executor's names, why pods wait, and their
logs.
"""

import re
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from queue import SimpleQueue
from typing import Any

from tuneloop.cluster import reservations
from tuneloop.cluster.problems import ABSENT, UNSEEN, find_object, record_denied_reads
from tuneloop.cluster.run_workflows import DONE, find_workflows, get_workflow_phase
from tuneloop.cluster.waiting import NODE_NAME, WaitReports, explain_waiting
from tuneloop.core.errors import Retryable, UserError, print_diagnostic, suggest_name
from tuneloop.core.json_types import JsonMapping
from tuneloop.kube.connection import (
    ApiRefusal,
    Connection,
    list_status_nodes,
    retry_until_available,
)
from tuneloop.local.journal import Node
from tuneloop.runs.stages import get_stage_name, parse_stage_name
from tuneloop.sharing.claim_request import TAKE
from tuneloop.workflow.manifest import effective_spec, list_calls, read_parameters
from tuneloop.workflow.plan import find_plan
from tuneloop.workflow.settings import RUN_LABEL


@dataclass(frozen=True)
class Status:
    """A run at one moment.

    All fields but `nodes` are keys of ``cluster status --json`` (docs/commands.md; `cli/cluster.py:
    show_status`). `ui/describe.py: describe_state` takes some of them for the page.

    Attributes:
        phase: of the newest workflow: ``Pending Running Succeeded Failed Error``.
        waiting: node, or stage of several pods → why its pod does not run yet.
        accelerator_seconds: GPU seconds requested so far, over all stages.
        claims: claim that the run reserves → all runs that reserve it, and its devices.
        iterations: the maximum number of iterations that was requested.
        denied_reads: what the account may not read, such as ``list workloads``.
    """

    run: str
    phase: str
    message: str
    workflows: list[str]
    nodes: dict[str, Node]
    waiting: dict[str, str]
    accelerator_seconds: float
    claims: dict[str, str]
    iterations: int | None
    denied_reads: list[str]


def read_status(cluster: Connection, run: str) -> Status:
    """Read the status of a run from the cluster.

    Raises:
        UserError: the cluster has no such run.
    """
    workflows = find_workflows(cluster, run)
    newest = workflows[-1]
    nodes: dict[str, Node] = {}
    seconds = 0.0
    for workflow in workflows:
        nodes |= read_nodes(workflow)
        durations = workflow.get("status", {}).get("resourcesDuration", {})
        # GPUs of any vendor: resources are called nvidia.com/gpu, amd.com/gpu.
        seconds += sum(value for name, value in durations.items() if name.endswith("/gpu"))
    # The workflows say how the run stands; what only explains it may not be for this account to see.
    with record_denied_reads() as denied_reads:
        waiting = explain_waiting(cluster, run, nodes)
        claims: dict[str, str] = {}
        if any(node.template == TAKE for node in nodes.values()):
            descriptions = find_object(_describe_claims, cluster, run)
            claims = {} if descriptions in (ABSENT, UNSEEN) else descriptions
    iterations = read_parameters(newest["spec"]).get("iterations")
    return Status(
        run=run,
        phase=get_workflow_phase(newest),
        message=str(newest.get("status", {}).get("message", "")),
        workflows=[str(workflow["metadata"]["name"]) for workflow in workflows],
        nodes=nodes,
        waiting=waiting,
        accelerator_seconds=seconds,
        claims=claims,
        iterations=int(iterations) if iterations else None,
        denied_reads=list(dict.fromkeys(denied_reads)),
    )


def read_nodes(workflow: JsonMapping) -> dict[str, Node]:
    """Read the nodes of a workflow's status in the order they started."""
    nodes = [_read_node(item) for item in list_status_nodes(workflow)]
    is_over = get_workflow_phase(workflow) in DONE
    workflow_end = parse_time(workflow.get("status", {}).get("finishedAt"))
    for node in nodes:
        # The controller does not update the nodes of a workflow that was stopped.
        if is_over and node.phase in ("Running", "Pending"):
            node.phase = "Failed"
            node.message = node.message or "ended with the workflow"
        # Argo 3.7 may write no time for a deleted pod: it ended before its template started again.
        if node.phase in DONE and node.started and not node.finished:
            later_starts = [
                other.started
                for other in nodes
                if other.template == node.template and other.started > node.started
            ]
            node.finished = min(later_starts, default=workflow_end or time.time())
    nodes.sort(key=lambda node: (node.started, node.name))
    return {node.id: node for node in nodes}


def _read_node(item: JsonMapping) -> Node:
    """Read a node as the controller writes it.

    Nodes of a run on this machine are made by `local/execution.py: Execution.create_node`: a field
    that is added to `Node` has its default on a cluster until it is read here.
    """
    outputs = item.get("outputs", {})
    exit_code = outputs.get("exitCode")
    return Node(
        id=item["id"],
        name=item["name"],
        display_name=item.get("displayName", ""),
        template=item.get("templateName", ""),
        type=item["type"],
        phase=item.get("phase", "Pending"),
        parent=item.get("boundaryID", ""),
        message=item.get("message", ""),
        daemoned=bool(item.get("daemoned")),
        started=parse_time(item.get("startedAt")),
        finished=parse_time(item.get("finishedAt")),
        exit_code=None if exit_code is None else int(exit_code),
        progress=item.get("progress", ""),
        inputs=_read_values(item.get("inputs", {})),
        outputs=_read_values(outputs),
    )


def _read_values(arguments: JsonMapping) -> dict[str, str]:
    """Return name → value of the parameters that have one."""
    parameters = arguments.get("parameters", ())
    return {item["name"]: str(item["value"]) for item in parameters if "value" in item}


def parse_time(text: str | None) -> float:
    """Return a time of Kubernetes as Unix seconds; 0 if there is none."""
    return datetime.fromisoformat(text).timestamp() if text else 0.0


def refresh_claims(cluster: Connection) -> dict[str, str]:
    """Release the reservations of ended runs, and return claim → its devices, and the runs that
    reserve it.

    Raises:
        UserError: the cluster has no claims, or the account may not change them.
    """
    reservations.release_ended_runs(cluster)
    return _describe_claims(cluster)


def _describe_claims(cluster: Connection, run: str | None = None) -> dict[str, str]:
    """Return claim → its devices, and the runs that reserve it; with `run` only the run's claims."""
    descriptions: dict[str, str] = {}
    for claim in reservations.list_claims(cluster):
        runs = reservations.list_claim_runs(claim)
        if run is None or run in runs:
            name = claim["metadata"]["name"]
            descriptions[name] = f"{_describe_devices(claim)}; runs {', '.join(runs)}"
    return descriptions


def _describe_devices(claim: JsonMapping) -> str:
    """Describe the devices that a claim has been given."""
    if claim["kind"] != "ResourceClaim":
        return "a claim for each pod"
    allocation = claim.get("status", {}).get("allocation", {})
    results = allocation.get("devices", {}).get("results", ())
    devices = sorted(result["device"] for result in results)
    return ", ".join(devices) or "no device until a pod is scheduled"


def read_logs(
    cluster: Connection,
    run: str,
    *,
    stage: str | None = None,
    follow: bool = False,
    since: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield (stage, line) of the logs of a run's pods that still exist.

    Args:
        cluster: where the run is.
        run: its name.
        stage: only the pods of this stage, or those that run it with others (`find_pod_names`).
        follow: go on until the run ends, with pods that start meanwhile, and say what pods wait for.
        since: the name of a workflow: only its pods and later ones.

    Raises:
        UserError: there is no such run, or no such stage, or no pod of `stage`.
    """
    workflows = find_workflows(cluster, run)
    chosen: set[str] = set()
    if stage:
        started = {get_pod_stage(pod) for pod in _list_started_pods(cluster, run)}
        chosen = find_pod_names(workflows, stage, started)
    readers = PodReaders(cluster, run, chosen, follow)
    for workflow in workflows:
        if workflow["metadata"]["name"] == since:
            readers.begin = parse_time(workflow["metadata"]["creationTimestamp"])
    reports = WaitReports(cluster, run)
    while True:
        # Read before the pods: those of a workflow that has ended are all there.
        is_over = not follow or all(get_workflow_phase(item) in DONE for item in workflows)
        readers.start_new()
        if is_over:
            readers.join()
        yield from _drain(readers.lines)
        if is_over:
            break
        # Without this a run that is never admitted looks like one that has nothing to say.
        nodes = {key: node for item in workflows for key, node in read_nodes(item).items()}
        yield from reports.list_new(nodes)
        time.sleep(1.0)
        workflows = retry_until_available(lambda: find_workflows(cluster, run))
    if stage and not readers.threads:
        pods = " or ".join(sorted(chosen))
        remedy = f"has no pod in {run} ({pods}): it has not run, or its pods are deleted by now"
        raise UserError("stage", stage, remedy)


@dataclass
class PodReaders:
    """Threads that read the logs of a run's pods, one for each.

    Attributes:
        cluster: where the run is.
        run: its name.
        chosen: names of pods, as `get_pod_stage` gives them; empty: all.
        follow: read on until the pod ends.
        begin: Unix seconds; older pods are not read. The pods of all workflows of a run are listed
            together, by the run's label.
        lines: (stage, line) of what was read.
        threads: pod → its thread.
    """

    cluster: Connection
    run: str
    chosen: set[str]
    follow: bool
    begin: float = 0.0
    lines: SimpleQueue[tuple[str, str]] = field(default_factory=SimpleQueue)
    threads: dict[str, threading.Thread] = field(default_factory=dict)

    def start_new(self) -> None:
        """Start to read the pods whose program has started since the last call."""
        for pod in _list_started_pods(self.cluster, self.run):
            name = get_pod_stage(pod)
            is_chosen = not self.chosen or name in self.chosen
            is_new = pod.metadata.creation_timestamp.timestamp() >= self.begin
            if not (is_chosen and is_new) or pod.metadata.uid in self.threads:
                continue
            thread = threading.Thread(
                target=follow_pod,
                args=(self.cluster, pod, name, self.follow, self.lines),
                daemon=True,
            )
            self.threads[pod.metadata.uid] = thread
            thread.start()
            if not self.follow:
                # One pod after the other, so that their lines do not mix.
                thread.join()

    def join(self) -> None:
        """Wait until the logs of all pods are read."""
        for thread in self.threads.values():
            thread.join()


def find_pod_names(
    workflows: Sequence[JsonMapping], stage: str, started: Collection[str]
) -> set[str]:
    """Return the names, as `get_pod_stage` gives them, of the pods that run a stage: its own, and
    those of iterations, which run it among others. The latter are named on standard error.

    Args:
        workflows: of the run.
        stage: its name.
        started: the names of the run's pods. Those of a JobSet are named by the stage, whatever the
            call is named that applies it.

    Raises:
        UserError: no workflow has such a stage.
    """
    stages = set(started)
    shared: set[str] = set()
    for workflow in workflows:
        for template in effective_spec(workflow).get("templates", ()):
            stages.update(call.get("name", "") for call in list_calls(template))
        stages.update(get_stage_name(node) for node in read_nodes(workflow).values())
        plan = find_plan(workflow)
        loop = plan.loop if plan else None
        if loop and loop.pod:
            stages.update(loop.pod_stages)
            if stage in loop.pod_stages:
                shared.add(loop.pod.template)
    # A workflow of one pod, drawn by hand, names no stages before it runs.
    if stages and stage not in stages:
        raise UserError("stage", stage, suggest_name(stage, sorted(stages)))
    if shared:
        names = ", ".join(sorted(shared))
        line = f"note: {stage} runs among others in the pod {names}, whose whole log this is"
        print_diagnostic(line, 0)
    return {stage} | shared


def _list_started_pods(cluster: Connection, run: str) -> list[Any]:
    """List the pods of a run whose program has started, oldest first."""
    pods = [
        pod
        for pod in retry_until_available(lambda: cluster.list_pods(f"{RUN_LABEL}={run}"))
        if any(status.state.running or status.state.terminated for status in _list_mains(pod))
    ]
    return sorted(pods, key=lambda pod: pod.metadata.creation_timestamp)


def _drain(lines: SimpleQueue[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the lines that were read, without those that Argo's executor adds to a pod's log."""
    while not lines.empty():
        name, line = lines.get()
        if " argo=true" not in line and not re.fullmatch(r"Error: exit status \d+", line):
            yield name, line


def get_pod_stage(pod: Any) -> str:
    """Return the name of a pod's stage in the graph, without the number of the attempt: for a pod of
    Kubernetes what `runs.stages.get_stage_name` is for a node.
    """
    name = (pod.metadata.annotations or {}).get(NODE_NAME, pod.metadata.name)
    return parse_stage_name(str(name))


def _list_mains(pod: Any) -> Sequence[Any]:
    """List the statuses of a pod's containers without those that Argo adds."""
    statuses = pod.status.container_statuses or ()
    return [status for status in statuses if status.name not in ("wait", "init")]


def follow_pod(
    cluster: Connection, pod: Any, name: str, follow: bool, lines: SimpleQueue[tuple[str, str]]
) -> None:
    """Put (`name`, line) into `lines` for all that the pod's main container prints.

    It runs on a thread of its own, and is given its arguments by position: by `PodReaders`, and for
    the pods of a job by `cluster/launch.py: FollowedJob`.
    """
    from urllib3.exceptions import HTTPError

    try:
        stream = cluster.core.read_namespaced_pod_log(
            pod.metadata.name,
            cluster.namespace,
            container=_list_mains(pod)[0].name,
            follow=follow,
            _preload_content=False,
        )
    except (UserError, Retryable) as error:
        # A pod that was deleted meanwhile has no log; that is no news.
        if not isinstance(error, ApiRefusal) or error.status != 404:
            lines.put((name, f"(no log: {error})"))
        return
    incomplete = b""
    try:
        for chunk in stream.stream():
            *complete, incomplete = (incomplete + chunk).split(b"\n")
            for line in complete:
                lines.put((name, line.decode(errors="replace")))
    except HTTPError as error:
        # The run itself goes on.
        note = (
            f"(the log was cut off here: {type(error).__name__};"
            " `tuneloop cluster logs` prints all)"
        )
        lines.put((name, note))
    if incomplete:
        lines.put((name, incomplete.decode(errors="replace")))
