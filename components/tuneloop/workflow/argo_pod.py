"""The pod that Argo makes of a workflow's template, with the patches of both applied.

Checks before a run look at it: `planning/pod_paths.py` (paths), `cluster/pod_requests.py` and
`cluster/pod_shapes.py` (room, limits). It has only the fields that they ask for: a check of another
field, such as affinity, finds it here only where a patch sets it.
"""

import json
from collections.abc import Iterator

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.manifest import parse_applied_object
from tuneloop.workflow.pod_settings import ARGO_CONTAINERS, ARGO_INIT_CONTAINERS, MAIN
from tuneloop.workflow.strategic_merge import apply_patch


def list_pods(spec: JsonMapping, template: JsonMapping) -> Iterator[tuple[JsonObject, int]]:
    """Yield the specs of the pods of a template that run at the same time, each with their number.

    They are those of a JobSet that the template applies, or the one that Argo makes. A template
    that only calls others has none, and neither has one that applies an object of another kind.

    Args:
        spec: of the workflow.
        template: one of its templates.
    """
    job = parse_applied_object(template)
    if job:
        for replicated in job["spec"].get("replicatedJobs", ()):
            job_spec = replicated["template"]["spec"]
            yield job_spec["template"]["spec"], job_spec.get("parallelism", 1)
    elif "container" in template or "script" in template:
        yield build_argo_pod(spec, template), 1


def build_argo_pod(spec: JsonMapping, template: JsonMapping) -> JsonObject:
    """Build the spec of the pod that Argo makes of a template with a container.

    Args:
        spec: of the workflow.
        template: one of its templates.
    """
    main = dict(template.get("container") or template.get("script") or {})
    main["name"] = MAIN
    containers: list[JsonObject] = [main]
    containers += [{"name": name} for name in ARGO_CONTAINERS]
    containers += template.get("sidecars") or ()
    init_containers: list[JsonObject] = [{"name": name} for name in ARGO_INIT_CONTAINERS]
    init_containers += template.get("initContainers") or ()
    pod: JsonObject = {"containers": containers, "initContainers": init_containers}
    pod["volumes"] = [*(spec.get("volumes") or ()), *(template.get("volumes") or ())]
    for field in ("nodeSelector", "tolerations"):
        value = template.get(field) or spec.get(field)
        if value:
            pod[field] = value
    # Argo's controller applies the workflow's patch first: the template's has the last word.
    for owner in (spec, template):
        pod = apply_patch(pod, json.loads(owner.get("podSpecPatch") or "{}"))
    return pod
