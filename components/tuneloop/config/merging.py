"""Merge the settings of several files, such as a preset of a cluster and a user's own.

`Pipeline.read_values` (`config/loading.py`) merges files by it, and sets what ``--set`` says
afterwards. The patches `cluster.pod.spec` and of each role are merged once more when a pod is
rendered, by the same rules (`workflow/strategic_merge.py`)."""

from collections.abc import Mapping

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.pod_schema import find_patch_errors
from tuneloop.workflow.strategic_merge import merge_patches

PATCH = ".pod.spec"
"""End of the path of a setting that is a patch of a pod's spec. Any other list of a later file
replaces that of an earlier one."""


def merge_settings(earlier: JsonMapping, later: JsonMapping, path: str = "") -> JsonObject:
    """Return `earlier` with the settings of `later`, which win.

    Mappings are merged key by key, patches of pods by their own rules; any other value is replaced,
    lists among them. Neither of the two is changed, and the result shares no section with itself:
    sections that are the same by an anchor of YAML can be set apart.

    Args:
        earlier: settings.
        later: settings.
        path: of the section that both are.

    Raises:
        UserError: one of two patches of a pod is no patch.
    """
    # A list of containers is merged by their names, which a later file would else replace.
    if path.endswith(PATCH):
        for patch in (earlier, later):
            for field, value, remedy in find_patch_errors(patch, path, "PodSpec"):
                raise UserError(field, value, remedy)
        return merge_patches(earlier, later)
    merged = dict(earlier)
    for key, value in later.items():
        previous = merged.get(key)
        if isinstance(value, Mapping):
            # A copy also where nothing is merged: the values are set in place later.
            section = previous if isinstance(previous, Mapping) else {}
            inner_path = f"{path}.{key}" if path else str(key)
            merged[key] = merge_settings(section, value, inner_path)
        else:
            merged[key] = value
    return merged
