"""Explain why pods of a run do not run yet: their queue, their node, their image, their Ray cluster.

What the account may not read is left out, or said in the reason: a namespace's admin may have no
right to Kueue's objects, and can still follow a run.

Of the kinds of jobs (`cluster/launch.py: KINDS`) it knows the JobSet and the RayJob. Tests:
`tests/unit/cluster/test_following.py` and `test_ray_jobs.py`.
"""

import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuneloop.cluster.kueue import QueueState, read_queue_state
from tuneloop.cluster.problems import ABSENT, UNSEEN, find_object
from tuneloop.cluster.run_workflows import DONE
from tuneloop.core.errors import Retryable
from tuneloop.core.json_types import JsonObject
from tuneloop.kube.connection import Connection, Unreachable
from tuneloop.local.journal import Node
from tuneloop.runs.stages import find_job_stage, parse_stage_name
from tuneloop.workflow.settings import QUEUE_LABEL, RUN_LABEL

NODE_NAME = "workflows.argoproj.io/node-name"
"""Annotation of a pod: its node in the graph. Argo writes it; `argo/jobset.py` writes it for the
pods of a JobSet, with the stage alone."""
RAYJOBS = ("ray.io", "v1", "rayjobs")
JOBSETS = ("jobset.x-k8s.io", "v1alpha2", "jobsets")
NO_ROOM = "Insufficient"
"""In the scheduler's message: nodes have not enough of a resource left."""
REPORT_S = 30.0
"""Seconds between two looks at what pods wait for, while logs are followed."""


def explain_waiting(cluster: Connection, run: str, nodes: Mapping[str, Node]) -> dict[str, str]:
    """Return node, or stage of several pods → why a pod of it does not run yet."""
    selector = f"{RUN_LABEL}={run}"
    pods = find_object(cluster.list_pods, selector)
    pending = [pod for pod in _as_items(pods) if pod.status.phase == "Pending"]
    suspended: list[JsonObject] = []
    if any(node.phase not in DONE and find_job_stage(node, nodes) for node in nodes.values()):
        # Kueue admits a job as a whole; before that it has no pods.
        jobs = find_object(cluster.list, *JOBSETS, selector=selector)
        suspended = [job for job in _as_items(jobs) if job["spec"].get("suspend")]
    queues = QueueState()
    if suspended or any(pod.spec.scheduling_gates for pod in pending):
        queues = read_queue_state(cluster)
    reasons: dict[str, str] = {}
    for pod in pending:
        annotations = pod.metadata.annotations or {}
        node_name = annotations.get(NODE_NAME, pod.metadata.name)
        reasons[node_name] = _explain_pod(pod, queues)
    if any(NO_ROOM in reason for reason in reasons.values()):
        running = _describe_running_pods(cluster, run)
        for node_name, reason in reasons.items():
            if NO_ROOM in reason:
                reasons[node_name] = reason + running
    for job in suspended:
        metadata = job["metadata"]
        pod_template = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        annotations = pod_template["metadata"].get("annotations", {})
        node_name = annotations.get(NODE_NAME, metadata["name"])
        reasons[node_name] = queues.explain(_read_queue(metadata["labels"]), metadata["name"])
    return reasons | _explain_ray_jobs(cluster, selector)


@dataclass
class WaitReports:
    """Reports what the pods of a run wait for, while its logs are followed: each reason once.

    Attributes:
        cluster: where the run is.
        run: its name.
        next_at: when pods are looked at next, by the monotonic clock. Pods that wait for less than
            `REPORT_S` are not worth a line.
        reported: node → its newest reason.
    """

    cluster: Connection
    run: str
    next_at: float = field(default_factory=lambda: time.monotonic() + REPORT_S)
    reported: dict[str, str] = field(default_factory=dict)

    def list_new(self, nodes: Mapping[str, Node]) -> list[tuple[str, str]]:
        """List (stage, line) of the reasons that are new; none before it is time."""
        if time.monotonic() < self.next_at:
            return []
        self.next_at = time.monotonic() + REPORT_S
        reasons: dict[str, str] = {}
        # The API server may be away for a while, which the caller bears.
        with contextlib.suppress(Retryable, Unreachable):
            reasons = explain_waiting(self.cluster, self.run, nodes)
        lines: list[tuple[str, str]] = []
        for node_name, reason in reasons.items():
            if self.reported.get(node_name) != reason:
                lines.append((parse_stage_name(node_name), f"(waits: {reason})"))
        self.reported |= reasons
        return lines


def _as_items(answer: Any) -> Sequence[Any]:
    """Return the items of a list that `find_object` returned; none where it is not seen."""
    return () if answer in (ABSENT, UNSEEN) else answer


def _describe_running_pods(cluster: Connection, run: str) -> str:
    """Describe which pods of other runs of this namespace hold room on nodes; empty: none."""
    pods = find_object(cluster.list_pods, f"{RUN_LABEL},{RUN_LABEL}!={run}")
    names = sorted(pod.metadata.name for pod in _as_items(pods) if pod.status.phase == "Running")
    return f"; of other runs here, {', '.join(names)} run" if names else ""


def _explain_ray_jobs(cluster: Connection, selector: str) -> dict[str, str]:
    """Return RayJob that does not run yet → its Ray cluster, and what each pod of it waits for."""
    jobs = find_object(cluster.list, *RAYJOBS, selector=selector)
    reasons: dict[str, str] = {}
    for job in _as_items(jobs):
        metadata = job["metadata"]
        status = job.get("status") or {}
        if job["spec"].get("suspend"):
            queues = read_queue_state(cluster)
            reason = queues.explain(_read_queue(metadata["labels"]), metadata["name"])
        elif status.get("jobDeploymentStatus") == "Failed":
            continue
        elif status.get("jobStatus", "") not in ("", "PENDING"):
            # Its program runs, or has ended.
            continue
        else:
            reason = _describe_ray_cluster(cluster, status.get("rayClusterName", ""))
        reasons[metadata["name"]] = reason
    return reasons


def _describe_ray_cluster(cluster: Connection, name: str) -> str:
    """Describe a Ray cluster that starts: the state of each of its pods."""
    if not name:
        return "RayCluster is not made yet"
    states: list[str] = []
    for pod in _as_items(find_object(cluster.list_pods, f"ray.io/cluster={name}")):
        phase = pod.status.phase
        state = _explain_pod(pod, QueueState()) if phase == "Pending" else phase.lower()
        states.append(f"{pod.metadata.labels['ray.io/node-type']} {state}")
    return "; ".join([f"RayCluster {name}", *sorted(states)])


def _explain_pod(pod: Any, queues: QueueState) -> str:
    """Explain why a pending pod does not run yet.

    `ui/static/run.js` finds the words ``starting`` and ``admitted`` (`cluster/kueue.py:
    QueueState`) in this text: stages whose reason has neither are shown as waiting.
    """
    if pod.spec.scheduling_gates:
        return queues.explain(_read_queue(pod.metadata.labels), pod.metadata.name)
    statuses = list(pod.status.init_container_statuses or ())
    statuses += pod.status.container_statuses or ()
    for status in statuses:
        waiting = status.state.waiting
        # Every container says these two for a moment.
        if waiting and waiting.reason not in ("PodInitializing", "ContainerCreating"):
            return " ".join(f"{waiting.reason}: {waiting.message or ''}".split())
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            devices = ", with the devices of its claim" if pod.spec.resource_claims else ""
            return f"not scheduled{devices}: {condition.message}"
    return "starting"


def _read_queue(labels: Mapping[str, str]) -> str:
    """Read the LocalQueue of a pod or job from its labels."""
    return labels.get(QUEUE_LABEL, "")
