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


VALUES: dict[str, JsonObject] = {
    "securityContext": {"runAsUser": 1, "fsGroup": 2, "seccompProfile": {"type": "a"}},
    "nodeSelector": {"pool": "a", "zone": "b"},
    "dnsConfig": {"searches": ["a"], "nameservers": ["b"]},
}
"""Mapping of a pod's spec → fields of it."""


def draw_changes(stream: random.Random, is_patch: bool) -> JsonObject:
    """Draw a pod's spec, or a patch of one with nulls and directives at all levels."""

    def draw_mapping(fields: JsonObject) -> Any:
        outcome = stream.random()
        if is_patch and outcome < 0.15:
            return None
        if is_patch and outcome < 0.3:
            return {"$patch": "delete"}
        mapping: JsonObject = {"$patch": "replace"} if is_patch and outcome < 0.4 else {}
        for name, value in fields.items():
            choice = stream.random()
            if isinstance(value, dict) and choice < 0.7:
                mapping[name] = draw_mapping(value)
            elif choice < 0.2 and is_patch:
                mapping[name] = None
            elif choice < 0.6:
                mapping[name] = f"{value}{stream.random()}"
        return mapping

    def draw_items(key: str, fields: JsonObject) -> Any:
        if is_patch and stream.random() < 0.1:
            return None
        items: list[JsonObject] = []
        if is_patch and stream.random() < 0.1:
            items.append({"$patch": "replace"})
        for name in stream.sample("abc", stream.randint(0, 3)):
            if is_patch and stream.random() < 0.35:
                items.append({key: name, "$patch": "delete"})
                continue
            item: JsonObject = {key: name}
            for field, value in fields.items():
                if stream.random() < 0.6:
                    item[field] = draw_mapping(value)
            if is_patch and stream.random() < 0.2:
                item["$retainKeys"] = list(item)
            items.append(item)
        return items

    spec = {name: draw_mapping(fields) for name, fields in VALUES.items() if stream.random() < 0.7}
    spec["volumes"] = draw_items("name", {"configMap": {"name": "a"}, "hostPath": {"path": "b"}})
    container: JsonObject = {"name": "main", "env": draw_items("name", {"valueFrom": {"c": "d"}})}
    return spec | {"containers": [container]}


@pytest.mark.parametrize("seed", range(10))
def test_drawn_patches_that_are_merged_do_what_both_do(seed: int) -> None:
    stream = random.Random(seed)
    for _ in range(300):
        pod = draw_changes(stream, is_patch=False)
        first = draw_changes(stream, is_patch=True)
        second = draw_changes(stream, is_patch=True)
        twice = apply_patch(apply_patch(pod, first), second)
        once = apply_patch(pod, merge_patches(first, second))
        assert sort_items(once) == sort_items(twice), json.dumps([pod, first, second])


@needs_kubectl
def test_what_is_deleted_and_added_again_is_kubectls(tmp_path: Path) -> None:
    first = {"volumes": [{"name": "shm", "$patch": "delete"}], "nodeSelector": None}
    first["securityContext"] = {"$patch": "delete"}
    second = {
        "volumes": [{"name": "shm", "hostPath": {"path": "/x"}}],
        "nodeSelector": {"disk": "fast"},
        "securityContext": {"runAsUser": 5},
    }
    merged = merge_patches(first, second)
    patched = patch_by_kubectl(POD, merged, tmp_path)
    assert patched == apply_patch(POD, merged)
    assert {"name": "shm", "hostPath": {"path": "/x"}} in patched["volumes"]
    assert patched["nodeSelector"] == {"disk": "fast"}
    assert patched["securityContext"] == {"runAsUser": 5}


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
