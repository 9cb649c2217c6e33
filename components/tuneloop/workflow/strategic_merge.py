"""Merge a patch into a pod as ``kubectl patch --type=strategic`` does.

A mapping is merged field by field, and a null deletes a field. A list whose items have a merge key
is merged item by item; any other list is replaced. ``$patch: delete`` deletes an item or empties a
mapping, ``$patch: replace`` replaces instead of merging, and ``$retainKeys`` names the fields of a
mapping that stay.

The rules are those of k8s.io/apimachinery's ``strategicpatch``, its order of items included. Merge
keys and types are those of `tuneloop.workflow.pod_schema`. `apply_patch` changes an object,
`merge_patches` makes one patch of two: a rule that is changed in one is changed in the other, which
`tests/unit/workflow/test_strategic_merge.py` compares.
"""

import copy
from collections.abc import Sequence
from typing import Any

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.pod_schema import DIRECTIVE, MERGE_KEYS, RETAINED, find_type

DELETING = ("delete", "replace")
"""The directives after which nothing of the original is left."""


def apply_patch(original: JsonMapping, patch: JsonMapping, kind: str = "PodSpec") -> JsonObject:
    """Return an object with a patch applied.

    Args:
        original: the object.
        patch: checked by `tuneloop.workflow.pod_schema.find_patch_errors`.
        kind: what both are: ``PodSpec``, ``PodTemplateSpec``, ``Container``.
    """
    directive = patch.get(DIRECTIVE)
    if directive == "delete":
        return {}
    if directive == "replace":
        return _drop_directives({key: value for key, value in patch.items() if key != DIRECTIVE})
    # The original is not changed: a setting may be applied to many pods.
    merged = dict(original)
    if RETAINED in patch:
        merged = {key: value for key, value in merged.items() if key in patch[RETAINED]}
    for name, value in patch.items():
        if name in (DIRECTIVE, RETAINED):
            continue
        field_type = find_type(kind, name)
        previous = merged.get(name)
        # A null in a patch is not a value, but deletes one.
        if value is None:
            merged.pop(name, None)
        elif isinstance(previous, dict) and isinstance(value, dict):
            merged[name] = apply_patch(previous, value, field_type)
        elif isinstance(previous, list) and isinstance(value, list):
            merge_key = MERGE_KEYS.get(f"{kind}.{name}")
            # Only lists with a key are merged: two tolerations have nothing to be matched by.
            if merge_key:
                item_type = field_type.removeprefix("[]")
                merged[name] = _apply_to_list(previous, value, merge_key, item_type)
            else:
                merged[name] = copy.deepcopy(value)
        else:
            merged[name] = _drop_directives(value)
    return merged


def _drop_directives(value: Any) -> Any:
    """Return a value of a patch that has no counterpart in the original: without nulls, directives
    and what these delete.
    """
    if isinstance(value, dict):
        cleaned: JsonObject = {}
        for name, inner in value.items():
            if inner is not None and name not in (DIRECTIVE, RETAINED):
                cleaned[name] = _drop_directives(inner)
        return cleaned
    if isinstance(value, list):
        return [_drop_directives(item) for item in value if not _is_directive(item)]
    return value


def _is_directive(item: Any) -> bool:
    """Say whether an item of a list only deletes another, or replaces the list."""
    return isinstance(item, dict) and item.get(DIRECTIVE) in DELETING


def _apply_to_list(
    original: Sequence[JsonMapping], patch: Sequence[JsonMapping], merge_key: str, kind: str
) -> list[JsonMapping]:
    """Return a list whose items are merged by a key, with a patch applied."""
    merged_by_key: dict[Any, JsonMapping] = {item[merge_key]: item for item in original}
    # Directives are applied first, wherever they are in the patch.
    for item in patch:
        directive = item.get(DIRECTIVE)
        if directive == "replace":
            merged_by_key.clear()
        elif directive == "delete":
            merged_by_key.pop(item[merge_key], None)
    original_keys = list(merged_by_key)
    patched_keys: list[Any] = []
    for item in patch:
        if _is_directive(item):
            continue
        key = item[merge_key]
        previous = merged_by_key.get(key)
        if previous is None:
            merged_by_key[key] = _drop_directives(item)
        else:
            merged_by_key[key] = apply_patch(previous, item, kind)
        if key not in patched_keys:
            patched_keys.append(key)
    return [merged_by_key[key] for key in _order_keys(original_keys, patched_keys)]


def _order_keys(original: Sequence[Any], patched: Sequence[Any]) -> list[Any]:
    """Order the items of a merged list as ``strategicpatch`` does: those of the patch keep the
    patch's order, and an item of the original alone comes before one of the patch only if it did so
    in the original.

    Args:
        original: keys of the original's items.
        patched: keys of the patch's items.
    """
    # An item of the patch that is new has no position, and comes before all that it may.
    position = {key: index for index, key in enumerate(original)}
    unpatched = [key for key in original if key not in patched]
    ordered: list[Any] = []
    for key in patched:
        while unpatched and key in position and position[unpatched[0]] < position[key]:
            ordered.append(unpatched.pop(0))
        ordered.append(key)
    return ordered + unpatched


def merge_patches(first: JsonMapping, second: JsonMapping, kind: str = "PodSpec") -> JsonObject:
    """Return one patch that does what `first` and then `second` would do.

    Nulls and directives are kept, since what they delete is in neither of the two.

    Args:
        first: a patch.
        second: a patch, which wins where both set a field.
        kind: what both are patches of.
    """
    if second.get(DIRECTIVE) in DELETING:
        return copy.deepcopy(dict(second))
    if first.get(DIRECTIVE) in DELETING:
        # Nothing of the original is left: what both make of nothing replaces it.
        replacement = apply_patch(apply_patch({}, first, kind), second, kind)
        return {DIRECTIVE: "replace"} | replacement
    merged: JsonObject = {}
    for name, value in first.items():
        if name not in (DIRECTIVE, RETAINED) and name in second.get(RETAINED, first):
            merged[name] = copy.deepcopy(value)
    for name, value in second.items():
        if name in (DIRECTIVE, RETAINED):
            continue
        field_type = find_type(kind, name)
        merge_key = MERGE_KEYS.get(f"{kind}.{name}")
        # The first patch may also delete a field by not naming it among those that stay.
        is_deleted = name not in first.get(RETAINED, second)
        previous = merged.get(name)
        if previous is None and (name in merged or is_deleted):
            merged[name] = _replace_value(value, merge_key)
        elif isinstance(previous, dict) and isinstance(value, dict):
            merged[name] = merge_patches(previous, value, field_type)
        elif isinstance(previous, list) and isinstance(value, list) and merge_key:
            item_type = field_type.removeprefix("[]")
            merged[name] = _merge_patch_lists(previous, value, merge_key, item_type)
        else:
            merged[name] = copy.deepcopy(value)
    if RETAINED in first or RETAINED in second:
        merged[RETAINED] = _merge_retained(first, second, merged)
    return merged


def _merge_retained(first: JsonMapping, second: JsonMapping, merged: JsonMapping) -> list[str]:
    """Return the fields that stay where one of two patches names some, or both do."""
    # Kubernetes wants each field of the patch among them.
    retained = list(merged)
    for name in first.get(RETAINED, second.get(RETAINED)):
        if name in second.get(RETAINED, first.get(RETAINED)) and name not in retained:
            retained.append(name)
    return retained


def _replace_value(value: Any, merge_key: str | None) -> Any:
    """Return a value for a patch such that it replaces the original's value, instead of being
    merged into it."""
    if isinstance(value, dict):
        return {DIRECTIVE: "replace"} | _drop_directives(value)
    if isinstance(value, list) and merge_key:
        return [{DIRECTIVE: "replace"}, *copy.deepcopy(value)]
    return copy.deepcopy(value)


def _merge_patch_lists(
    first: Sequence[JsonMapping], second: Sequence[JsonMapping], merge_key: str, kind: str
) -> list[JsonMapping]:
    """Return one list of a patch that does what two would do one after the other."""
    # Whatever was to be merged into the list is replaced with it.
    if any(item.get(DIRECTIVE) == "replace" for item in second):
        return list(copy.deepcopy(second))
    # An item may be deleted and added again: directives are applied first.
    directives: list[JsonMapping] = []
    items_by_key: dict[Any, JsonMapping] = {}
    for item in first:
        if item.get(DIRECTIVE) == "replace":
            directives.append({DIRECTIVE: "replace"})
        elif item.get(DIRECTIVE) == "delete":
            directives.append(item)
        else:
            items_by_key[item[merge_key]] = item
    for item in second:
        if item.get(DIRECTIVE) == "delete":
            items_by_key.pop(item[merge_key], None)
            if item not in directives:
                directives.append(item)
    for item in second:
        if not _is_directive(item):
            key = item[merge_key]
            items_by_key[key] = merge_patches(items_by_key.get(key, {}), item, kind)
    return directives + list(items_by_key.values())
