"""What `cluster.pod` says reaches the tasks of Kubeflow Pipelines, or is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.compiling import compiled
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject


def compile_tasks(pod: JsonObject, folder: Path, *sets: str) -> tuple[JsonObject, JsonObject]:
    """Compile `sft`; return executor → container, and executor → its Kubernetes settings."""
    all_sets = [f"cluster.pod={json.dumps(pod)}", *sets]
    path = compiled("sft", all_sets, folder / "pipeline.yaml")
    spec, platform = yaml.safe_load_all(path.read_text())
    containers = {
        name: executor["container"]
        for name, executor in spec["deploymentSpec"]["executors"].items()
        if "container" in executor
    }
    executors: Any = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    return containers, executors


def test_every_task_has_what_the_platform_spec_has(tmp_path: Path) -> None:
    pod = {
        "env": {"HF_ENDPOINT": "https://hub.internal"},
        "image_pull_secrets": ["registry"],
        "annotations": {"team": "post-training"},
        "labels": {"cost-center": "7"},
        "security": "openshift",
        "gpu_resource": "amd.com/gpu",
        "network": {"nccl_env": {"NCCL_DEBUG": "WARN"}},
        "volumes": {
            "/models": "pvc/models",
            "/ca": "configmap/ca",
            "/keys": "secret/keys",
            "/fast": "emptydir/4Gi",
        },
        "spec": {
            "nodeSelector": {"pool": "gpu"},
            "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "imagePullSecrets": [{"name": "mirror"}],
            "containers": [{"name": "main", "env": [{"name": "A", "value": "1"}]}],
        },
    }
    containers, executors = compile_tasks(pod, tmp_path, "cluster.trainer.gpus=1")
    assert containers.keys() <= executors.keys()
    for name, container in containers.items():
        variables = {item["name"]: item["value"] for item in container["env"]}
        assert variables["HF_ENDPOINT"] == "https://hub.internal"
        assert variables["A"] == "1"
        executor = executors[name]
        metadata = executor["podMetadata"]
        assert metadata["annotations"] == {"team": "post-training"}
        assert metadata["labels"]["cost-center"] == "7"
        assert executor["securityContext"] == {"runAsNonRoot": True}
        assert executor["nodeSelector"]["labels"] == {"pool": "gpu"}
        assert [item["key"] for item in executor["tolerations"]] == ["gpu"]
        secrets = [item["secretName"] for item in executor["imagePullSecret"]]
        assert secrets == ["registry", "mirror"]
        assert [item["mountPath"] for item in executor["pvcMount"]] == ["/models"]
        assert [item["mountPath"] for item in executor["configMapAsVolume"]] == ["/ca"]
        assert [item["mountPath"] for item in executor["secretAsVolume"]] == ["/keys"]
        assert "/fast" in [item["mountPath"] for item in executor["emptyDirMounts"]]
    # The network is that of pods that compute on accelerators.
    assert "NCCL_DEBUG" in json.dumps(containers["exec-sft"])
    assert "NCCL_DEBUG" not in json.dumps(containers["exec-data-prep"])
    accelerator = containers["exec-sft"]["resources"]["accelerator"]
    assert accelerator["resourceType"] == "amd.com/gpu"


def test_the_store_of_a_claim_is_mounted(tmp_path: Path) -> None:
    containers, executors = compile_tasks({}, tmp_path, "cluster.claim=runs")
    for name in containers:
        (mount,) = executors[name]["pvcMount"]
        assert mount["mountPath"] == "/store" and "runs" in json.dumps(mount)


def test_without_a_security_context_there_is_none(tmp_path: Path) -> None:
    _, executors = compile_tasks({"security": "none"}, tmp_path)
    assert not any("securityContext" in executor for executor in executors.values())


@pytest.mark.parametrize(
    ("pod", "path"),
    [
        ({"env_from": ["secret/hub"]}, "env_from"),
        ({"service_account": "stages"}, "service_account"),
        ({"priority_class": "batch"}, "priority_class"),
        ({"volumes": {"/model": "image/registry/model:1"}}, "volumes"),
        ({"spec": {"hostNetwork": True}}, "spec.hostNetwork"),
        ({"spec": {"containers": [{"name": "main", "tty": True}]}}, "spec.containers[main].tty"),
        (
            {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "valueFrom": {}}]}]}},
            "spec.containers[main].env[A]",
        ),
        ({"spec": {"imagePullSecrets": None}}, "spec.imagePullSecrets"),
        ({"spec": {"nodeSelector": {"pool": None}}}, "spec.nodeSelector.pool"),
        ({"spec": {"tolerations": None}}, "spec.tolerations"),
        (
            {"spec": {"imagePullSecrets": [{"name": "a", "$patch": "delete"}]}},
            "spec.imagePullSecrets[a].$patch",
        ),
        (
            {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": None}]}]}},
            "spec.containers[main].env[A].value",
        ),
    ],
)
def test_the_rest_is_refused_by_name(pod: JsonObject, path: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Kubeflow Pipelines") as refusal:
        compile_tasks(pod, tmp_path)
    assert refusal.value.field == f"cluster.pod.{path}"


@pytest.mark.parametrize("key", ["volumes", "image_pull_secrets"])
def test_what_cluster_pod_says_has_no_second_setting(key: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=rf"^kfp\.{key}: .* is now cluster\.pod\.{key}"):
        compile_tasks({}, tmp_path, f"kfp.{key}={{claim: /data}}")
