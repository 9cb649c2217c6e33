"""Follow a run on a cluster: its nodes, under the local executor's names, why pods wait, and their logs."""

import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from queue import SimpleQueue
from typing import Any

from tuneloop.argo.claims import TAKE
from tuneloop.cluster import reservations
from tuneloop.cluster.problems import ABSENT, UNSEEN, find_object
from tuneloop.cluster.run_workflows import DONE, find_workflows, get_workflow_phase
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.kube.connection import Connection, list_status_nodes, retry_until_available
from tuneloop.local.journal import Node
from tuneloop.runs.stages import find_job_stage
from tuneloop.workflow.settings import QUEUE_LABEL, RUN_LABEL

NODE_NAME = "workflows.argoproj.io/node-name"
WORKLOADS = ("kueue.x-k8s.io", "v1beta2", "workloads")
RAYJOBS = ("ray.io", "v1", "rayjobs")
JOBSETS = ("jobset.x-k8s.io", "v1alpha2", "jobsets")


@dataclass(frozen=True)
class Status:
    """A run at one moment.

    Attributes:
        phase: of the newest workflow: ``Pending Running Succeeded Failed Error``.
        waiting: node, or stage of several pods → why its pod does not run yet.
        accelerator_seconds: GPU seconds requested so far, over all stages.
        claims: claim that the run reserves → all runs that reserve it, and its devices.
        iterations: the maximum number of iterations that was requested.
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


def read_status(cluster: Connection, run: str) -> Status:
    """Read the status of a run from the cluster. Raises UserError where the cluster has no such run."""
    found = find_workflows(cluster, run)
    merged = {key: node for workflow in found for key, node in read_nodes(workflow).items()}
    asked = {
        each["name"]: each.get("value")
        for each in found[-1]["spec"].get("arguments", {}).get("parameters", ())
    }
    spent = [
        item for w in found for item in w.get("status", {}).get("resourcesDuration", {}).items()
    ]
    return Status(
        run=run,
        phase=get_workflow_phase(found[-1]),
        message=str(found[-1].get("status", {}).get("message", "")),
        workflows=[str(w["metadata"]["name"]) for w in found],
        nodes=merged,
        waiting=_waiting(cluster, run, merged),
        accelerator_seconds=float(sum(seconds for name, seconds in spent if name.endswith("/gpu"))),
        claims=_claims(cluster, run)
        if any(node.template == TAKE for node in merged.values())
        else {},
        iterations=int(asked["iterations"]) if asked.get("iterations") else None,
    )


def read_nodes(workflow: JsonMapping) -> dict[str, Node]:
    """Read the nodes of a workflow's status in the order they started."""
    made = [_node(item) for item in list_status_nodes(workflow)]
    over = get_workflow_phase(workflow) in DONE
    ended = _seconds(workflow.get("status", {}).get("finishedAt"))
    for node in made:
        if over and node.phase in ("Running", "Pending"):  # not updated for a stopped workflow
            node.phase, node.message = "Failed", node.message or "ended with the workflow"
        if (
            node.phase in DONE and node.started and not node.finished
        ):  # Argo 3.7 may write no time for a deleted pod
            later = (
                each.started
                for each in made
                if each.template == node.template and each.started > node.started
            )
            node.finished = min(later, default=ended or time.time())
    return {node.id: node for node in sorted(made, key=lambda n: (n.started, n.name))}


def _node(item: JsonMapping) -> Node:
    outputs = item.get("outputs", {})
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
        started=_seconds(item.get("startedAt")),
        finished=_seconds(item.get("finishedAt")),
        exit_code=None if (code := outputs.get("exitCode")) is None else int(code),
        progress=item.get("progress", ""),
        inputs=_values(item.get("inputs", {})),
        outputs=_values(outputs),
    )


def _values(io: JsonMapping) -> dict[str, str]:
    return {p["name"]: str(p["value"]) for p in io.get("parameters", ()) if "value" in p}


def _seconds(stamp: str | None) -> float:
    return datetime.fromisoformat(stamp).timestamp() if stamp else 0.0


def _waiting(cluster: Connection, run: str, nodes: Mapping[str, Node]) -> dict[str, str]:
    """Return node, or stage of several pods → why a pod of it does not run yet."""
    selector = f"{RUN_LABEL}={run}"
    pending = [pod for pod in cluster.list_pods(selector) if pod.status.phase == "Pending"]
    several = any(node.phase not in DONE and find_job_stage(node, nodes) for node in nodes.values())
    jobs = cluster.list(*JOBSETS, selector=selector) if several else []
    held = [
        job for job in jobs if job["spec"].get("suspend")
    ]  # Kueue admits the whole job, which has no pods before
    queued = (
        _workloads(cluster) if held or any(pod.spec.scheduling_gates for pod in pending) else {}
    )
    told = {
        (pod.metadata.annotations or {}).get(NODE_NAME, pod.metadata.name): _why(pod, queued)
        for pod in pending
    }
    for job in held:
        about = job["metadata"]
        pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["metadata"]
        node = pod.get("annotations", {}).get(NODE_NAME, about["name"])
        told[node] = _why_queued(about["labels"], about["name"], queued)
    return told | _describe_ray_clusters(cluster, selector)


def _describe_ray_clusters(cluster: Connection, selector: str) -> dict[str, str]:
    """Return RayJob that does not run yet → its Ray cluster, and what each pod of the cluster waits for."""
    found = find_object(cluster.list, *RAYJOBS, selector=selector)
    told: dict[str, str] = {}
    for job in () if found in (ABSENT, UNSEEN) else found:
        about = job["metadata"]
        status = job.get("status") or {}
        if job["spec"].get("suspend"):
            told[about["name"]] = _why_queued(about["labels"], about["name"], _workloads(cluster))
        elif (
            status.get("jobStatus", "") in ("", "PENDING")
            and status.get("jobDeploymentStatus") != "Failed"
        ):
            name = status.get("rayClusterName", "")
            pods = cluster.list_pods(f"ray.io/cluster={name}") if name else ()
            states = [(p.metadata.labels["ray.io/node-type"], p, p.status.phase) for p in pods]
            parts = [
                f"{group} {_why(p, {}) if phase == 'Pending' else phase.lower()}"
                for group, p, phase in states
            ]
            told[about["name"]] = "; ".join(
                [f"RayCluster {name or 'is not made yet'}", *sorted(parts)]
            )
    return told


def refresh_claims(cluster: Connection) -> dict[str, str]:
    """Release the reservations of ended runs, and return claim → the runs that reserve it, and its devices. Raises
    UserError where the cluster has no claims, or the account may not change them."""
    reservations.release_ended_runs(cluster)
    return _claims(cluster)


def _claims(cluster: Connection, run: str | None = None) -> dict[str, str]:
    """Return claim → its devices, and the runs that reserve it."""
    told = {}
    for claim in reservations.list_claims(cluster):
        if run in (None, *(runs := reservations.list_claim_runs(claim))):
            given = (
                claim.get("status", {}).get("allocation", {}).get("devices", {}).get("results", ())
            )
            devices = (
                ", ".join(sorted(item["device"] for item in given))
                or "no device until a pod is scheduled"
            )
            has = devices if claim["kind"] == "ResourceClaim" else "a claim for each pod"
            told[claim["metadata"]["name"]] = f"{has}; runs {', '.join(runs)}"
    return told


def _why(pod: Any, queued: Mapping[str, str]) -> str:
    if pod.spec.scheduling_gates:
        return _why_queued(pod.metadata.labels, pod.metadata.name, queued)
    for container in [
        *(pod.status.init_container_statuses or ()),
        *(pod.status.container_statuses or ()),
    ]:
        held = container.state.waiting
        if held and held.reason not in ("PodInitializing", "ContainerCreating"):
            return " ".join(f"{held.reason}: {held.message or ''}".split())
    for condition in pod.status.conditions or ():
        if condition.type == "PodScheduled" and condition.status == "False":
            devices = ", with the devices of its claim" if pod.spec.resource_claims else ""
            return f"not scheduled{devices}: {condition.message}"
    return "starting"


def _why_queued(labels: Mapping[str, str], name: str, queued: Mapping[str, str]) -> str:
    return f"queue {labels.get(QUEUE_LABEL, '')}: {queued.get(name, 'not seen by Kueue yet; is the queue there?')}"


def _workloads(cluster: Connection) -> dict[str, str]:
    """Return the name of a pod or job → Kueue's message about it."""
    said = {}
    for workload in cluster.list(*WORKLOADS):
        conditions = {c["type"]: c for c in workload.get("status", {}).get("conditions", ())}
        reserved = conditions.get("QuotaReserved", {})
        text = reserved.get("message") or "waiting for its turn"
        for owner in workload["metadata"].get("ownerReferences", ()):
            said[owner["name"]] = "admitted" if reserved.get("status") == "True" else text
    return said


def read_logs(
    cluster: Connection,
    run: str,
    *,
    stage: str | None = None,
    follow: bool = False,
    since: str | None = None,
) -> Iterator[tuple[str, str]]:
    """Yield (stage, line) of the logs of a run's pods that still exist; with `since`, the name of a workflow, only for
    its pods and later ones. Raises UserError if there is no such run, or no pod of `stage`."""
    lines: SimpleQueue[tuple[str, str]] = SimpleQueue()
    read: dict[str, threading.Thread] = {}
    found = find_workflows(cluster, run)
    created = [w["metadata"]["creationTimestamp"] for w in found if w["metadata"]["name"] == since]
    begun = _seconds(created[0]) if created else 0.0  # a job's pods do not name their workflow
    while True:
        over = all(get_workflow_phase(w) in DONE for w in found) or not follow
        pods = retry_until_available(lambda: cluster.list_pods(f"{RUN_LABEL}={run}"))
        there = [
            pod for pod in pods if any(s.state.running or s.state.terminated for s in _mains(pod))
        ]
        for pod in sorted(there, key=lambda pod: pod.metadata.creation_timestamp):
            name = get_stage_name(pod)
            mine = stage in (None, name) and pod.metadata.creation_timestamp.timestamp() >= begun
            if mine and pod.metadata.uid not in read:
                reader = threading.Thread(
                    target=follow_pod, args=(cluster, pod, name, follow, lines), daemon=True
                )
                read[pod.metadata.uid] = reader
                reader.start()
                if not follow:
                    reader.join()  # one pod after the other
        if over:
            for reader in read.values():
                reader.join()
        while not lines.empty():
            name, line = lines.get()
            if " argo=true" not in line and not re.fullmatch(
                r"Error: exit status \d+", line
            ):  # Argo's executor
                yield name, line
        if over:
            if stage and not read:
                raise UserError(
                    "stage",
                    stage,
                    f"has no pod in {run}: it has not run, or its pods are deleted by now",
                )
            return
        time.sleep(1.0)
        found = retry_until_available(lambda: find_workflows(cluster, run))


def get_stage_name(pod: Any) -> str:
    """Return the name of a pod's stage in the graph, without the number of the attempt."""
    name = (pod.metadata.annotations or {}).get(NODE_NAME, pod.metadata.name)
    return str(name).rsplit(".", 1)[-1].split("(")[0]


def _mains(pod: Any) -> list[Any]:
    return [s for s in pod.status.container_statuses or () if s.name not in ("wait", "init")]


def follow_pod(
    cluster: Connection, pod: Any, name: str, follow: bool, lines: SimpleQueue[tuple[str, str]]
) -> None:
    """Put (`name`, line) into `lines` for all that the pod's main container prints."""
    from urllib3.exceptions import HTTPError

    container = _mains(pod)[0].name
    try:
        stream = cluster.core.read_namespaced_pod_log(
            pod.metadata.name,
            cluster.namespace,
            container=container,
            follow=follow,
            _preload_content=False,
        )
    except (UserError, Retryable) as error:
        if getattr(error, "status", None) != 404:  # it was deleted meanwhile
            lines.put((name, f"(no log: {error})"))
        return
    rest = b""
    try:
        for chunk in stream.stream():
            *whole, rest = (rest + chunk).split(b"\n")
            for line in whole:
                lines.put((name, line.decode(errors="replace")))
    except HTTPError as error:  # the run itself goes on
        lines.put(
            (
                name,
                f"(the log was cut off here: {type(error).__name__}; `tuneloop cluster logs` prints all)",
            )
        )
    if rest:
        lines.put((name, rest.decode(errors="replace")))
