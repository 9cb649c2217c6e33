"""The Deployments of components/mlflow and components/tracker: a run is mirrored once, though the tracker is killed."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from mlflow import MlflowClient

from tests.cluster.conftest import ROOT, STORE, forwarded, kubectl
from tests.cluster.making import finish, submit_workflow, toy
from tests.cluster.volumes import apply
from tests.waiting import until
from tuneloop.kube.connection import Connection

pytestmark = [pytest.mark.cluster, pytest.mark.slow]


@pytest.fixture
def mlflow(
    cluster: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MlflowClient]:
    """The components of manifests/ over the store of these tests, MLflow's files in the pod; yields its client."""
    components = [
        os.path.relpath(ROOT / "manifests/components" / name, tmp_path)
        for name in ("mlflow", "tracker")
    ]
    (tmp_path / "kustomization.yaml").write_text(
        json.dumps({"kind": "Kustomization", "components": components})
    )
    objects = [
        each
        for each in yaml.safe_load_all(kubectl("kustomize", str(tmp_path)))
        if each["kind"] != "PersistentVolumeClaim"
    ]
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in objects
        if each["kind"] == "Deployment"
    }
    words = pods["tuneloop-tracker"]["containers"][0]["args"]
    words[words.index("--store") + 1] = STORE
    pods["mlflow"]["volumes"] = [
        {"name": each["name"], "emptyDir": {}} for each in pods["mlflow"]["volumes"]
    ]
    made = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    try:
        apply(made)
        kubectl("-n", cluster.namespace, "rollout", "status", "deployment/mlflow", "--timeout=600s")
        with forwarded(cluster.namespace, "mlflow", 5000) as place:
            yield MlflowClient(f"http://{place}")
    finally:
        apply(made, "delete")


def find_mirror(client: MlflowClient, run: str) -> Any:
    """The mirror of a run, which is one."""
    experiments = [each.experiment_id for each in client.search_experiments()]
    found = client.search_runs(experiments, f"tags.`tuneloop.run` = '{run}'")
    assert len(found) < 2
    return found[0] if found else None


def test_a_run_is_mirrored_once_though_the_tracker_is_killed(
    cluster: Connection, mlflow: MlflowClient, run: str
) -> None:
    submit_workflow(cluster, toy(run, iterations=2, held=["rollout"]), run=run, store=STORE)
    until(lambda: find_mirror(mlflow, run), pause=1.0)
    assert find_mirror(mlflow, run).info.status == "RUNNING"
    kubectl(
        "-n",
        cluster.namespace,
        "delete",
        "pod",
        "-l",
        "app.kubernetes.io/name=tuneloop-tracker",
        "--force",
    )
    assert finish(cluster, run, "rollout") == 0
    until(lambda: find_mirror(mlflow, run).info.status == "FINISHED", pause=1.0)
    mirror = find_mirror(mlflow, run)
    points = {
        name: mlflow.get_metric_history(mirror.info.run_id, name) for name in mirror.data.metrics
    }
    assert all(len({point.step for point in each}) == len(each) for each in points.values()), (
        "each once"
    )
    assert sorted(point.step for point in points["reward/mean_reward"]) == [1, 2]
