"""A managed fleet: a Dynamo graph that is ready before its run, is refitted, and goes with it. `operator.py` stands in
for Dynamo's operator; nothing of Dynamo itself runs here."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster.conftest import STORE, kubectl, sleeper
from tests.cluster.making import SMALL
from tests.cluster.operator import IMAGE, operating
from tests.cluster.test_queue import until
from tests.cluster.volumes import apply
from tests.waiting import LIMIT_S
from tuneloop.cli import run_cli
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.cluster.graph_end import add_graph_end
from tuneloop.core.errors import UserError
from tuneloop.inference.fleet import graph as graphs
from tuneloop.inference.fleet import open_fleet
from tuneloop.kube.connection import Connection
from tuneloop.workflow.pod_settings import RESTRICTED_CONTAINER
from tuneloop.workflow.settings import RUN_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

REFIT = """
from tuneloop.inference.fleet import open_fleet
from tuneloop.inference.fleet.refit import Target, refit_fleet
wanted = Target("7@sha256:0123", "/store/v7/model")
first = refit_fleet(open_fleet("dynamo://GRAPH.NAMESPACE"), wanted).workers
again = refit_fleet(open_fleet("dns://GRAPH-worker.NAMESPACE:8081"), wanted).workers
print("found", sum(paused > 0 for paused in first.values()), list(again.values()))
"""


@pytest.fixture(scope="module")
def operator(cluster: Connection) -> Iterator[None]:
    if kubectl("get", "crd", f"{graphs.PLURAL}.{graphs.GROUP}", "--ignore-not-found").strip():
        pytest.skip("this cluster has Dynamo's own definitions")
    with operating(cluster):
        yield


def manifest(
    cluster: Connection, name: str, *more: str, labels: dict[str, str] | None = None
) -> dict[str, Any]:
    frontend, worker = (
        {"name": "frontend", "type": "frontend"},
        {"name": "worker", "type": "worker", "replicas": 2},
    )
    others = [{"name": each, "type": "worker"} for each in more]
    made = {"apiVersion": "nvidia.com/v1beta1", "kind": graphs.KIND, "metadata": {"name": name}}
    made["spec"] = {"components": [frontend, worker, *others]}
    return graphs.render_graph([made], namespace=cluster.namespace, labels=labels)


def start(cluster: Connection, run: str, seconds: int = 600) -> str:
    asked = sleeper(seconds, "")
    add_graph_end(asked, SMALL)
    made = run_workflows.prepare_workflow(asked, run=run, store=STORE, namespace=cluster.namespace)
    return argo.create_workflow(cluster, made, run)


def test_a_graph_is_ready_before_its_run_and_goes_with_it(
    cluster: Connection, operator: None, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def begin() -> str:
        said.append("start")
        assert all(gate.open for gate in graphs.read_gates(cluster, run))
        assert "ownerReferences" not in graphs.find_graph(cluster, run)["metadata"]
        return start(cluster, run)

    wanted = manifest(cluster, run, labels={RUN_LABEL: run})
    assert graphs.bring_up(cluster, wanted, begin, tell=said.append, timeout=300) == run
    assert said[0] == f"{run}: created" and said[-2:] == [f"{run}: ready", "start"]
    live = graphs.find_graph(cluster, run)
    workflow = run_workflows.find_workflows(cluster, run)[0]["metadata"]
    (owner,) = live["metadata"]["ownerReferences"]
    assert (owner["uid"], owner["controller"]) == (workflow["uid"], False)
    assert live["spec"] == wanted["spec"] and "serviceAccount" not in json.dumps(live)

    place = f"{run}.{cluster.namespace}"
    assert run_cli(["fleet", "status", f"dynamo://{place}"]) == 0
    assert capsys.readouterr().out.count("open") == 3
    workers = open_fleet(f"service://{run}-worker.{cluster.namespace}").discover()
    selector = f"app={run}-worker"
    pods = json.loads(
        kubectl("-n", cluster.namespace, "get", "pods", "-l", selector, "-o", "json")
    )["items"]
    assert {w.id: w.url for w in workers} == {
        pod["metadata"]["uid"]: f"http://{pod['status']['podIP']}:8081" for pod in pods
    }
    assert refitted(cluster, run) == "found 2 [0.0, 0.0]"

    kubectl("-n", cluster.namespace, "delete", "workflow", run)
    until(
        lambda: (
            not kubectl(
                "-n",
                cluster.namespace,
                "get",
                "dgd,deploy,pod",
                "-l",
                f"app={run}-worker",
                "-o",
                "name",
            )
        )
    )
    assert graphs.find_graph(cluster, run) is None


def test_a_graph_ends_with_its_run_and_where_that_is_stopped(
    cluster: Connection, operator: None, run: str
) -> None:
    """Its Workflow objects stay."""
    wanted = manifest(cluster, run, labels={RUN_LABEL: run})
    graphs.bring_up(cluster, wanted, lambda: start(cluster, run, 1), timeout=300)
    assert argo.wait_for_run(cluster, run) == 0
    until(lambda: graphs.find_graph(cluster, run) is None)
    assert graphs.bring_up(cluster, wanted, lambda: start(cluster, run), timeout=300) == f"{run}-2"
    assert graphs.find_graph(cluster, run)
    assert argo.stop_run(cluster, run, timeout=LIMIT_S) == 1
    until(lambda: graphs.find_graph(cluster, run) is None)
    assert len(run_workflows.find_workflows(cluster, run)) == 2


def refitted(cluster: Connection, run: str) -> str:
    """What a pod without rights says that it found and did."""
    code = REFIT.replace("GRAPH", run).replace("NAMESPACE", cluster.namespace)
    container = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", code],
        "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}},
        "securityContext": RESTRICTED_CONTAINER,
    }
    pod = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
    }
    about = {"name": f"{run}-refit", "namespace": cluster.namespace, "labels": {RUN_LABEL: run}}
    apply(json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": pod}))
    own = ["-n", cluster.namespace]
    phase = lambda: kubectl(*own, "get", "pod", f"{run}-refit", "-o", "jsonpath={.status.phase}")  # noqa: E731
    until(lambda: phase() in ("Succeeded", "Failed"))
    return kubectl(*own, "logs", f"{run}-refit").strip()


def test_what_can_not_be_used_is_taken_down_again(
    cluster: Connection, operator: None, run: str
) -> None:
    said: list[str] = []
    with pytest.raises(UserError, match="its operator gave up: no node has such a device"):
        graphs.bring_up(cluster, manifest(cluster, run, "broken"), tell=said.append, timeout=60)
    until(lambda: graphs.find_graph(cluster, run) is None)
    assert said[-1] == f"{run}: taken down again"


def test_one_that_stood_before_is_nobody_elses_to_end(
    cluster: Connection, operator: None, run: str
) -> None:
    """It is used as it is, told where it differs, not owned, and left where the job can not be started."""
    said: list[str] = []
    try:
        graphs.bring_up(cluster, manifest(cluster, run), tell=said.append, timeout=300)
        other = graphs.render_graph(
            [manifest(cluster, run)], sets=["spec.components.worker.replicas=3"]
        )

        def fails() -> str:
            raise UserError("run", run, "can not be started")

        with pytest.raises(UserError, match="can not be started"):
            graphs.bring_up(cluster, other, fails, tell=said.append)
        assert f"{run}: stands already, and differs: spec.components[1].replicas" in said
        graphs.bring_up(cluster, other, lambda: start(cluster, run), tell=said.append)
        assert said[-1] == f"{run}: was not made for this run, and stays when it ends"
        assert "ownerReferences" not in graphs.find_graph(cluster, run)["metadata"]
    finally:
        assert run_cli(["fleet", "down", run, "-n", cluster.namespace]) == 0
    until(lambda: graphs.find_graph(cluster, run) is None)
    assert run_cli(["fleet", "down", run, "-n", cluster.namespace]) == 1
