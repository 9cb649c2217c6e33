"""A patch is merged into a pod as kubectl merges it."""

import json
import random
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tuneloop.core.json_types import JsonObject
from tuneloop.workflow.strategic_merge import apply_patch, merge_patches

POD: JsonObject = {
    "containers": [
        {
            "name": "main",
            "image": "tuneloop/base:dev",
            "env": [{"name": name, "value": name.lower()} for name in "ABCD"],
            "envFrom": [{"configMapRef": {"name": "store", "optional": True}}],
            "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "2Gi"}},
            "securityContext": {"capabilities": {"drop": ["ALL"]}, "readOnlyRootFilesystem": True},
            "volumeMounts": [
                {"name": "scratch", "mountPath": "/tmp"},
                {"name": "shm", "mountPath": "/dev/shm"},
            ],
        },
        {"name": "wait", "image": "argoexec"},
    ],
    "initContainers": [{"name": "init", "image": "argoexec"}],
    "nodeSelector": {"pool": "gpu"},
    "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
    "tolerations": [{"key": "gpu", "operator": "Exists"}],
    "volumes": [{"name": "scratch", "emptyDir": {}}, {"name": "shm", "emptyDir": {}}],
}


def patch_main(**fields: Any) -> JsonObject:
    return {"containers": [{"name": "main", **fields}]}


PATCHES: dict[str, JsonObject] = {
    "scalar": {"priorityClassName": "high", "hostNetwork": True},
    "null": {"nodeSelector": None, "securityContext": {"runAsUser": None}},
    "null_of_nothing": {"affinity": None, "dnsConfig": {"options": None, "searches": ["a"]}},
    "env": patch_main(env=[{"name": "E", "value": "5"}, {"name": "B", "value": "2"}]),
    "env_order": patch_main(env=[{"name": "D", "value": "4"}, {"name": "A", "value": "1"}]),
    "env_deleted": patch_main(env=[{"name": "B", "$patch": "delete"}, {"name": "E", "value": "5"}]),
    "env_replaced": patch_main(env=[{"$patch": "replace"}, {"name": "E", "value": "5"}]),
    "env_from": patch_main(envFrom=[{"secretRef": {"name": "token"}}]),
    "env_source": patch_main(
        env=[
            {"name": "A", "value": None, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
        ]
    ),
    "resources": patch_main(resources={"limits": {"rdma/hca": "1"}}),
    "capabilities": patch_main(securityContext={"capabilities": {"add": ["IPC_LOCK"]}}),
    "mounts": patch_main(
        volumeMounts=[
            {"name": "ca", "mountPath": "/etc/ssl/certs", "readOnly": True},
            {"name": "fast", "mountPath": "/dev/shm"},
        ]
    ),
    "volumes": {
        "volumes": [
            {"name": "ca", "configMap": {"name": "ca"}},
            {"name": "shm", "$retainKeys": ["name", "hostPath"], "hostPath": {"path": "/x"}},
        ]
    },
    "volume_deleted": {"volumes": [{"name": "scratch", "$patch": "delete"}]},
    "tolerations": {"tolerations": [{"key": "spot", "operator": "Exists"}]},
    "pull_secrets": {"imagePullSecrets": [{"name": "registry"}, {"name": "mirror"}]},
    "host_aliases": {"hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}]},
    "spread": {
        "topologySpreadConstraints": [
            {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"}
        ]
    },
    "mapping_replaced": {"securityContext": {"$patch": "replace", "runAsNonRoot": True}},
    "mapping_emptied": {"securityContext": {"$patch": "delete"}},
    "containers": {
        "containers": [
            {"name": "wait", "resources": {"limits": {"cpu": "1"}}},
            {"name": "main", "tty": False},
        ],
        "initContainers": [
            {"name": "proxy", "image": "proxy:1", "restartPolicy": "Always"},
            {"name": "init", "resources": {"limits": {"cpu": "1"}}},
        ],
    },
    "container_deleted": {"containers": [{"name": "wait", "$patch": "delete"}]},
}


def draw_patch(seed: int) -> JsonObject:
    """Draw a patch that mixes items of the pod, new ones and deletions in any order."""
    stream = random.Random(seed)

    def draw_items(key: str, names: str, fields: JsonObject) -> list[JsonObject]:
        items: list[JsonObject] = []
        for name in stream.sample(names, stream.randint(0, len(names))):
            if stream.random() < 0.25:
                items.append({key: name, "$patch": "delete"})
            else:
                items.append({key: name} | fields)
        return items

    container = {
        "name": "main",
        "env": draw_items("name", "ABCDEFG", {"value": str(seed)}),
        "volumeMounts": draw_items("mountPath", "abc", {"name": "scratch"}),
    }
    volumes = draw_items("name", "xyz", {"emptyDir": {"medium": "Memory"}})
    return {"containers": [container], "volumes": volumes}


def patch_by_kubectl(pod: JsonObject, patch: JsonObject, folder: Path) -> JsonObject:
    """Apply a patch without a cluster."""
    document = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": pod}
    file = folder / "pod.json"
    file.write_text(json.dumps(document))
    command = ["kubectl", "patch", "--local", "--type=strategic", "-o", "json", "-f", str(file)]
    command += ["-p", json.dumps({"spec": patch})]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    patched: JsonObject = json.loads(result.stdout)["spec"]
    return patched


needs_kubectl = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is the reference")


@needs_kubectl
@pytest.mark.parametrize("name", PATCHES)
def test_a_patch_is_kubectls(name: str, tmp_path: Path) -> None:
    assert apply_patch(POD, PATCHES[name]) == patch_by_kubectl(POD, PATCHES[name], tmp_path)


@needs_kubectl
@pytest.mark.parametrize("seed", range(25))
def test_a_drawn_patch_is_kubectls(seed: int, tmp_path: Path) -> None:
    patch = draw_patch(seed)
    assert apply_patch(POD, patch) == patch_by_kubectl(POD, patch, tmp_path)


@pytest.mark.parametrize("second", PATCHES)
@pytest.mark.parametrize("first", ["env", "resources", "mounts", "volumes", "tolerations", "null"])
def test_merged_patches_do_what_both_do(first: str, second: str) -> None:
    once = apply_patch(POD, merge_patches(PATCHES[first], PATCHES[second]))
    twice = apply_patch(apply_patch(POD, PATCHES[first]), PATCHES[second])
    assert sort_items(once) == sort_items(twice)


def sort_items(value: Any) -> Any:
    """Return a pod whose lists are sorted: two patches in one may leave another order."""
    if isinstance(value, dict):
        return {key: sort_items(item) for key, item in value.items()}
    if isinstance(value, list):
        return sorted(map(sort_items, value), key=lambda item: json.dumps(item, sort_keys=True))
    return value


def test_neither_side_is_changed() -> None:
    pod = json.dumps(POD)
    patch = json.dumps(PATCHES["containers"])
    apply_patch(POD, PATCHES["containers"])
    merge_patches(POD, PATCHES["containers"])
    assert json.dumps(POD) == pod
    assert json.dumps(PATCHES["containers"]) == patch
