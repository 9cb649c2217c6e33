"""A patch of a pod is checked by the fields of Kubernetes, offline."""

from pathlib import Path

import pytest

from tests.pod_schema import build_schema, dump_schema
from tuneloop.core.json_types import JsonObject
from tuneloop.workflow.pod_schema import FILE, MERGE_KEYS, find_patch_errors, find_type, read_schema

VALID: list[JsonObject] = [
    {},
    {"metadata": {"annotations": {"sidecar.istio.io/inject": "false"}}},
    {"spec": {"runtimeClassName": "nvidia", "hostNetwork": True, "priority": 5}},
    {"spec": {"nodeSelector": None}},
    {"spec": {"containers": [{"name": "main", "env": [{"name": "A", "$patch": "delete"}]}]}},
    {
        "spec": {
            "containers": [{"name": "main", "resources": {"limits": {"cpu": 2, "rdma/hca": "1"}}}]
        }
    },
    {"spec": {"volumes": [{"name": "a", "$retainKeys": ["name", "emptyDir"], "emptyDir": {}}]}},
    {"spec": {"volumes": [{"$patch": "replace"}, {"name": "a", "emptyDir": {"sizeLimit": "4Gi"}}]}},
    {"spec": {"containers": [{"name": "main", "livenessProbe": {"httpGet": {"port": "http"}}}]}},
]
INVALID: list[tuple[JsonObject, str, str]] = [
    ({"spce": {}}, "spce", "did you mean spec?"),
    (
        {"spec": {"containers": [{"name": "main", "securityContext": {"runAsUsr": 5}}]}},
        "spec.containers[main].securityContext.runAsUsr",
        "is no field of a SecurityContext: did you mean runAsUser?",
    ),
    ({"spec": {"hostNetwork": "yes"}}, "spec.hostNetwork", "is not true or false"),
    ({"spec": {"priority": True}}, "spec.priority", "is not a whole number"),
    ({"spec": {"nodeSelector": {"zone": 1}}}, "spec.nodeSelector.zone", "is not a text"),
    ({"spec": {"tolerations": {"key": "gpu"}}}, "spec.tolerations", "is not a list"),
    ({"spec": []}, "spec", "is not a mapping"),
    (
        {"spec": {"containers": [{"env": []}]}},
        "spec.containers[0]",
        "has no name, by which it is merged",
    ),
    (
        {"spec": {"containers": [{"name": "main", "resources": {"limits": {"cpu": "2 cores"}}}]}},
        "spec.containers[main].resources.limits.cpu",
        "is not a quantity",
    ),
    ({"spec": {"affinity": {"$patch": "remove"}}}, "spec.affinity.$patch", "is no directive"),
    ({"spec": {"affinity": {"$retainKeys": "a"}}}, "spec.affinity.$retainKeys", "is not a list"),
]


@pytest.mark.parametrize("patch", VALID)
def test_what_kubernetes_takes_passes(patch: JsonObject) -> None:
    assert list(find_patch_errors(patch)) == []


@pytest.mark.parametrize(("patch", "path", "text"), INVALID, ids=lambda item: str(item)[:40])
def test_a_refusal_names_the_path(patch: JsonObject, path: str, text: str) -> None:
    ((refused_path, _, remedy),) = find_patch_errors(patch)
    assert refused_path == path
    assert text in remedy


def test_the_file_is_what_the_library_has() -> None:
    assert Path(FILE).read_text() == dump_schema(build_schema())


def test_every_field_of_the_older_client_is_known() -> None:
    client = pytest.importorskip("kubernetes.client")
    missing: list[str] = []
    for kind, fields in read_schema().items():
        model = getattr(client, f"V1{kind}", None)
        for field in model.attribute_map.values() if model else ():
            # OpenAPI's generator for Python writes an underscore before a word of the language.
            if field.lstrip("_") not in {name.lstrip("_") for name in fields}:
                missing.append(f"{kind}.{field}")
    # Kubernetes 1.31 has moved this one's fields a level up.
    assert missing == ["PodResourceClaim.source"]


@pytest.mark.parametrize("field", MERGE_KEYS)
def test_a_merge_key_is_a_field_of_the_lists_items(field: str) -> None:
    kind, _, name = field.partition(".")
    item = find_type(kind, name)
    assert item.startswith("[]")
    assert MERGE_KEYS[field] in read_schema()[item.removeprefix("[]")]
