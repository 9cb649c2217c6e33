"""A group's document as a Lease, over HTTP: what the API server's answers mean."""

import dataclasses
import json
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from typing import Any

import pytest

from tests.extensions.sharing.test_claims import grpo
from tests.extensions.sharing.test_turn import SHARED, build
from tests.unit.cluster.test_launch import Answering, connected
from tuneloop.core.errors import Retryable, UserError
from tuneloop.extensions.sharing.preflight import find_lease_problems
from tuneloop.extensions.sharing.settings import find_share
from tuneloop.kube.connection import Connection
from tuneloop.sharing.lease_queue import LeaseQueue
from tuneloop.sharing.lease_storage import KubernetesLease
from tuneloop.sharing.leases import HeldLease, LeaseGroup


class Server(ThreadingHTTPServer):
    """As much of an API server as keeps Leases in the namespace `tuneloop`, by name and version, and lists claims."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.leases: dict[str, dict[str, Any]] = {}
        self.claims: list[dict[str, Any]] = []
        self.version = 0


class Handler(Answering):
    server: Server

    def _body(self) -> dict[str, Any]:
        body: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        return body

    def _store(self, body: dict[str, Any], status: int) -> None:
        self.server.version += 1
        about = {"resourceVersion": str(self.server.version), "uid": "u"}
        self.server.leases[body["metadata"]["name"]] = {
            **body,
            "metadata": {**body["metadata"], **about},
        }
        self._answer(status, self.server.leases[body["metadata"]["name"]])

    def do_GET(self) -> None:
        kind, _, query = self.path.rpartition("/")[2].partition("?")
        if kind.startswith("resourceclaim"):
            assert "labelSelector=tuneloop.dev%2Fshare-group%3Ddemo" in query
            return self._answer(
                200, {"items": self.server.claims if kind == "resourceclaims" else []}
            )
        found = self.server.leases.get(self.path.rpartition("/")[2])
        self._answer(200 if found else 404, found or {"message": "not found"})

    def do_POST(self) -> None:
        body = self._body()
        if "/namespaces/tuneloop/" not in self.path:
            return self._answer(404, {"message": 'namespaces "nowhere" not found'})
        if body["metadata"]["name"] in self.server.leases:
            return self._answer(409, {"message": "already exists"})
        self._store(body, 201)

    def do_PUT(self) -> None:
        body = self._body()
        found = self.server.leases.get(body["metadata"]["name"])
        if found is None:
            return self._answer(404, {"message": "not found"})
        if found["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            return self._answer(409, {"message": "was changed"})
        self._store(body, 200)

    def do_DELETE(self) -> None:
        self._body()
        self._answer(200, self.server.leases.pop(self.path.rpartition("/")[2]))

    def log_message(self, *about: object) -> None:
        """Nothing is said."""


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    threading.Thread(target=made.serve_forever, daemon=True).start()
    yield made
    made.shutdown()
    made.server_close()


@pytest.fixture
def cluster(server: Server) -> Connection:
    return connected(f"http://127.0.0.1:{server.server_port}")


def test_a_namespace_that_is_not_there(cluster: Connection) -> None:
    """One line, not a conflict that is tried again for ever."""
    nowhere = dataclasses.replace(cluster, namespace="nowhere")
    with pytest.raises(UserError, match=r'refused \(404\): namespaces "nowhere" not found'):
        KubernetesLease(nowhere, "g").write(LeaseQueue().add_waiter("a.1", "a"), None)


def test_a_lease_that_went_away_under_a_writer_is_made_anew(
    cluster: Connection, server: Server
) -> None:
    group = LeaseGroup(KubernetesLease(cluster, "g"), "g", who="a", patience=30)
    group.update(lambda document: document.add_waiter("a.1", "a"))
    seen: list[int] = []

    def ask(document: LeaseQueue) -> LeaseQueue:
        seen.append(len(document.waiting))
        server.leases.clear()
        return document.add_waiter("a.2", "a")

    group.update(ask)
    assert seen == [1, 0] and [request.ticket for request in group.read().waiting] == ["a.2"]
    group.release_all()
    assert not server.leases


def test_what_the_group_will_refuse_is_said_before(cluster: Connection, server: Server) -> None:
    """By the Lease, where one stands; an idle group takes what comes."""
    share = find_share(SHARED)
    assert share
    made, theirs = build(1), share.patience + 10
    assert list(find_lease_problems(cluster, made)) == []
    with LeaseGroup(KubernetesLease(cluster, "g"), "g", who="a", patience=theirs).acquire(
        timeout=60
    ):
        (problem,) = find_lease_problems(cluster, made)
        assert (
            problem.field == "cluster.share.patience"
            and f"the runs of group g say {theirs}" in str(problem)
        )
    assert list(find_lease_problems(cluster, made)) == []


def test_a_number_is_nobody_s_again(cluster: Connection, server: Server) -> None:
    """Not after the Lease went with its last request, nor after it was deleted.

    Not even under a ticket that is good.
    """

    def open_group(who: str) -> LeaseGroup:
        return LeaseGroup(KubernetesLease(cluster, "g"), "g", who=who, patience=3600)

    late = open_group("a").wait_for_grant("a.1", 60, threading.Event())  # and is frozen
    open_group("a").release_all()
    assert not server.leases
    numbers = [late.number]
    for _ in range(3):
        with open_group("b").acquire(timeout=60) as held:
            numbers.append(held.number)
        assert not server.leases
        with open_group("b").acquire(timeout=60) as held:
            numbers.append(held.number)
            server.leases.clear()
    assert numbers == sorted(set(numbers))
    with open_group("b").acquire(timeout=60) as held:
        assert server.leases["tuneloop-lease-g"]["spec"]["leaseTransitions"] == 1
        for stale in (late, HeldLease(held.group, held.ticket, late.number, held.renewed)):
            with pytest.raises(
                Retryable, match=f"lease {late.number} is over: the newest is {held.number}"
            ):
                stale.renew()
        assert held.renew().group.read().holder


def test_what_the_leases_of_any_claim_of_the_group_will_refuse_is_said_before(
    cluster: Connection, server: Server
) -> None:
    """Which of them a run reserves is known once it has its reservation, and then it is too late."""
    made = grpo("cluster.share.roles=apart", "cluster.share.policy=lrs")
    assert list(find_lease_problems(cluster, made)) == []
    server.claims = [
        {"metadata": {"name": f"demo-{i}", "creationTimestamp": str(i)}} for i in range(3)
    ]
    agrees = LeaseGroup(
        KubernetesLease(cluster, "demo-1"), "demo-1", who="a", policy="lrs", patience=30
    )
    other = LeaseGroup(
        KubernetesLease(cluster, "demo-2"), "demo-2", who="b", policy="fifo", patience=30
    )
    with agrees.acquire(timeout=60):
        assert list(find_lease_problems(cluster, made)) == []
        with other.acquire(timeout=60):
            (problem,) = find_lease_problems(cluster, made)
    assert problem.field == "cluster.share.policy" and "the runs of group demo-2 say 'fifo'" in str(
        problem
    )
