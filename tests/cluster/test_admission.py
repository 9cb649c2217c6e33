"""Two runs, each with a server that lasts as long as it and a stage that needs quota besides."""

import functools
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from tests import waiting
from tests.cluster.conftest import STORE, kubectl
from tests.cluster.making import submit_workflow
from tuneloop.cluster import submit as argo
from tuneloop.cluster.queue_problems import find_queue_warnings
from tuneloop.cluster.run_workflows import prepare_workflow
from tuneloop.cluster.watch import read_status
from tuneloop.kube.connection import Connection
from tuneloop.workflow.settings import RUN_LABEL, AcceleratorResources, Cluster

pytestmark = pytest.mark.cluster

SERVERS, STAGES = "tuneloop-test-servers", "tuneloop-test-stages"
PAIR = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: %(name)s}
spec:
  namespaceSelector: {}
  resourceGroups:
    - coveredResources: [cpu, memory]
      flavors:
        - name: tuneloop-default
          resources: [{name: cpu, nominalQuota: %(cpu)s}, {name: memory, nominalQuota: 1Gi}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: %(name)s, namespace: tuneloop}
spec: {clusterQueue: %(name)s}
---
"""
QUEUES = "".join(
    PAIR % {"name": name, "cpu": cpu} for name, cpu in ((SERVERS, "250m"), (STAGES, "150m"))
)
"""For two servers, and for one stage: a pod asks for 110m, with Argo's own container."""


@pytest.fixture(scope="module")
def queues(cluster: Connection) -> Iterator[None]:
    subprocess.run(
        ["kubectl", "apply", "-f", "-"], input=QUEUES, text=True, check=True, capture_output=True
    )
    for name in (SERVERS, STAGES):
        kubectl(
            "-n",
            cluster.namespace,
            "wait",
            "--for=condition=Active",
            f"localqueue/{name}",
            "--timeout=600s",
        )
    yield
    subprocess.run(
        ["kubectl", "delete", "-f", "-", "--wait=false"],
        input=QUEUES,
        text=True,
        capture_output=True,
    )


def serve_and_train(trainers: str) -> dict[str, Any]:
    """A workflow of a server, which is ready once it is told so, and a stage behind it in the queue `trainers`."""
    from hera.workflows import DAG, Container
    from hera.workflows.models import ExecAction, Probe

    from tuneloop.argo.pod_fields import pod_fields, retry_fields
    from tuneloop.argo.template import define_workflow

    size: Any = {"cpu": "100m", "memory": "64Mi", "grace_s": 5}
    sampler, trainer = (
        AcceleratorResources(queue=SERVERS, **size),
        AcceleratorResources(queue=trainers, **size),
    )
    settings = Cluster(sampler=sampler, trainer=trainer)
    told = ExecAction(command=["test", "-e", "/tmp/ready"])
    probe = Probe(exec=told, period_seconds=1, failure_threshold=3600)
    sleep = ["sh", "-c", "trap 'exit 0' TERM; while true; do sleep 1; done"]
    with define_workflow("admission") as built:
        pod = {**pod_fields("base", "sampler", settings), **retry_fields()}
        serve = Container(name="serve", daemon=True, command=sleep, readiness_probe=probe, **pod)
        pod = {**pod_fields("base", "trainer", settings), **retry_fields()}
        train = Container(name="train", command=["sleep", "1"], **pod)
        with DAG(name="main"):
            serve(name="serve") >> train(name="train")
    made: dict[str, Any] = built.to_dict()
    return made


def submit_two_runs(cluster: Connection, run: str, trainers: str) -> tuple[str, str]:
    """Submit both, let both servers be admitted, and only then have their stages ask for quota; return the names."""
    made, names = serve_and_train(trainers), (f"{run}-a", f"{run}-b")
    for name in names:
        submit_workflow(cluster, made, run=name, store=STORE)
    for name in names:
        waiting.until(functools.partial(find_server, cluster, name), pause=0.5)
    for name in names:
        waiting.until(functools.partial(tell_server, cluster, name), pause=0.5)
    return names


def find_server(cluster: Connection, run: str) -> str:
    """The name of the pod of a run's server, once it runs."""
    pods = cluster.core.list_namespaced_pod(
        cluster.namespace, label_selector=f"{RUN_LABEL}={run}"
    ).items
    return next((pod.metadata.name for pod in pods if pod.status.phase == "Running"), "")


def tell_server(cluster: Connection, run: str) -> str:
    """Make a run's server ready; empty where its container has not begun: a pod runs as soon as one of them does."""
    words = ["-c", "main", "--", "sh", "-c", "touch /tmp/ready && echo told"]
    pod = find_server(cluster, run)
    return pod and kubectl("-n", cluster.namespace, "exec", pod, *words, check=False)


def count_warnings(cluster: Connection, trainers: str) -> int:
    return len(
        [
            *find_queue_warnings(
                cluster, prepare_workflow(serve_and_train(trainers), run="w", store=STORE)
            )
        ]
    )


def test_servers_and_stages_of_one_quota_lock_two_runs(
    cluster: Connection, queues: None, run: str
) -> None:
    """What `doctor` warns of; the preflight lets each of them pass, for each could run alone."""
    assert count_warnings(cluster, SERVERS) == 1
    names = submit_two_runs(cluster, run, SERVERS)

    def locked() -> bool:
        return all("insufficient" in str(read_status(cluster, name).waiting) for name in names)

    waiting.until(locked, pause=0.5)
    assert argo.stop_run(cluster, names[0], timeout=waiting.LIMIT_S) == 1
    assert argo.wait_for_run(cluster, names[1]) == 0, "the other has the quota then"


def test_with_queues_by_role_both_finish(cluster: Connection, queues: None, run: str) -> None:
    assert count_warnings(cluster, STAGES) == 0
    names = submit_two_runs(cluster, run, STAGES)
    assert [argo.wait_for_run(cluster, name) for name in names] == [0, 0]
