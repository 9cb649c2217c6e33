"""`tuneloop kfp doctor`, against what an API server answers."""

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kfp_api import serve_api
from tests.unit.argo.backend import KUEUE, describe_backend, describe_deployment
from tests.unit.cluster.api import Cluster, connected, kubeconfig, serve_cluster
from tuneloop.cli import run_cli
from tuneloop.cluster.doctor import NOT_CHECKED, OK, REFUSED, WARNING, Check
from tuneloop.config.loading import find_pipeline
from tuneloop.kfp.doctor import RELEASE, check_kfp, check_size, predict_workflow_size

INSIDE = "/api/v1/namespaces/kubeflow"
SERVER = "/apis/apps/v1/namespaces/kubeflow/deployments/ml-pipeline"
CONTROLLER = f"{INSIDE}/configmaps/workflow-controller-configmap"
Objects = dict[str, Any]


@pytest.fixture
def backend() -> Iterator[Cluster]:
    with serve_cluster() as server:
        image = f"ghcr.io/kubeflow/kfp-api-server:{RELEASE}"
        deployment = describe_deployment("ml-pipeline", "kubeflow", image)
        server.objects = {**describe_backend("kubeflow"), SERVER: deployment}
        yield server


def look(backend: Cluster, *sets: str, pipeline: str = "") -> list[Check]:
    cluster = dataclasses.replace(connected(backend.url), namespace="kubeflow")
    if not pipeline:
        return check_kfp(cluster)
    found = find_pipeline(pipeline)
    settings = found.configure(None, sets)
    return check_kfp(cluster, found.module.build_kfp(settings), settings)


def test_a_backend_that_has_all(
    backend: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("KUBECONFIG", kubeconfig(backend.url, tmp_path))
    with serve_api() as api:
        assert run_cli(["kfp", "doctor", "sft", "--endpoint", api.url, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["target"], told["namespace"]) == ("kfp", "kubeflow")
    found = {each["subject"]: each["found"] for each in told["checks"]}
    warned = [each for each in told["checks"] if each["outcome"] != "ok"]
    assert [each["subject"] for each in warned] == ["workflow defaults"], (
        "KFP's own have no retries of preempted pods"
    )
    assert "kfp.retries has no meaning" in warned[0]["found"]
    words = shlex.split(warned[0]["remedy"])
    assert words[:5] == ["kubectl", "-n", "kubeflow", "patch", "configmap"]
    defaults = json.loads(json.loads(words[-1])["data"]["workflowDefaults"])
    assert defaults["spec"]["templateDefaults"]["retryStrategy"]["retryPolicy"] == "Always"
    assert found["executor"].startswith("runs as user 65532")
    assert (
        found["queue"]
        == "LocalQueue tuneloop, tuneloop-samplers admits what accelerator tasks ask for"
    )
    assert found["KFP's API"].endswith(" answers")


def _older(objects: Objects) -> None:
    objects[SERVER] = describe_deployment(
        "ml-pipeline", "kubeflow", "ghcr.io/kubeflow/kfp-api-server:2.4.1"
    )


def _no_server(objects: Objects) -> None:
    del objects[SERVER]


def _root(objects: Objects) -> None:
    objects[CONTROLLER]["data"]["executor"] = (
        "imagePullPolicy: IfNotPresent\nsecurityContext: {runAsNonRoot: true}"
    )


def _no_settings(objects: Objects) -> None:
    del objects[CONTROLLER]
    objects["/api/v1/configmaps"] = []


def _no_secret(objects: Objects) -> None:
    del objects[f"{INSIDE}/secrets/tuneloop-store"]


def _half_a_secret(objects: Objects) -> None:
    del objects[f"{INSIDE}/secrets/tuneloop-store"]["data"]["AWS_SECRET_ACCESS_KEY"]


def _no_queue(objects: Objects) -> None:
    queues = objects[f"{KUEUE}/namespaces/kubeflow/localqueues"]
    queues[:] = [each for each in queues if each["metadata"]["name"] != "tuneloop"]


def _no_cluster_queue(objects: Objects) -> None:
    del objects[f"{KUEUE}/clusterqueues/tuneloop"]


def _admits_others(objects: Objects) -> None:
    expression = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["tuneloop"]}
    objects[f"{KUEUE}/clusterqueues/tuneloop"]["spec"]["namespaceSelector"] = {
        "matchExpressions": [expression]
    }


@pytest.mark.parametrize(
    ("spoil", "subject", "found", "remedy"),
    [
        (
            _older,
            "KFP's API server",
            "2.4.1 in namespace kubeflow: 2.17 or newer is needed",
            f"?ref={RELEASE}'",
        ),
        (
            _no_server,
            "KFP's API server",
            "no Deployment ml-pipeline in namespace kubeflow",
            "kubectl apply -k 'github",
        ),
        (
            _root,
            "executor",
            "has no securityContext.runAsUser: KFP's driver pods would hang",
            "--type merge -p",
        ),
        (
            _no_settings,
            "executor",
            "no ConfigMap workflow-controller-configmap in any namespace",
            "kubectl apply -k",
        ),
        (
            _no_secret,
            "store",
            "Secret tuneloop-store is missing in namespace kubeflow",
            "manifests/overlays/kfp",
        ),
        (
            _half_a_secret,
            "store",
            "Secret tuneloop-store lacks AWS_SECRET_ACCESS_KEY",
            "create secret generic tunel",
        ),
        (
            _no_queue,
            "queue",
            "no LocalQueue tuneloop in namespace kubeflow",
            "| kubectl apply -f -",
        ),
        (
            _no_cluster_queue,
            "queue",
            "is of the ClusterQueue tuneloop, which does not exist",
            "ask an admin of the cluster",
        ),
        (_admits_others, "queue", "does not admit namespace kubeflow", '["kubeflow", "tuneloop"]'),
    ],
)
def test_what_is_missing_comes_with_a_command(
    backend: Cluster, spoil: Callable[[Objects], None], subject: str, found: str, remedy: str
) -> None:
    spoil(backend.objects)
    (refused,) = [check for check in look(backend) if check.outcome == REFUSED]
    assert refused.subject == subject
    assert found in refused.found and remedy in refused.remedy


def test_each_queue_that_is_missing_comes_with_a_command(backend: Cluster) -> None:
    _no_queue(backend.objects)
    refused = [
        check
        for check in look(backend, "cluster.sampler.queue=mine", pipeline="sft")
        if check.outcome == REFUSED
    ]
    assert [("clusterQueue" in each.remedy, each.found.split()[2]) for each in refused] == [
        (True, "mine"),
        (True, "tuneloop"),
    ]


def test_the_command_keeps_the_executors_other_settings(backend: Cluster) -> None:
    _root(backend.objects)
    (refused,) = [check for check in look(backend) if check.outcome == REFUSED]
    executor = yaml.safe_load(json.loads(refused.remedy.split("'")[1])["data"]["executor"])
    context = {"runAsNonRoot": True, "runAsUser": 65532}
    assert executor == {"imagePullPolicy": "IfNotPresent", "securityContext": context}


def test_the_controller_may_be_in_another_namespace(backend: Cluster) -> None:
    settings = backend.objects.pop(CONTROLLER)
    whole = yaml.safe_dump({key: yaml.safe_load(text) for key, text in settings["data"].items()})
    elsewhere = {
        "metadata": {"name": "workflow-controller-configmap", "namespace": "argo"},
        "data": {"config": whole},
    }
    backend.objects["/api/v1/configmaps"] = [elsewhere]
    executor = next(check for check in look(backend) if check.subject == "executor")
    assert executor.outcome == OK and executor.found.endswith("in namespace argo)")


def test_without_kueue_tasks_start_at_once(backend: Cluster) -> None:
    backend.objects = {
        path: each for path, each in backend.objects.items() if not path.startswith(KUEUE)
    }
    (queue,) = [check for check in look(backend) if check.subject == "queue"]
    assert queue.outcome == OK and "is not installed" in queue.found


def test_quota_images_and_a_store_on_a_volume(backend: Cluster) -> None:
    _no_secret(backend.objects)
    sets = (
        "cluster.trainer.gpus=2",
        "cluster.sampler.gpus=2",
        "cluster.images=mine/{image}:1",
        "cluster.pod.volumes={/data: pvc/claim}",
    )
    checks = look(backend, *sets, pipeline="sft")
    quota = [check.found for check in checks if check.outcome == REFUSED]
    assert sorted(quota) == sorted(
        f"{task} 'nvidia.com/gpu: 2': ClusterQueue {queue} has no quota for it"
        for task, queue in (
            ("evaluate", "tuneloop-samplers"),
            ("sft", "tuneloop"),
            ("evaluate-2", "tuneloop-samplers"),
        )
    )
    warned = [(check.subject, check.found) for check in checks if check.outcome == WARNING]
    assert ("images", "mine/trainer:1: not on a node: it must be pullable") in warned
    assert ("store", "Secret tuneloop-store is missing in namespace kubeflow") in warned


def test_a_workflow_that_is_too_large() -> None:
    tasks = {f"task-{number}": {} for number in range(12)}
    loop: Objects = {"components": {}, "root": {"dag": {"tasks": tasks}}}
    assert check_size(predict_workflow_size(loop), 12).outcome == OK
    tasks |= {f"more-{number}": {} for number in range(50)}
    size = check_size(predict_workflow_size(loop), 62)
    assert size.outcome == WARNING and "KFP cannot show it then" in size.found
    tasks |= {f"again-{number}": {} for number in range(100)}
    size = check_size(predict_workflow_size(loop), 162)
    assert size.outcome == REFUSED and "--set kfp.unroll=0" in size.remedy


def test_what_the_account_may_not_see_is_said(backend: Cluster) -> None:
    backend.denied = {"/api/v1/nodes": "nodes", CONTROLLER: "configmaps", SERVER: "deployments"}
    backend.denied |= {f"{KUEUE}/namespaces/kubeflow/localqueues": "localqueues"}
    found = {
        check.subject: check.found
        for check in look(backend, pipeline="sft")
        if check.outcome == NOT_CHECKED
    }
    assert found == {
        "KFP's API server": "not checked: no right to get deployments",
        "executor": "not checked: no right to get configmaps",
        "workflow defaults": "not checked: no right to get configmaps",
        "queue": "not checked: no right to list localqueues",
        "images": "not checked: no right to list nodes",
        "KFP's API": "not checked: neither --endpoint nor KF_PIPELINES_ENDPOINT names it",
    }
