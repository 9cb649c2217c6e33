"""Rollout servers that come and go with what is asked of them: none, one, several, none again.

Deployment and autoscaler are those of manifests/. The servers' program is `rollout_stand_in.py`; the client is the
engine `endpoint` in a pod of its own.
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.conftest import ROOT, kubectl
from tests.cluster.operator import IMAGE
from tests.cluster.test_queue import until
from tests.cluster.volumes import apply
from tuneloop.kube.connection import Connection
from tuneloop.workflow.pod_settings import RESTRICTED_CONTAINER, RESTRICTED_POD
from tuneloop.workflow.settings import CLIENT_LABEL, RUN_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NAME = "tuneloop-rollout"
COMPONENTS = ("rollout-server", "rollout-autoscaler")
ASK = """
from tuneloop.formats.rollouts import Request
from tuneloop.inference.engines import Sampling
from tuneloop.inference.engines.endpoint import open_engine
engine = open_engine("http://tuneloop-rollout:8000", {"max_retries": 3600}, 300.0)
engine.version, engine.vocab_size = 3, 64
made = engine.generate([Request(str(i), [3, 4], [i, i + 1]) for i in range(150)], Sampling(1.0, 4, ()), lambda _: None)
print(sum(map(len, made)), "completions", engine.retries > 0)
"""


@pytest.fixture
def fleet(cluster: Connection, tmp_path: Path) -> Iterator[None]:
    """The two components: servers at 0, with the stand-in for their program, and an autoscaler that hurries."""
    paths = [
        os.path.relpath(ROOT / "manifests" / "components" / name, tmp_path) for name in COMPONENTS
    ]
    (tmp_path / "kustomization.yaml").write_text(
        json.dumps({"kind": "Kustomization", "components": paths})
    )
    objects = list(yaml.safe_load_all(kubectl("kustomize", str(tmp_path))))
    specs = {
        each["metadata"]["name"]: each["spec"] for each in objects if each["kind"] == "Deployment"
    }
    specs[NAME]["replicas"] = 0
    pods = {name: spec["template"]["spec"] for name, spec in specs.items()}
    pods[NAME] |= {"terminationGracePeriodSeconds": 1}
    pods[NAME]["volumes"].append({"name": "program", "configMap": {"name": "stand-in"}})
    server, autoscaler = pods[NAME]["containers"][0], pods[f"{NAME}-autoscaler"]["containers"][0]
    server |= {
        "image": IMAGE,
        "command": ["python", "/program/rollout_stand_in.py", "8000"],
        "args": [],
    }
    server |= {"resources": {"requests": {"cpu": "20m", "memory": "64Mi"}}}
    server["volumeMounts"].append({"name": "program", "mountPath": "/program"})
    autoscaler |= {
        "image": IMAGE,
        "args": ["--max", "3", "--target", "8", "--window", "5", "--interval", "0.5"],
    }
    made, own = (
        json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}),
        ["-n", cluster.namespace],
    )
    kubectl(
        *own,
        "create",
        "configmap",
        "stand-in",
        f"--from-file={ROOT}/tests/cluster/rollout_stand_in.py",
    )
    try:
        apply(made)
        yield
    finally:
        apply(made, "delete")
        kubectl(*own, "delete", "configmap", "stand-in", "--ignore-not-found")


def client_pod(cluster: Connection, run: str) -> str:
    """A pod of a run that samples."""
    labels = {RUN_LABEL: run, CLIENT_LABEL: "true"}
    container: dict[str, Any] = {
        "name": "main",
        "image": IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-c", ASK],
    }
    container |= {
        "resources": {"requests": {"cpu": "20m", "memory": "64Mi"}},
        "securityContext": RESTRICTED_CONTAINER,
    }
    container["volumeMounts"] = [{"name": "scratch", "mountPath": "/tmp"}]
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": RESTRICTED_POD,
    }
    spec |= {"containers": [container], "volumes": [{"name": "scratch", "emptyDir": {}}]}
    about = {"name": run, "namespace": cluster.namespace, "labels": labels}
    return json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec})


def test_servers_come_when_asked_and_go_when_not(
    cluster: Connection, fleet: None, run: str
) -> None:
    own = ["-n", cluster.namespace]
    apply(client_pod(cluster, run))
    until(
        lambda: cluster.core.read_namespaced_pod(run, cluster.namespace).status.phase == "Succeeded"
    )
    assert kubectl(*own, "logs", run).strip() == "300 completions True", (
        "all of them, though at first nobody was there"
    )

    def scaled() -> list[tuple[int, int]]:
        told = kubectl(*own, "logs", f"deploy/{NAME}-autoscaler")
        return [
            (int(before), int(after))
            for before, after in re.findall(r"(\d+) → (\d+) replicas", told)
        ]

    until(lambda: scaled()[-1][1] == 0)
    steps = scaled()
    assert steps[0] == (0, 1) and max(after for _, after in steps) == 3
    until(lambda: not cluster.list_pods(f"app.kubernetes.io/name={NAME}"))
