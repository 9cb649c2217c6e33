"""Where the queue of a group is kept: in a Lease of Kubernetes or in the store, as a URL says.

A Lease (coordination.k8s.io/v1) needs no database, and `kubectl get leases` shows it. Its
``holderIdentity`` is the holder's ticket and its ``leaseDurationSeconds`` the patience.
``acquireTime``, ``renewTime`` and ``leaseTransitions`` are for people, and one annotation has the
rest. The API server refuses a write over another ``resourceVersion`` (compare-and-swap). The Lease
is deleted with the last request, and by Kubernetes' garbage collector with the last workflow of its
runs, which own it. Which runs were served before is forgotten then.

The numbers of leases go on all the same: a new Lease counts from its ``resourceVersion``. That
grows by at least one with every write to any Lease, and granting a lease is one write. Kubernetes
promises this since 1.35 (KEP-5504); it was true of etcd before.

Every change is a compare-and-swap: it reads a queue, and writes it if nobody has in between.

A further kind of storage is a `QueueStorage` (`sharing/leases.py`), a branch of `open_lease_group`,
and a release for runs that have ended: `cli/execute.py` releases stored leases, `cluster/submit.py`
those of Kubernetes. The tests are `tests/extensions/sharing/test_lease.py` of a Lease, and
`tests/unit/sharing/test_turns.py` of the store.
"""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime

from tuneloop.core.errors import Corrupt, Unavailable, UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.store import Conflict, Store
from tuneloop.kube.connection import (
    OWNER,
    ApiRefusal,
    Connection,
    Unreachable,
    connect_to_cluster,
    ignore_refusals,
)
from tuneloop.sharing.lease_queue import POLICIES, LeaseQueue, Policy
from tuneloop.sharing.leases import LeaseGroup

LEASES = ("coordination.k8s.io", "v1", "leases")
PREFIX = "tuneloop-lease-"
ANNOTATION = "tuneloop.dev/lease"
"""The annotation of a Lease that has the `LeaseQueue` as JSON."""
LABEL = "tuneloop.dev/lease-group"
"""The label of a Lease with the name of its group; `read_groups` lists Leases by it."""
OWNER_VARIABLES = ("TUNELOOP_OWNER_NAME", "TUNELOOP_OWNER_UID")
"""Environment of a run's sidecar: name and UID of the Workflow that the Lease shall not outlive.
`extensions/sharing/lease_sidecar.py` sets both.
"""

KEY = "queue.json"
"""The object of a group, below the URL of the group."""
STORED_LEASES = ".leases"
"""The folder of all groups, below a store: `extensions/sharing/pod.py`, `cli/execute.py`, the
gateway (`extensions/gateway/sessions.py`) and `tuneloop leases` build URLs of groups with it.
"""
_REQUEST_TIMEOUT_S = 10
"""Seconds for one request to the API server: a beat must not wait for a lost one, or the lease
ends. At the default patience of 30 s a beat is valid for 20 s (`sharing/leases.py: SAFE`).
"""


class KubernetesLease:
    """The queue of a group as a Lease; it is a `QueueStorage`.

    The account of sidecars may get, create, update and delete Leases, and nothing else
    (``manifests/namespaced/accounts.yaml``): a call of another kind, such as list or patch, needs
    the right there.
    """

    def __init__(self, cluster: Connection, group: str) -> None:
        self.cluster = cluster
        self.group = group
        self.name = f"{PREFIX}{group}"
        api_group, version, plural = LEASES
        self._resource = (api_group, version, cluster.namespace, plural)

    def read(self) -> tuple[LeaseQueue, JsonObject | None]:
        """Read the queue, and the Lease that has it. Raises as `QueueStorage.read`."""
        with self._translate_refusals():
            lease = self.cluster.custom.get_namespaced_custom_object(
                *self._resource,
                self.name,
                _request_timeout=_REQUEST_TIMEOUT_S,
            )
            return parse_lease(lease), lease
        # Before the first request, and after the last one, there is no Lease.
        return LeaseQueue(), None

    def write(self, queue: LeaseQueue, previous: JsonObject | None) -> None:
        """Replace the Lease `previous` by one with `queue`. Raises as `QueueStorage.write`."""
        api = self.cluster.custom
        body = build_lease(queue, self.name, self.group, previous)
        with self._translate_refusals(is_write=True, existed=previous is not None):
            if previous is None:
                api.create_namespaced_custom_object(
                    *self._resource,
                    body,
                    _request_timeout=_REQUEST_TIMEOUT_S,
                )
            elif queue.is_idle:
                # Only the Lease that was read is deleted, as only that one is replaced.
                metadata = previous["metadata"]
                preconditions = {key: metadata[key] for key in ("uid", "resourceVersion")}
                api.delete_namespaced_custom_object(
                    *self._resource,
                    self.name,
                    body={"preconditions": preconditions},
                    _request_timeout=_REQUEST_TIMEOUT_S,
                )
            else:
                api.replace_namespaced_custom_object(
                    *self._resource,
                    self.name,
                    body,
                    _request_timeout=_REQUEST_TIMEOUT_S,
                )

    @contextmanager
    def _translate_refusals(self, is_write: bool = False, existed: bool = False) -> Iterator[None]:
        """Translate what the API server refuses.

        A 404 means, for a read, that there is no Lease. For a write to one that existed it means
        that another run deleted it, and else that the namespace is missing.
        """
        try:
            yield
        except ApiRefusal as error:
            if error.status == 409 or (error.status == 404 and existed):
                raise Conflict(f"{self.name} was changed by another") from error
            if is_write or error.status != 404:
                raise
        except Unreachable as error:
            # The server answered before: a lease outlasts a short outage.
            raise Unavailable(str(error)) from error


def read_groups(cluster: Connection) -> dict[str, LeaseQueue]:
    """Return group → its queue, for all groups of the namespace."""
    queues: dict[str, LeaseQueue] = {}
    # The label tells them from Leases of other programs.
    for lease in cluster.list(*LEASES, selector=LABEL):
        group = lease["metadata"]["labels"][LABEL]
        queues[group] = parse_lease(lease)
    return queues


def release_leases(cluster: Connection, run: str) -> None:
    """Release the leases and requests of a run that is known to have ended.

    Other runs then do not wait for them to expire.
    """
    queues: dict[str, LeaseQueue] = {}
    # An account that may not list Leases cannot release them: the others wait for `patience`.
    with ignore_refusals(403):
        queues = read_groups(cluster)
    for group, queue in queues.items():
        if queue.release_run(run) != queue:
            storage = KubernetesLease(cluster, group)
            LeaseGroup(storage, group, who=run).release_all()


def parse_lease(lease: JsonObject) -> LeaseQueue:
    """Parse the queue that a Lease holds; before a first grant its number is the resourceVersion.

    Raises:
        Corrupt: the Lease holds no queue.
    """
    metadata = lease["metadata"]
    try:
        queue = LeaseQueue.model_validate_json(metadata["annotations"][ANNOTATION])
        resource_version = int(metadata["resourceVersion"])
    except (KeyError, ValueError) as error:
        raise Corrupt(
            "lease",
            metadata["name"],
            f"has no queue of a group (annotation {ANNOTATION}); delete it",
        ) from error
    if queue.number:
        return queue
    # Higher than all numbers of an earlier Lease of this name: fencing tokens never go back.
    return queue.model_copy(update={"number": resource_version})


def build_lease(
    queue: LeaseQueue,
    name: str,
    group: str,
    previous: JsonObject | None,
) -> JsonObject:
    """Build the Lease that holds `queue`, to replace `previous`."""
    metadata: JsonObject = {
        "name": name,
        "labels": {
            LABEL: group,
            "app.kubernetes.io/part-of": "tuneloop",
        },
        "annotations": {ANNOTATION: queue.model_dump_json()},
        "ownerReferences": _list_owners(previous),
    }
    if previous:
        # The API server compares it with that of the Lease it has.
        metadata["resourceVersion"] = previous["metadata"]["resourceVersion"]
    return {
        "apiVersion": "/".join(LEASES[:2]),
        "kind": "Lease",
        "metadata": metadata,
        "spec": _build_spec(queue, previous.get("spec", {}) if previous else {}),
    }


def _build_spec(queue: LeaseQueue, previous: JsonObject) -> JsonObject:
    """Build the fields of the Lease that other tools show, to replace `previous` ones.

    `parse_lease` reads none of them: the annotation alone is the queue.
    """
    timestamp = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    transitions = previous.get("leaseTransitions", 0)
    spec: JsonObject = {
        "leaseTransitions": transitions,
        "leaseDurationSeconds": math.ceil(queue.patience),
    }
    if queue.holder is None:
        return spec
    spec["holderIdentity"] = queue.holder.ticket
    spec["renewTime"] = timestamp
    if queue.holder.ticket == previous.get("holderIdentity"):
        spec["acquireTime"] = previous["acquireTime"]
    else:
        spec["acquireTime"] = timestamp
        spec["leaseTransitions"] = transitions + 1
    return spec


def _list_owners(previous: JsonObject | None) -> list[JsonObject]:
    """Return the owners of the Lease `previous`, and the Workflow of this process, if it has one."""
    metadata = previous["metadata"] if previous else {}
    # The garbage collector deletes the Lease after the last of its owners.
    owners: list[JsonObject] = list(metadata.get("ownerReferences", []))
    name, uid = map(os.environ.get, OWNER_VARIABLES)
    if uid and all(owner["uid"] != uid for owner in owners):
        owners.append(OWNER | {"name": name, "uid": uid})
    return owners


class StoredLease:
    """The queue of a group as an object in the store; it is a `QueueStorage`.

    It is for runs of one machine, or of clusters that share nothing else. When the last run has
    left, the object stays, empty, so that the numbers of its leases go on.
    """

    def __init__(self, url: str) -> None:
        self.store = Store(url)

    def read(self) -> tuple[LeaseQueue, bytes | None]:
        """Read the queue, and its bytes. Raises as `QueueStorage.read`, and Corrupt."""
        data = self.store.get(KEY)
        if data is None:
            return LeaseQueue(), None
        try:
            return LeaseQueue.model_validate_json(data), data
        except ValueError as error:
            raise Corrupt(
                "lease",
                f"{self.store.url}/{KEY}",
                "has no queue of a group; delete it",
            ) from error

    def write(self, queue: LeaseQueue, previous: bytes | None) -> None:
        """Replace the bytes `previous` by `queue`. Raises as `QueueStorage.write`."""
        self.store.swap(KEY, previous, queue.model_dump_json().encode())


def release_stored_leases(url: str, run: str) -> None:
    """Release the leases and requests that an ended run left in all groups below `url`."""
    for key in Store(url).keys(""):
        group, _, name = key.rpartition("/")
        if group and name == KEY:
            storage = StoredLease(f"{url}/{group}")
            LeaseGroup(storage, group, who=run).release_all()


def open_lease_group(
    url: str,
    *,
    who: str,
    policy: Policy = "fifo",
    patience: float = 30.0,
) -> LeaseGroup:
    """Open the group at `url` for the run `who`.

    Args:
        url: ``lease://namespace/group``, or a URL of the store whose last part is the group's name.
        who: the run that will ask for the lease.
        policy, patience: as in `LeaseGroup`.

    Raises:
        UserError: the URL is of another kind, the policy is unknown, or the patience is below
            1 second, which is too short to renew within.
    """
    if policy not in POLICIES:
        raise UserError("policy", policy, f"use one of {', '.join(POLICIES)}")
    # Within less, a busy machine would look dead to the others.
    if patience < 1:
        remedy = "seconds, at least 1: a holder shows six times within it that it lives"
        raise UserError("patience", patience, remedy)
    storage: KubernetesLease | StoredLease
    if url.startswith("lease://"):
        namespace, _, group = url.removeprefix("lease://").partition("/")
        if not namespace or not group or "/" in group:
            raise UserError("lease", url, "write lease://namespace/group")
        storage = KubernetesLease(connect_to_cluster(namespace), group)
    else:
        group = url.rstrip("/").rpartition("/")[2]
        storage = StoredLease(url)
    return LeaseGroup(
        storage,
        group,
        who=who,
        policy=policy,
        patience=patience,
    )
