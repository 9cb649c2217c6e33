"""`tuneloop doctor` on a real API server; where something is refused, its own command mends it."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.cluster.conftest import ROOT, kubectl
from tests.cluster.test_preflight import _as
from tests.waiting import until
from tuneloop.cli import run_cli
from tuneloop.cluster.doctor import NOT_CHECKED, check_argo, describe_queued_stage
from tuneloop.cluster.run_workflows import prepare_workflow
from tuneloop.kfp.doctor import RELEASE
from tuneloop.kube.connection import Connection

pytestmark = pytest.mark.cluster

IMAGES = os.environ.get("TUNELOOP_TEST_IMAGES", "tuneloop/{image}:dev")
SETTINGS = """
apiVersion: v1
kind: ConfigMap
metadata: {name: workflow-controller-configmap, namespace: kubeflow}
data:
  executor: |
    imagePullPolicy: IfNotPresent
    securityContext: {runAsNonRoot: true, runAsUser: 65532}
  workflowDefaults: |
    spec:
      templateDefaults:
        retryStrategy: {limit: '2', retryPolicy: OnError}
"""
"""As KFP 2.17.0's manifests have them."""
Look = Callable[..., tuple[int, list[dict[str, Any]]]]


@pytest.fixture
def look(cluster: Connection, capsys: pytest.CaptureFixture[str]) -> Look:
    """Exit code and checks of ``tuneloop doctor``, or of ``tuneloop kfp doctor``, with some words."""

    def run(*words: str, kfp: bool = False) -> tuple[int, list[dict[str, Any]]]:
        group = ["kfp"] if kfp else []
        code = run_cli([*group, "doctor", *words, "--set", f"cluster.images={IMAGES}", "--json"])
        return code, json.loads(capsys.readouterr().out)["checks"]

    return run


def _refused(checks: list[dict[str, Any]]) -> list[str]:
    return [check["subject"] for check in checks if check["outcome"] == "refused"]


def test_the_overlay_for_a_development_cluster_has_all(look: Look) -> None:
    code, checks = look("sft_then_grpo")
    assert (code, _refused(checks)) == (0, [])
    assert any("workflow-controller:v" in check["found"] for check in checks)
    code, checks = look("sft", "--namespace", "no-such-place")
    assert (code, _refused(checks)) == (2, ["namespace"])


def test_what_an_account_may_not_see_is_not_checked(cluster: Connection) -> None:
    stage = _as(cluster, "system:serviceaccount:tuneloop:tuneloop-stage")
    made = prepare_workflow(describe_queued_stage(), run="doctor", store="s3://b/runs")
    found = [check.found for check in check_argo(stage, made) if check.outcome == NOT_CHECKED]
    assert {
        f"not checked: no right to get {kind}" for kind in ("configmaps", "secrets", "localqueues")
    } <= {*found}


@pytest.fixture
def kubeflow(cluster: Connection) -> Iterator[None]:
    """A namespace with what doctor reads of KFP; its API server does not run."""
    image = f"--image=ghcr.io/kubeflow/kfp-api-server:{RELEASE}"
    kubectl("create", "namespace", "kubeflow", check=False)  # test_manifests.py leaves it
    assert not kubectl("-n", "kubeflow", "get", "deployments", "-o", "name"), (
        "a real KFP is not ours to change"
    )
    shown, queues = "jsonpath={.spec.namespaceSelector}", ("tuneloop", "tuneloop-samplers")
    selectors = {name: kubectl("get", "clusterqueue", name, "-o", shown) for name in queues}
    try:
        subprocess.run(
            ["kubectl", "apply", "-f", "-"],
            input=SETTINGS,
            text=True,
            check=True,
            capture_output=True,
        )
        kubectl("-n", "kubeflow", "create", "deployment", "ml-pipeline", "--replicas=0", image)
        yield
    finally:
        for name, selector in selectors.items():
            patch = f'[{{"op": "replace", "path": "/spec/namespaceSelector", "value": {selector}}}]'
            kubectl("patch", "clusterqueue", name, "--type=json", "-p", patch)
        kubectl("delete", "namespace", "kubeflow")


def test_a_backend_is_mended_by_the_commands_that_doctor_gives(kubeflow: None, look: Look) -> None:
    code, checks = look("sft_then_grpo", kfp=True)
    assert (code, _refused(checks)) == (2, ["store", "store", "queue", "queue"])
    kubectl("apply", "-k", str(ROOT / "manifests" / "overlays" / "kfp"))
    code, checks = look("sft_then_grpo", kfp=True)
    assert (code, _refused(checks)) == (2, ["queue", "queue"])

    kubectl(
        "-n",
        "kubeflow",
        "patch",
        "configmap",
        "workflow-controller-configmap",
        "-p",
        '{"data":{"executor":"{}"}}',
    )
    refused = []

    def mended() -> bool:
        code, checks = look("sft_then_grpo", kfp=True)
        for check in checks:
            if check["outcome"] == "refused":
                refused.append(check["subject"])
                subprocess.run(
                    ["bash", "-c", check["remedy"]], check=True, cwd=ROOT, capture_output=True
                )
        return code == 0

    until(mended)
    assert {*refused} == {"executor", "queue"}
