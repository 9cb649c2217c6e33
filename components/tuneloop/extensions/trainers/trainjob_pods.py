"""What a TrainJob says of its pods. They are its runtime's: an override reaches a part of them.

A field that is added to `PodSettings` (`workflow/pod_settings.py`) is either part of
`build_spec_patch`, whose unknown parts are refused here by their paths, or has to be written or
refused by its name in `build_override`. `kfp/task_pod.py` does the same for KFP (`MISSING` there).
"""

from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.pod_schema import list_deletions
from tuneloop.workflow.pod_settings import MAIN, RESTRICTED_POD, fit_patch
from tuneloop.workflow.settings import Cluster
from tuneloop.workflow.strategic_merge import apply_patch

NODE = "node"
"""The name of the job that trains in Trainer's runtimes, and of its container."""
OVERRIDDEN = (
    "affinity",
    "imagePullSecrets",
    "nodeSelector",
    "schedulingGates",
    "tolerations",
    "volumes",
)
"""The fields of a pod's spec that Trainer 2.1 lets a TrainJob override, of those that
`cluster.trainer.pod` can set.
"""
REMEDY = "a TrainJob cannot set it: set it in the runtime, or render a JobSet"


def build_override(cluster: Cluster, labels: JsonMapping) -> JsonObject:
    """Build the override of a TrainJob's pods. The variables and resources of their container are
    fields of the TrainJob itself.

    Raises:
        UserError: a setting is one that a TrainJob has no field for.
    """
    settings = cluster.pod_settings("trainer")
    # Trainer ignores fields that it does not know, so that nothing would say what is missing.
    if settings.pod_security != RESTRICTED_POD:
        raise cluster.refuse_pod_setting("trainer", "security", settings.security, REMEDY)
    for name in ("env_from", "priority_class"):
        if getattr(settings, name):
            raise cluster.refuse_pod_setting("trainer", name, getattr(settings, name), REMEDY)
    if settings.network.rdma:
        raise cluster.refuse_pod_setting("trainer", "network", settings.network.rdma, REMEDY)
    metadata: JsonObject = {"labels": dict(labels) | settings.build_labels()}
    annotations = settings.build_annotations()
    if annotations:
        metadata["annotations"] = annotations
    override: JsonObject = {"targetJobs": [{"name": NODE}], "metadata": metadata}
    spec = _build_spec(cluster, fit_patch(cluster.build_spec_patch("trainer")))
    if settings.service_account:
        spec["serviceAccountName"] = settings.service_account
    if spec:
        override["spec"] = spec
    return override


def _build_spec(cluster: Cluster, patch: JsonMapping) -> JsonObject:
    """Build the fields of a pod's spec in the override: those of the role, then those of its
    patch.
    """
    mounts: list[JsonObject] = []
    fields: JsonObject = {}
    for name, value in patch.items():
        if name == "containers":
            # Of the container itself an override has only the mounts.
            mounts = _find_mounts(cluster, value)
        elif name in OVERRIDDEN:
            fields[name] = value
        else:
            raise cluster.refuse_pod_setting("trainer", f"spec.{name}", value, REMEDY)
    spec = apply_patch(cluster.trainer.place, fields)
    if mounts:
        # Trainer's webhook refuses variables here: those are `trainer.env`.
        spec["containers"] = [{"name": NODE, "volumeMounts": mounts}]
    return spec


def _find_mounts(cluster: Cluster, containers: list[JsonObject]) -> list[JsonObject]:
    """Return the volume mounts in a patch of containers."""
    mounts: list[JsonObject] = []
    for container in containers:
        for name, value in container.items():
            if name == "volumeMounts":
                # An override adds mounts; it cannot take one of the runtime's away.
                path = f"spec.containers[{MAIN}].{name}"
                for deleted_path, deleted in list_deletions(value, path):
                    raise cluster.refuse_pod_setting("trainer", deleted_path, deleted, REMEDY)
                mounts += value
            elif name not in ("name", "env", "resources"):
                path = f"spec.containers[{MAIN}].{name}"
                raise cluster.refuse_pod_setting("trainer", path, value, REMEDY)
    return mounts
