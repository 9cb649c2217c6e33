"""What a cluster's Kueue says: the version of its API, and what it admitted or keeps waiting.

Whether its queues have quota for a run is `cluster/queue_problems.py`. Tests:
`tests/unit/cluster/test_queue_problems.py` and `test_following.py`.
"""

from dataclasses import dataclass, field

from tuneloop.cluster.problems import ABSENT, UNSEEN, find_object
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kube.connection import ApiRefusal, Connection
from tuneloop.workflow.pod_settings import OPENSHIFT_POD, RESTRICTED_CONTAINER
from tuneloop.workflow.settings import QUEUE_LABEL

GROUP = "kueue.x-k8s.io"
VERSIONS = ("v1beta2", "v1beta1")
"""The versions that can be read, newest first. What is read of them is the same but for the name of
a cohort's field (`cluster/queue_problems.py: _read_cohort`)."""
NAMED_HOLDERS = 5
"""The most pods or jobs that are named as holders of a queue's quota."""

KueueApi = tuple[str, str]
"""Group and version."""


def find_kueue(cluster: Connection) -> KueueApi | None:
    """Return the newest version of Kueue's API that a cluster serves; None without Kueue."""
    for version in VERSIONS:
        # Every account may ask which versions are served. Where one may not, the newest is tried.
        if find_object(cluster.custom.get_api_resources, GROUP, version) is not ABSENT:
            return GROUP, version
    return None


def list_local_queues(cluster: Connection, api: KueueApi) -> list[str]:
    """List the LocalQueues of the namespace; none where the account may not."""
    group, version = api
    list_objects = cluster.custom.list_namespaced_custom_object
    queues = find_object(list_objects, group, version, cluster.namespace, "localqueues")
    if queues in (ABSENT, UNSEEN):
        return []
    return sorted(queue["metadata"]["name"] for queue in queues["items"])


def are_pods_held(cluster: Connection, queue: str) -> bool | None:
    """Return whether Kueue holds a pod of a queue until it is admitted; None where this account
    may not ask.

    Kueue's webhook does so if its `pod` integration is on, and selects the namespace. A dry run
    creates no pod, and asks it.
    """
    pod = _build_probe(queue)
    try:
        created = find_object(
            cluster.core.create_namespaced_pod, cluster.namespace, pod, dry_run="All"
        )
    except ApiRefusal:
        # A policy of the cluster may refuse such a pod for reasons of its own.
        return None
    if created in (ABSENT, UNSEEN):
        return None
    gates = created.spec.scheduling_gates or ()
    return any(gate.name.startswith(GROUP) for gate in gates)


def _build_probe(queue: str) -> JsonObject:
    """Build a pod that the strictest namespace allows."""
    quantities = {"cpu": "1m", "memory": "1Mi"}
    container = {
        "name": "main",
        "image": "tuneloop/base",
        "securityContext": RESTRICTED_CONTAINER,
        # A ResourceQuota may ask for both.
        "resources": {"requests": quantities, "limits": quantities},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"generateName": "tuneloop-probe-", "labels": {QUEUE_LABEL: queue}},
        "spec": {
            "containers": [container],
            # It names no user: OpenShift refuses any but those of the namespace.
            "securityContext": OPENSHIFT_POD,
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
        },
    }


@dataclass
class QueueState:
    """What Kueue says about the pods and jobs of a namespace.

    Attributes:
        is_seen: whether the account may list Kueue's Workloads.
        messages: pod or job → what Kueue says about it.
        holders: LocalQueue → pods and jobs that hold quota by it.
    """

    is_seen: bool = True
    messages: dict[str, str] = field(default_factory=dict)
    holders: dict[str, list[str]] = field(default_factory=dict)

    def add(self, workload: JsonMapping) -> None:
        """Add what a Workload says about the pod or job that owns it.

        `ui/static/run.js` finds the word ``admitted`` in the message, to tell stages that start
        from those that wait.
        """
        status = workload.get("status", {})
        conditions = {item["type"]: item for item in status.get("conditions", ())}
        reservation = conditions.get("QuotaReserved", {})
        is_admitted = reservation.get("status") == "True"
        is_finished = conditions.get("Finished", {}).get("status") == "True"
        message = "waiting for its turn"
        if reservation:
            message = "admitted" if is_admitted else reservation.get("message") or message
        for owner in workload["metadata"].get("ownerReferences", ()):
            name = str(owner["name"])
            self.messages[name] = message
            if is_admitted and not is_finished:
                queue = str(workload.get("spec", {}).get("queueName", ""))
                self.holders.setdefault(queue, []).append(name)

    def explain(self, queue: str, name: str) -> str:
        """Explain what the pod or job `name` waits for in a LocalQueue."""
        if not self.is_seen:
            return (
                f"queue {queue}: why is not for this account to see: it may not list workloads.kueue.x-k8s.io,"
                " which the role tuneloop-user allows; a queue that does not exist also keeps its pods waiting"
            )
        message = self.messages.get(name)
        if message is None:
            return f"queue {queue}: not seen by Kueue yet; is the queue there?"
        holders = sorted(self.holders.get(queue, ()))
        if message == "admitted" or not holders:
            return f"queue {queue}: {message}"
        names = ", ".join(holders[:NAMED_HOLDERS])
        if len(holders) > NAMED_HOLDERS:
            names += f" and {len(holders) - NAMED_HOLDERS} more"
        return f"queue {queue}: {message}; its quota is held by {names}"


def read_queue_state(cluster: Connection) -> QueueState:
    """Read what Kueue says about the pods and jobs of a namespace."""
    api = find_kueue(cluster)
    if api is None:
        return QueueState()
    workloads = find_object(cluster.list, *api, "workloads")
    if workloads is UNSEEN:
        return QueueState(is_seen=False)
    state = QueueState()
    for workload in () if workloads is ABSENT else workloads:
        state.add(workload)
    return state
