"""A real cluster, whatever KUBECONFIG names; overlays/local is applied to it first."""

import base64
import contextlib
import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import pytest

from tests.waiting import until
from tuneloop.core.store import Store
from tuneloop.kube.connection import Connection, connect_to_cluster
from tuneloop.workflow.settings import QUEUE, RUN_LABEL, SAMPLER_QUEUE

ROOT = Path(__file__).parents[2]
STORE = os.environ.get("TUNELOOP_TEST_STORE", "s3://artifacts/tests")
"""As the pods reach it."""
GO = "/tmp/go"
"""In a pod that is held: the file that lets it go on."""


def kubectl(*words: str, check: bool = True) -> str:
    done = subprocess.run(["kubectl", *words], capture_output=True, text=True)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout


@contextlib.contextmanager
def forwarded(namespace: str, service: str, port: int) -> Iterator[str]:
    """``host:port`` of a service of the cluster, here."""
    command = ["kubectl", "-n", namespace, "port-forward", f"svc/{service}", f":{port}"]

    def begin() -> tuple[subprocess.Popen[str], str] | None:
        """Forward; kubectl gives up at once where no pod of the service runs just now."""
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        if found := re.search(r":(\d+) ->", process.stdout.readline()):
            return process, f"127.0.0.1:{found[1]}"
        process.wait()
        return None

    begun = until(begin, pause=0.5)
    assert begun
    forward, place = begun
    try:
        yield place
    finally:
        forward.terminate()
        forward.wait()


@contextlib.contextmanager
def reach_store(cluster: Connection) -> Iterator[dict[str, str]]:
    """Variables by which the cluster's store is reached from here, with the pods' keys."""
    secret = cluster.core.read_namespaced_secret("tuneloop-store", cluster.namespace).data
    settings = cluster.core.read_namespaced_config_map("tuneloop-store", cluster.namespace).data
    url = urlparse(settings["AWS_ENDPOINT_URL"])
    service, namespace = (url.hostname or "").split(".")[:2]
    with forwarded(namespace, service, url.port or 80) as place:
        keys = {name: base64.b64decode(value).decode() for name, value in secret.items()}
        yield {**keys, "AWS_ENDPOINT_URL": f"http://{place}"}


@pytest.fixture(scope="session")
def cluster() -> Connection:
    if "KUBECONFIG" not in os.environ or not shutil.which("kubectl"):
        pytest.fail("the cluster tier needs KUBECONFIG set and kubectl on PATH", pytrace=False)
    return prepare_cluster()


def prepare_cluster() -> Connection:
    """Apply overlays/local to the cluster, and connect to it."""
    kubectl(
        "apply",
        "--server-side",
        "--force-conflicts",
        "-k",
        str(ROOT / "manifests" / "overlays" / "local"),
    )
    connection = connect_to_cluster()
    queues = [
        f"localqueue/{name}" for name in (QUEUE, SAMPLER_QUEUE)
    ]  # what they do not admit yet is refused
    kubectl("-n", connection.namespace, "wait", "--for=condition=Active", *queues, "--timeout=600s")
    return connection


@pytest.fixture
def root(
    cluster: Connection, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[str]:
    """A URL below the module's or the cluster's store, reached from here with the pods' keys; emptied afterwards."""
    with reach_store(cluster) as settings:
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        root = f"{getattr(request.module, 'STORE', STORE)}/root-{uuid.uuid4().hex[:8]}"
        yield root
        Store(root).delete("")


@pytest.fixture
def run(cluster: Connection) -> Iterator[str]:
    """A new run's name; whatever the run left is deleted."""
    name = f"t{uuid.uuid4().hex[:8]}"
    yield name
    for suffix in ("", "-a", "-b", "-c"):
        label = f"{RUN_LABEL}={name}{suffix}"
        kubectl("-n", cluster.namespace, "delete", "workflows,pods", "-l", label, "--wait=false")
    kubectl("-n", cluster.namespace, "delete", "configmap", f"{name}-toy", "--ignore-not-found")


TIGHT = """
apiVersion: kueue.x-k8s.io/v1beta2
kind: ClusterQueue
metadata: {name: %(name)s}
spec:
  namespaceSelector: {}
  preemption: {withinClusterQueue: LowerPriority}
  resourceGroups:
    - coveredResources: [cpu, memory]
      flavors:
        - name: tuneloop-default
          resources: [{name: cpu, nominalQuota: %(cpu)s}, {name: memory, nominalQuota: 1Gi}]
---
apiVersion: kueue.x-k8s.io/v1beta2
kind: LocalQueue
metadata: {name: %(name)s, namespace: %(namespace)s}
spec: {clusterQueue: %(name)s}
"""
"""A queue in which a run with a higher priority takes the quota of one with a lower."""


@pytest.fixture(scope="session")
def tight(cluster: Connection) -> Iterator[str]:
    """A queue with quota for one `sleeper`."""
    made = TIGHT % {"name": "tuneloop-test", "namespace": cluster.namespace, "cpu": "150m"}
    subprocess.run(
        ["kubectl", "apply", "-f", "-"], input=made, text=True, check=True, capture_output=True
    )
    wait = ["wait", "--for=condition=Active", "localqueue/tuneloop-test", "--timeout=600s"]
    kubectl("-n", cluster.namespace, *wait)
    yield "tuneloop-test"
    subprocess.run(
        ["kubectl", "delete", "-f", "-", "--wait=false"], input=made, text=True, capture_output=True
    )


SLEEP = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print('begun', flush=True)
end = time.monotonic() + SECONDS
while time.monotonic() < end and not os.path.exists('GO'):
    time.sleep(0.2)
print('done', flush=True)
"""


def sleeper(seconds: float, queue: str = "tuneloop") -> dict[str, Any]:
    """A workflow of one queued stage that computes nothing for some seconds, or until `making.release` lets it go on;
    SIGTERM ends it with 75, as it would a stage."""
    program = SLEEP.replace("SECONDS", str(seconds)).replace("GO", GO)
    from hera.workflows import DAG, Container

    from tuneloop.argo.pod_fields import pod_fields, retry_fields
    from tuneloop.argo.template import define_workflow
    from tuneloop.workflow.settings import AcceleratorResources, Cluster

    with define_workflow("sleeper") as built:
        small = AcceleratorResources(cpu="100m", memory="64Mi", grace_s=30)
        pod = pod_fields("base", "scorer", Cluster(queue=queue, scorer=small))
        stage = Container(
            name="sleep", command=["python", "-c"], args=[program], **pod, **retry_fields()
        )
        with DAG(name="main"):
            stage(name="sleep")
    made: dict[str, Any] = built.to_dict()
    return made
