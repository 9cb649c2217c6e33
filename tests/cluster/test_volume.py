"""The same stages with their artifacts on a volume; and a pod that gets more memory while it runs."""

import json
import subprocess
import time
from pathlib import Path

import pytest

from tests.cluster.conftest import ROOT, kubectl
from tests.cluster.making import submit_workflow
from tests.cluster.test_jobset import SMALL, twice
from tests.cluster.volumes import apply, volume
from tests.waiting import LIMIT_S
from tuneloop.cluster import run_workflows
from tuneloop.cluster import submit as argo
from tuneloop.cluster.watch import read_nodes
from tuneloop.kube.connection import Connection
from tuneloop.workflow.settings import RUN_LABEL

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


def test_checkpoints_pass_through_a_volume_and_memory_grows_in_place(
    cluster: Connection, run: str, tmp_path: Path
) -> None:
    claim = (ROOT / "manifests" / "components" / "pvc" / "claim.yaml").read_text()
    apply(claim)
    try:
        with volume("tuneloop-store", tmp_path):
            mounted = SMALL.model_copy(update={"claim": "tuneloop-store", "queue": ""})
            submit_workflow(
                cluster, twice(mounted, max_steps=60), run=run, store="file:///store/runs"
            )
            _grow(cluster, run)
            assert argo.wait_for_run(cluster, run) == 0
            ends = {
                n.display_name: n.outputs
                for n in read_nodes(run_workflows.find_workflows(cluster, run)[-1]).values()
            }
            refs = [ends[name]["checkpoint"] for name in ("one", "pair")]
            assert [ref.partition("@")[0] for ref in refs] == [
                f"file:///store/runs/{run}/{n}" for n in ("one", "pair")
            ]
            assert refs[0].partition("@")[2] == refs[1].partition("@")[2] != ""
            kubectl("-n", cluster.namespace, "delete", "workflows,pods", "-l", f"{RUN_LABEL}={run}")
    finally:
        apply(claim, "delete")


def _grow(cluster: Connection, run: str) -> None:
    """Raise the limit of the running one-pod stage: no restart, and the kernel's limit is the new one.

    The stage is not queued: Kueue 0.16 deletes a pod whose requests differ from what it admitted.
    """
    found: list[str] = []
    deadline = time.monotonic() + 3 * LIMIT_S
    while not found:
        assert time.monotonic() < deadline
        time.sleep(0.5)
        pods = cluster.core.list_namespaced_pod(
            cluster.namespace, label_selector=f"{RUN_LABEL}={run}"
        ).items
        found = [
            p.metadata.name
            for p in pods
            if "sft-one-pod" in p.metadata.name and p.status.phase == "Running"
        ]
    more = {"requests": {"memory": "1700Mi"}, "limits": {"memory": "1700Mi"}}
    patch = json.dumps({"spec": {"containers": [{"name": "main", "resources": more}]}})
    own = ["-n", cluster.namespace]
    kubectl(*own, "patch", "pod", found[0], "--subresource=resize", "--type=strategic", "-p", patch)
    files = "/sys/fs/cgroup/memory.max /sys/fs/cgroup/memory/memory.limit_in_bytes"  # cgroup v2, v1
    limit = ["kubectl", *own, "exec", found[0], "-c", "main", "--", "sh", "-c", f"cat {files}"]
    while subprocess.run(limit, capture_output=True, text=True).stdout.strip() != str(1700 << 20):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    pod = cluster.core.read_namespaced_pod(found[0], cluster.namespace)
    assert [status.restart_count for status in pod.status.container_statuses] == [0, 0]
