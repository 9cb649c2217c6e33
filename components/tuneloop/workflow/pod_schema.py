"""Check a patch of a pod against the fields that Kubernetes has, without a cluster.

The fields and their types are in ``pod_schema.json``, generated from a library of Kubernetes' API:
``python -m tests.pod_schema`` writes it anew; it is not changed by hand. A release of Kubernetes
adds fields; what this one lacks is refused. `workflow/strategic_merge.py` merges by the same fields
and by `MERGE_KEYS`.
"""

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuneloop.core.errors import suggest_name
from tuneloop.core.json_types import JsonMapping, JsonObject

FILE = Path(__file__).with_suffix(".json")
ROOT = "PodTemplateSpec"
# The form of a quantity, for messages about a patch; `workflow/quantities.py` computes with them.
QUANTITY = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([KMGTPE]i|[numkMGTPE]|[eE][+-]?\d+)?")
SCALARS: dict[str, tuple[tuple[type, ...], str]] = {
    "string": ((str,), "a text (quote numbers and true or false)"),
    "integer": ((int,), "a whole number"),
    "number": ((int, float), "a number"),
    "boolean": ((bool,), "true or false"),
    "int-or-string": ((int, str), "a whole number or a text"),
    "quantity": ((int, float, str), "a quantity such as 500m, 2 or 4Gi"),
    "object": ((dict,), "a mapping"),
}
"""Type → the Python types of its values, and what it is called in a message."""
DIRECTIVE = "$patch"
DIRECTIVES = ("delete", "replace", "merge")
RETAINED = "$retainKeys"
"""Names the fields of a mapping that a patch leaves there."""
MERGE_KEYS = {
    "Container.env": "name",
    "Container.ports": "containerPort",
    "Container.volumeDevices": "devicePath",
    "Container.volumeMounts": "mountPath",
    "ObjectMeta.ownerReferences": "uid",
    "PodSpec.containers": "name",
    "PodSpec.ephemeralContainers": "name",
    "PodSpec.hostAliases": "ip",
    "PodSpec.imagePullSecrets": "name",
    "PodSpec.initContainers": "name",
    "PodSpec.resourceClaims": "name",
    "PodSpec.schedulingGates": "name",
    "PodSpec.topologySpreadConstraints": "topologyKey",
    "PodSpec.volumes": "name",
}
"""List of objects → the field by which its items are merged (``patchMergeKey`` in
``k8s.io/api/core/v1/types.go``). All other lists are replaced, tolerations and ``envFrom`` among
them.
"""


@functools.cache
def read_schema() -> JsonObject:
    """Read object → field → type."""
    schema: JsonObject = json.loads(FILE.read_text())
    return schema


def find_type(kind: str, field: str) -> str:
    """Return the type of an object's field, such as ``[]EnvVar``; empty for a field or an object
    that is not known.
    """
    fields: dict[str, str] = read_schema().get(kind, {})
    return fields.get(field, "")


def find_patch_errors(
    patch: Any, path: str = "", kind: str = ROOT
) -> Iterator[tuple[str, Any, str]]:
    """Find what Kubernetes would refuse in a strategic-merge patch.

    Args:
        patch: an object of the patch.
        path: where it is, for messages.
        kind: what it is a patch of: ``PodTemplateSpec``, ``PodSpec``, ``ObjectMeta``.

    Yields:
        The path, the value and what is wrong with it.
    """
    if not isinstance(patch, dict):
        yield path, patch, f"is not a mapping with fields of a {kind}"
        return
    fields: JsonMapping = read_schema()[kind]
    for name, value in patch.items():
        inner_path = f"{path}.{name}" if path else str(name)
        # Directives are no fields, but may be in any object of a patch.
        if name == DIRECTIVE:
            if value not in DIRECTIVES:
                yield inner_path, value, f"is no directive: known: {', '.join(DIRECTIVES)}"
        elif name == RETAINED:
            if not isinstance(value, list):
                yield inner_path, value, "is not a list of fields"
        elif name not in fields:
            yield inner_path, value, f"is no field of a {kind}: {suggest_name(str(name), fields)}"
        elif value is not None:
            # A null deletes the field.
            yield from _check_value(value, inner_path, fields[name], f"{kind}.{name}")


def _check_value(value: Any, path: str, kind: str, field: str) -> Iterator[tuple[str, Any, str]]:
    """Check a value of the type `kind`; `field` is the object and its field, for merge keys."""
    if kind.startswith("[]"):
        yield from _check_list(value, path, kind[2:], field)
    elif kind.startswith("{}"):
        if not isinstance(value, dict):
            yield path, value, "is not a mapping"
            return
        # Keys are the user's own: labels, resources.
        for key, inner in value.items():
            if inner is not None and key != DIRECTIVE:
                yield from _check_value(inner, f"{path}.{key}", kind[2:], "")
    elif kind in SCALARS:
        types, expected = SCALARS[kind]
        # For Python a truth value is a number.
        is_valid = isinstance(value, types) and (kind == "boolean" or not isinstance(value, bool))
        if kind == "quantity" and not QUANTITY.fullmatch(str(value)):
            is_valid = False
        if not is_valid:
            yield path, value, f"is not {expected}"
    else:
        yield from find_patch_errors(value, path, kind)


def _check_list(value: Any, path: str, kind: str, field: str) -> Iterator[tuple[str, Any, str]]:
    """Check a list; items that are merged by a key have it, and are named by it in messages."""
    if not isinstance(value, list):
        yield path, value, "is not a list"
        return
    merge_key = MERGE_KEYS.get(field)
    for index, item in enumerate(value):
        name: Any = index
        if isinstance(item, dict) and merge_key:
            if item == {DIRECTIVE: "replace"}:
                # It is about the whole list.
                continue
            if merge_key not in item:
                remedy = f"has no {merge_key}, by which it is merged: add it"
                yield f"{path}[{index}]", item, remedy
                continue
            name = item[merge_key]
        yield from _check_value(item, f"{path}[{name}]", kind, "")


def list_deletions(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of each null and directive in a patch.

    Trainer and Kubeflow Pipelines can only add to a pod, and so refuse them
    (`extensions/trainers/trainjob_pods.py`, `kfp/task_pod.py`).
    """
    if value is None:
        yield path, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            if name in (DIRECTIVE, RETAINED):
                yield f"{path}.{name}", inner
            else:
                yield from list_deletions(inner, f"{path}.{name}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            name = item.get("name", index) if isinstance(item, dict) else index
            yield from list_deletions(item, f"{path}[{name}]")
