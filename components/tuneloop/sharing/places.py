"""Where a group's document is: in a Lease of Kubernetes, or in the store; and which of them a URL names.

A Lease (coordination.k8s.io/v1) is no extra database, and `kubectl get leases` shows it. ``holderIdentity`` is the
holder's ticket, ``leaseDurationSeconds`` the patience; ``acquireTime``, ``renewTime`` and ``leaseTransitions`` are for
people; the rest is one annotation. The API server refuses a write over another ``resourceVersion`` (compare-and-swap).
The Lease is deleted with the last seat, and by Kubernetes' garbage collector with the last workflow of its runs, which
own it; who was served before is forgotten then.

The numbers of turns go on all the same: a new Lease counts from its ``resourceVersion``. That grows with every write to
any Lease (promised since Kubernetes 1.35, KEP-5504; true of etcd before), by one at least, and a turn is one write."""

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
from tuneloop.sharing.document import POLICIES, Document, Policy
from tuneloop.sharing.turns import Turns

LEASES = ("coordination.k8s.io", "v1", "leases")
PREFIX = "tuneloop-turns-"
ANNOTATION = "tuneloop.dev/turns"
LABEL = "tuneloop.dev/turns-of"
OWNER_VARIABLES = ("TUNELOOP_OWNER_NAME", "TUNELOOP_OWNER_UID")
"""Environment of a run's pod: the Workflow that the Lease shall not outlive."""

KEY = "turns.json"
STORED = ".turns"
"""Below a store: where the groups lie."""


class Lease:
    """A group's document as a Lease."""

    def __init__(self, cluster: Connection, group: str) -> None:
        self.cluster, self.group, self.name = cluster, group, f"{PREFIX}{group}"
        self._place = (*LEASES[:2], cluster.namespace, LEASES[2])

    def read(self) -> tuple[Document, JsonObject | None]:
        with self._faults():
            found = self.cluster.custom.get_namespaced_custom_object(
                *self._place, self.name, _request_timeout=10
            )
            return parse_lease(found), found
        return Document(), None

    def write(self, document: Document, seen: JsonObject | None) -> None:
        api, place = self.cluster.custom, self._place
        made = build_lease(document, self.name, self.group, seen)
        with self._faults(write=True, seen=seen is not None):
            if seen is None:
                api.create_namespaced_custom_object(*place, made, _request_timeout=10)
            elif document.idle:
                body = {
                    "preconditions": {k: seen["metadata"][k] for k in ("uid", "resourceVersion")}
                }
                api.delete_namespaced_custom_object(
                    *place, self.name, body=body, _request_timeout=10
                )
            else:
                api.replace_namespaced_custom_object(*place, self.name, made, _request_timeout=10)

    @contextmanager
    def _faults(self, write: bool = False, seen: bool = False) -> Iterator[None]:
        """Translate refusals. A 404: there is none to read; what was `seen` is gone; else the namespace is missing."""
        try:
            yield
        except ApiRefusal as error:
            if error.status == 409 or (error.status == 404 and seen):
                raise Conflict(f"{self.name} was changed by another") from error
            if write or error.status != 404:
                raise
        except Unreachable as error:  # it was there before: a turn outlasts that
            raise Unavailable(str(error)) from error


def read_groups(cluster: Connection) -> dict[str, Document]:
    """Read the document of each group of the namespace, by the group's name."""
    return {
        lease["metadata"]["labels"][LABEL]: parse_lease(lease)
        for lease in cluster.list(*LEASES, selector=LABEL)
    }


def release_leases(cluster: Connection, run: str) -> None:
    """Release the leases and requests of a run that is known to have ended, so that nobody waits for them to expire."""
    known: dict[str, Document] = {}
    with ignore_refusals(403):  # not this account's to end: others wait for `patience`
        known = read_groups(cluster)
    for group, about in known.items():
        if about.leave(run) != about:
            Turns(Lease(cluster, group), group, who=run).leave()


def parse_lease(lease: JsonObject) -> Document:
    """Parse a Lease's document; before a first turn its number is the resourceVersion. Raises Corrupt at a bad one."""
    try:
        found = Document.model_validate_json(lease["metadata"]["annotations"][ANNOTATION])
        first = int(lease["metadata"]["resourceVersion"])
        return found if found.number else found.model_copy(update={"number": first})
    except (KeyError, ValueError) as error:
        name = lease["metadata"]["name"]
        raise Corrupt(
            "turns", name, f"is not a Lease of turns (annotation {ANNOTATION}); delete it"
        ) from error


def build_lease(document: Document, name: str, group: str, seen: JsonObject | None) -> JsonObject:
    """Build the Lease that holds `document`, to replace `seen`."""
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    before = (seen or {}).get("spec", {})
    held = document.holder.ticket if document.holder else None
    turns = before.get("leaseTransitions", 0)
    spec: JsonObject = {
        "leaseTransitions": turns,
        "leaseDurationSeconds": math.ceil(document.patience),
    }
    if held and held != before.get("holderIdentity"):
        spec |= {
            "leaseTransitions": turns + 1,
            "holderIdentity": held,
            "acquireTime": now,
            "renewTime": now,
        }
    elif held:
        spec |= {"holderIdentity": held, "acquireTime": before["acquireTime"], "renewTime": now}
    owners = (seen or {}).get("metadata", {}).get("ownerReferences", [])
    own, uid = map(os.environ.get, OWNER_VARIABLES)
    new = uid and all(owner["uid"] != uid for owner in owners)
    metadata: JsonObject = {
        "name": name,
        "labels": {LABEL: group, "app.kubernetes.io/part-of": "tuneloop"},
        "annotations": {ANNOTATION: document.model_dump_json()},
        "ownerReferences": [*owners, *([{**OWNER, "name": own, "uid": uid}] if new else [])],
    }
    if seen:
        metadata["resourceVersion"] = seen["metadata"]["resourceVersion"]
    return {"apiVersion": "/".join(LEASES[:2]), "kind": "Lease", "metadata": metadata, "spec": spec}


class File:
    """A group's document as an object in the store, for runs of one machine, or of clusters that share nothing else.
    When the last run has left it stays, empty, so that the numbers of its turns go on."""

    def __init__(self, url: str) -> None:
        self.store = Store(url)

    def read(self) -> tuple[Document, bytes | None]:
        if (data := self.store.get(KEY)) is None:
            return Document(), None
        try:
            return Document.model_validate_json(data), data
        except ValueError as error:
            raise Corrupt(
                "turns", f"{self.store.url}/{KEY}", "is not a document of turns; delete it"
            ) from error

    def write(self, document: Document, seen: bytes | None) -> None:
        self.store.swap(KEY, seen, document.model_dump_json().encode())


def release_stored_leases(url: str, run: str) -> None:
    """Release the leases and requests that an ended run left in all groups below `url`."""
    for key in Store(url).keys(""):
        if key.endswith(f"/{KEY}"):
            group = key.removesuffix(f"/{KEY}")
            Turns(File(f"{url}/{group}"), group, who=run).leave()


def open_turns(url: str, *, who: str, policy: Policy = "fifo", patience: float = 30.0) -> Turns:
    """Open the turns of the group at `url`, for the run `who`: ``lease://namespace/group``, or a URL of the store whose
    last part is the group's name. `policy` and `patience` are as in `Turns`. Raises UserError at another kind of URL,
    an unknown policy, or a patience below 1 second, too short to beat in."""
    if policy not in POLICIES:
        raise UserError("policy", policy, f"use one of {', '.join(POLICIES)}")
    if patience < 1:
        raise UserError(
            "patience",
            patience,
            "seconds, at least 1: a holder shows six times within it that it lives",
        )
    if url.startswith("lease://"):
        namespace, _, group = url.removeprefix("lease://").partition("/")
        if not namespace or not group or "/" in group:
            raise UserError("turns", url, "write lease://namespace/group")
        return Turns(
            Lease(connect_to_cluster(namespace), group),
            group,
            who=who,
            policy=policy,
            patience=patience,
        )
    group = url.rstrip("/").rpartition("/")[2]
    return Turns(File(url), group, who=who, policy=policy, patience=patience)
