"""What a ClusterQueue can never give, and what several runs can lock, told before anything is submitted."""

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.argo.backend import KUEUE
from tests.unit.cluster.api import Cluster, connected, serve_cluster
from tuneloop.cluster.queue_problems import (
    find_queue_problems,
    find_queue_warnings,
    find_quota_problems,
)
from tuneloop.config.loading import find_pipeline
from tuneloop.workflow.settings import QUEUE_LABEL


def template(name: str, gpus: int, queue: str = "q", **more: object) -> dict[str, object]:
    limits = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return {
        "name": name,
        "metadata": {"labels": {QUEUE_LABEL: queue}},
        "container": {"resources": limits},
        **more,
    }


def cluster_queue(gpus: int, **more: object) -> dict[str, Any]:
    """The spec of one; `more`: fields of its quota, or ``cohortName``."""
    cohort = {name: more.pop(name) for name in ("cohortName",) if name in more}
    quota = [{"name": "nvidia.com/gpu", "nominalQuota": str(gpus), **more}]
    return {
        "namespaceSelector": {},
        "resourceGroups": [{"flavors": [{"resources": quota}]}],
        **cohort,
    }


def look(
    templates: list[dict[str, object]], behind: dict[str, str], specs: dict[str, dict[str, Any]]
) -> tuple[list[str], list[str]]:
    """Values of the problems and of the warnings on a cluster with these LocalQueues and ClusterQueues."""
    with serve_cluster() as server:
        for name, each in behind.items():
            server.objects[f"{KUEUE}/namespaces/tuneloop/localqueues/{name}"] = {
                "spec": {"clusterQueue": each}
            }
        server.objects[KUEUE] = {"groupVersion": KUEUE[6:], "resources": []}
        for name, spec in specs.items():
            server.objects[f"{KUEUE}/clusterqueues/{name}"] = {"spec": spec}
        cluster, workflow = connected(server.url), {"spec": {"templates": templates}}
        problems = [str(problem.value) for problem in find_queue_problems(cluster, workflow)]
        return problems, [str(warning.value) for warning in find_queue_warnings(cluster, workflow)]


def test_every_stage_that_does_not_fit_beside_the_server_is_told() -> None:
    patch = '{"containers":[{"name":"wait","resources":{"requests":{"cpu":"10m"}}}]}'
    templates = [
        template("serve", 2, daemon=True),
        template("update", 8),
        template("sft", 7),
        template("small", 6),
    ]
    workflow = {"spec": {"templates": templates, "podSpecPatch": patch}}
    flavor = [{"name": "nvidia.com/gpu", "nominalQuota": "8"}, {"name": "cpu", "nominalQuota": "1"}]
    spec = {"resourceGroups": [{"flavors": [{"resources": flavor}]}]}
    found = {
        problem.field: problem.value for problem in find_quota_problems(workflow, spec, ["q"], "cq")
    }
    assert found == {
        "update": "nvidia.com/gpu: 10 with the run's servers",
        "sft": "nvidia.com/gpu: 9 with the run's servers",
    }


RUN = [template("serve", 2, "s", daemon=True), template("update", 6, "t")]


def test_two_queues_of_one_quota_are_counted_together() -> None:
    assert look(RUN, {"s": "a", "t": "b"}, {"a": cluster_queue(2), "b": cluster_queue(6)}) == (
        [],
        [],
    )
    assert look(RUN, {"s": "a", "t": "a"}, {"a": cluster_queue(8)}) == ([], ["s"]), (
        "two such runs would lock"
    )
    beside = "nvidia.com/gpu: 8 with the run's servers"
    assert look(RUN, {"s": "a", "t": "a"}, {"a": cluster_queue(7)}) == ([beside], ["s"])
    assert look([RUN[1]], {"t": "a"}, {"a": cluster_queue(7)}) == ([], []), (
        "no server, nothing to wait for"
    )


def test_every_server_of_a_run_is_counted() -> None:
    """In `main` and in `continued`, of which one runs at a time."""
    calls = [{"name": f"serve-{i}", "template": "serve"} for i in (1, 2)]
    graphs: list[dict[str, object]] = [
        {"name": name, "dag": {"tasks": calls}} for name in ("main", "continued")
    ]
    behind = {"s": "a", "t": "b"}
    for gpus, problems in ((4, []), (3, ["nvidia.com/gpu: 4 with the run's servers"])):
        specs = {"a": cluster_queue(gpus), "b": cluster_queue(6)}
        assert look([*RUN, *graphs], behind, specs) == (problems, ["2"]), (
            "two runs could get one server each"
        )
    assert look([*RUN, *graphs], dict.fromkeys(behind, "a"), {"a": cluster_queue(10)}) == (
        [],
        ["2", "s"],
    )


@pytest.mark.parametrize(
    ("server", "stages", "warned"),
    [
        ({}, {}, ["s"]),
        ({"borrowingLimit": "0"}, {}, []),
        ({"borrowingLimit": "1"}, {}, ["s"]),
        ({}, {"lendingLimit": "0"}, []),
    ],
)
def test_a_server_that_may_borrow_of_stages(
    server: dict[str, str], stages: dict[str, str], warned: list[str]
) -> None:
    specs = {
        "a": cluster_queue(2, cohortName="c", **server),
        "b": cluster_queue(6, cohortName="c", **stages),
    }
    assert look(RUN, {"s": "a", "t": "b"}, specs) == ([], warned)


def find_finding(server: Cluster, workflow: dict[str, Any]) -> str:
    (problem,) = find_queue_problems(connected(server.url), workflow)
    return str(problem)


QUEUED: dict[str, Any] = {"spec": {"templates": [template("sft", 2)]}}


def test_a_kueue_that_serves_an_older_version() -> None:
    """`cohort` is the field of v1beta1."""
    older = KUEUE.replace("v1beta2", "v1beta1")
    with serve_cluster() as server:
        server.objects = {
            older: {"groupVersion": older[6:], "resources": []},
            f"{older}/namespaces/tuneloop/localqueues/q": {"spec": {"clusterQueue": "cq"}},
            f"{older}/clusterqueues/cq": {"spec": cluster_queue(1)},
        }
        assert (
            "'nvidia.com/gpu: 2': is more than ClusterQueue cq can ever give (1)"
            in find_finding(server, QUEUED)
        )
        spec = server.objects[f"{older}/clusterqueues/cq"]["spec"]
        spec["cohort"] = "shared"
        assert not list(find_queue_problems(connected(server.url), QUEUED)), "it may borrow"


def test_a_cluster_without_kueue_orders_nothing() -> None:
    with serve_cluster() as server:
        finding = find_finding(server, QUEUED)
    assert "queue: 'q': Kueue is not installed in test" in finding
    assert "--set cluster.queue=" in finding
    # The remedy does what it says.
    pipeline = find_pipeline("grpo")
    workflow = pipeline.build(pipeline.configure(None, ["cluster.queue="]))
    with serve_cluster() as server:
        assert not list(find_queue_problems(connected(server.url), workflow))


def test_a_kueue_that_lets_pods_start_at_once() -> None:
    """Without its pod integration: neither the pod nor Kueue says anything."""
    with serve_cluster() as server:
        server.objects = {
            KUEUE: {"groupVersion": KUEUE[6:], "resources": []},
            f"{KUEUE}/namespaces/tuneloop/localqueues/q": {"spec": {"clusterQueue": "cq"}},
            f"{KUEUE}/clusterqueues/cq": {"spec": cluster_queue(8)},
        }
        cluster = connected(server.url)
        assert not list(find_queue_problems(cluster, QUEUED))
        (probe,) = server.created
        assert probe["metadata"]["labels"] == {QUEUE_LABEL: "q"}
        security = probe["spec"]["securityContext"]
        assert security["runAsNonRoot"]
        # OpenShift refuses any user or group but those of the namespace.
        assert not security.keys() & {"runAsUser", "runAsGroup", "fsGroup"}
        server.holds_pods = False
        finding = find_finding(server, QUEUED)
        assert "Kueue does not make pods of namespace tuneloop wait" in finding
        assert "integrations.frameworks: pod" in finding
        server.denied = {"/api/v1/namespaces/tuneloop/pods": "pods"}
        assert not list(find_queue_problems(cluster, QUEUED)), "this account may not ask"


def test_a_missing_queue_in_a_namespace_of_ones_own_names_those_that_are_there() -> None:
    with serve_cluster() as server:
        server.objects = {
            KUEUE: {"groupVersion": KUEUE[6:], "resources": []},
            f"{KUEUE}/namespaces/team-a/localqueues": [
                {"metadata": {"name": "gpu-pool", "creationTimestamp": "2026"}}
            ],
        }
        cluster = replace(connected(server.url), namespace="team-a")
        (problem,) = find_queue_problems(cluster, QUEUED)
    assert "is not a LocalQueue of namespace team-a" in str(problem)
    assert "--set cluster.queue=gpu-pool (here are gpu-pool)" in str(problem)
    assert "namespace: tuneloop" not in str(problem) and "overlays/local" not in str(problem)


def test_queues_that_this_account_may_not_see_are_said() -> None:
    """A queue that does not exist would keep the pods waiting, and nothing would say so."""
    local_queue = f"{KUEUE}/namespaces/tuneloop/localqueues/q"
    with serve_cluster() as server:
        server.objects = {
            KUEUE: {"groupVersion": KUEUE[6:], "resources": []},
            local_queue: {"spec": {"clusterQueue": "cq"}},
        }
        server.denied = {f"{KUEUE}/clusterqueues/cq": "clusterqueues"}
        cluster = connected(server.url)
        (warning,) = find_queue_warnings(cluster, QUEUED)
        assert "a quota below nvidia.com/gpu 2 (the largest pod)" in str(warning)
        server.denied = {local_queue: "localqueues"}
        (warning,) = find_queue_warnings(cluster, QUEUED)
        assert "if namespace tuneloop has no such LocalQueue, the pods wait for ever" in str(
            warning
        )
        assert not list(find_queue_problems(cluster, QUEUED))


def test_a_namespace_without_the_label_that_a_cluster_queue_selects() -> None:
    """It is labelled: a ClusterQueue that selected it by name would no longer admit the others."""
    with serve_cluster() as server:
        server.objects = {
            KUEUE: {"groupVersion": KUEUE[6:], "resources": []},
            f"{KUEUE}/namespaces/tuneloop/localqueues/q": {"spec": {"clusterQueue": "cq"}},
            f"{KUEUE}/clusterqueues/cq": {"spec": cluster_queue(8)},
            "/api/v1/namespaces/tuneloop": {"metadata": {"name": "tuneloop", "labels": {}}},
        }
        spec = server.objects[f"{KUEUE}/clusterqueues/cq"]["spec"]
        spec["namespaceSelector"] = {"matchLabels": {"tuneloop.dev/runs": "true"}}
        assert find_finding(server, QUEUED).endswith(
            "does not admit namespace tuneloop; kubectl label namespace tuneloop tuneloop.dev/runs=true"
        )
        labels = {"tuneloop.dev/runs": "true"}
        server.objects["/api/v1/namespaces/tuneloop"]["metadata"]["labels"] = labels
        assert not list(find_queue_problems(connected(server.url), QUEUED))
