"""Kueue: a run that waits says why and runs when its turn comes; one that is preempted comes back."""

import itertools
from collections.abc import Callable
from typing import TypeVar

import pytest

from tests import waiting
from tests.cluster.conftest import STORE, sleeper
from tests.cluster.making import finish, submit_workflow
from tuneloop.cluster import submit as argo
from tuneloop.cluster.kueue import find_kueue
from tuneloop.cluster.run_workflows import get_workflow_phase, list_workflows, prepare_workflow
from tuneloop.cluster.watch import read_logs, read_status
from tuneloop.kube.connection import WORKFLOWS, Connection
from tuneloop.local.journal import Node
from tuneloop.workflow.settings import RUN_LABEL

pytestmark = pytest.mark.cluster
T = TypeVar("T")
LONG_S = 3600
"""Seconds that a stage would take which is released or stopped before."""


def until(what: Callable[[], T], seconds: float = 2 * waiting.LIMIT_S) -> T:
    return waiting.until(what, seconds, pause=0.5)


def running(cluster: Connection, run: str) -> bool:
    return any(node.phase == "Running" for node in find_pods(cluster, run))


def find_pods(cluster: Connection, run: str) -> list[Node]:
    return [node for node in read_status(cluster, run).nodes.values() if node.type == "Pod"]


def submit_two_runs(cluster: Connection, queue: str, run: str) -> tuple[str, str]:
    """Submit a run that takes the whole quota, and then one that waits for it; return their names."""
    first, second = f"{run}-a", f"{run}-b"
    submit_workflow(cluster, sleeper(LONG_S, queue), run=first, store=STORE)
    until(lambda: running(cluster, first))
    submit_workflow(cluster, sleeper(LONG_S, queue), run=second, store=STORE)
    until(lambda: bool(read_status(cluster, second).waiting))
    return first, second


def test_two_runs_and_quota_for_one(cluster: Connection, tight: str, run: str) -> None:
    first, second = submit_two_runs(cluster, tight, run)
    until(lambda: "insufficient" in str(read_status(cluster, second).waiting))
    assert finish(cluster, first) == 0
    assert finish(cluster, second) == 0
    assert not read_status(cluster, second).waiting


def test_a_high_priority_preempts_and_the_other_comes_back(
    cluster: Connection, tight: str, run: str
) -> None:
    low, high = f"{run}-a", f"{run}-b"
    submit_workflow(cluster, sleeper(LONG_S, tight), run=low, store=STORE, priority="tuneloop-low")
    until(lambda: running(cluster, low))
    submit_workflow(cluster, sleeper(1, tight), run=high, store=STORE, priority="tuneloop-high")
    assert argo.wait_for_run(cluster, high) == 0
    assert finish(cluster, low) == 0
    # The quota is for one. (Argo makes a pod that had only just begun anew in the same node; else there are two nodes.)
    assert find_pods(cluster, low)[-1].phase == "Succeeded"
    assert find_pods(cluster, high)[-1].finished <= find_pods(cluster, low)[-1].finished, (
        "it had to wait"
    )


def test_stop_releases_what_waits_and_what_runs(cluster: Connection, tight: str, run: str) -> None:
    first, second = submit_two_runs(cluster, tight, run)
    until(lambda: ("sleep", "begun") in list(read_logs(cluster, first)))
    for name in (second, first):
        assert argo.stop_run(cluster, name, timeout=waiting.LIMIT_S) == 1
        assert argo.wait_for_run(cluster, name) != 0
        assert not read_status(cluster, name).waiting
    pods = cluster.core.list_namespaced_pod(cluster.namespace).items
    assert not [
        p
        for p in pods
        if p.metadata.labels.get(RUN_LABEL) in (first, second) and p.status.phase == "Running"
    ]
    assert ("sleep", "begun") in list(read_logs(cluster, first))


def test_workflows_of_one_run_take_their_turn(cluster: Connection, run: str) -> None:
    """However they came about: three of one run at once, which `argo submit` does not refuse."""
    made = prepare_workflow(sleeper(4, queue=""), run=run, store=STORE)
    group, version, plural = WORKFLOWS
    for number in range(3):
        body = {**made, "metadata": {**made["metadata"], "name": f"{run}-{number}"}}
        cluster.custom.create_namespaced_custom_object(
            group, version, cluster.namespace, plural, body
        )
    until(lambda: {get_workflow_phase(w) for w in list_workflows(cluster, run)} == {"Succeeded"})
    pods = [
        n
        for w in list_workflows(cluster, run)
        for n in w["status"]["nodes"].values()
        if n["type"] == "Pod"
    ]
    spans = sorted((pod["startedAt"], pod["finishedAt"]) for pod in pods)
    assert len(spans) == 3
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(spans))


def test_pods_that_the_controller_has_forgotten_go_with_their_workloads(
    cluster: Connection, tight: str, run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if it had been restarted: those that it deletes in ten minutes."""
    submit_workflow(cluster, sleeper(1, tight), run=run, store=STORE)
    assert argo.wait_for_run(cluster, run) == 0

    api = find_kueue(cluster)
    assert api

    def remains() -> list[object]:
        owned = [
            w
            for w in cluster.list(*api, "workloads")
            if w["metadata"]["ownerReferences"][0]["name"].startswith(run)
        ]
        return [*cluster.list_pods(f"{RUN_LABEL}={run}"), *owned]

    assert len(remains()) == 2
    argo.delete_forgotten_pods(cluster)
    assert len(remains()) == 2, "they may still be read"
    monkeypatch.setattr(argo, "FORGOTTEN_S", 0.0)
    argo.delete_forgotten_pods(cluster)
    until(lambda: not remains())
