"""Fields that every pod of ours has: image, store, scratch disk, requests, rights, and how it is started again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tuneloop.argo import claims
from tuneloop.core.attempts import ATTEMPT, LAST_END, MORE_MEMORY
from tuneloop.core.ends import RETRY_STAGE, RETRY_STEP
from tuneloop.workflow.settings import Cluster, Share

SCRATCH = "/tmp"
OUTPUTS = f"{SCRATCH}/tuneloop/outputs"
CLAIM = "/store"
"""Where `Cluster.claim` is mounted."""
STORE = "tuneloop-store"
"""ConfigMap and Secret with the store's ``AWS_*`` settings; optional, both."""
PLAIN, SECRET = ("AWS_ENDPOINT_URL", "AWS_REGION"), ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""These settings by where they stand, ConfigMap or Secret."""
PAUSE = "10s"
"""Between two attempts. Constant: the controller computes ``duration * factor^n`` in 64-bit nanoseconds, which
overflows after some thirty attempts (``operator.go``, ``processNodeRetries``); and no ``maxDuration``, which is a
deadline counted from the start of the first attempt."""
LIMIT = 1000
"""Of attempts, for pods that end before they can count (`tuneloop.core.attempts`): four preemptions an hour for ten
days. The controller keeps to the pause only where a limit is given."""
NOBODY = {
    **{"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000, "fsGroup": 1000},
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Whom a pod's containers run as, none of them root."""
RESTRICTED = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def pod_fields(image: str, accelerator: bool, cluster: Cluster) -> dict[str, Any]:
    """Return what every pod of ours has: an image, a way to its store, a scratch disk, requests, no rights."""
    from hera.workflows import ConfigMapEnvFrom, EmptyDirVolume, ExistingVolume, Resources, SecretEnvFrom, models

    name = cluster.images.format(image=image)
    labels = {"app.kubernetes.io/component": image}
    if accelerator:
        labels |= cluster.queue_labels
    gpus = cluster.gpus if accelerator else 0
    share = cluster.share if accelerator else None
    shared = shared_fields(share, image) if share else {}
    labels |= shared.pop("labels", {})
    return {
        "image": name,
        "image_pull_policy": "IfNotPresent",
        "labels": labels,
        "env": [
            models.EnvVar(name="TUNELOOP_OUTPUTS", value=OUTPUTS),
            models.EnvVar(name="TUNELOOP_IMAGE", value=name),
            models.EnvVar(name="TUNELOOP_NODE_WORKFLOW", value="{{workflow.name}}"),
            models.EnvVar(name="TUNELOOP_NODE_NAME", value="{{node.name}}"),
        ],
        "env_from": [ConfigMapEnvFrom(name=STORE, optional=True), SecretEnvFrom(name=STORE, optional=True)],
        "resources": Resources(
            cpu_request=cluster.cpu,
            memory_request=(share and share.request) or cluster.memory_request,
            memory_limit=cluster.memory_limit,
            gpus=gpus or None,
        ),
        "security_context": models.SecurityContext.model_validate(RESTRICTED),
        "volumes": [
            EmptyDirVolume(name="scratch", mount_path=SCRATCH),
            *([ExistingVolume(name="store", claim_name=cluster.claim, mount_path=CLAIM)] if cluster.claim else ()),
        ],
        **shared,
    }


def shared_fields(share: Share, image: str) -> dict[str, Any]:
    """Return what a template of a stage that shares devices has beside."""
    from hera.workflows.models import Affinity

    role = claims.role_of(image)
    patch, placed = claims.pod_patch(share, role), claims.build_affinity(share, role)
    fields: dict[str, Any] = {"labels": claims.build_sharing_labels(share, role)}
    if patch:
        fields["pod_spec_patch"] = json.dumps(patch, separators=(",", ":"))
    if placed:
        fields["affinity"] = Affinity.model_validate(placed)
    return fields


def retry_fields(expression: str = RETRY_STAGE) -> dict[str, Any]:
    """Return how a pod of ours is started again: by the class of its end."""
    from hera.workflows import RetryPolicy, RetryStrategy, models

    backoff, always = models.Backoff(duration=PAUSE), RetryPolicy.always
    return {"retry_strategy": RetryStrategy(limit=LIMIT, retry_policy=always, expression=expression, backoff=backoff)}


def step_fields(account: str, cluster: Cluster) -> dict[str, Any]:
    """Return what a small step of ours has, one that asks the API server for something as a service account."""
    small = cluster.model_copy(update={"cpu": "50m", "memory": "256Mi"})
    rights = {"service_account_name": account, "automount_service_account_token": True}
    return {**rights, **pod_fields("base", False, small), **retry_fields(RETRY_STEP)}


def retried_pod_fields(
    image: str, accelerator: bool, cluster: Cluster, expression: str = RETRY_STAGE, env: Sequence[Any] = ()
) -> dict[str, Any]:
    """Return `pod_fields` and `retry_fields` of a pod that knows the attempts before it and may get more memory."""
    from hera.workflows.models import EnvVar

    fields = pod_fields(image, accelerator, cluster)
    # What it is told of the attempts before it: `tuneloop.core.attempts`.
    before = {ATTEMPT: "{{retries}}", LAST_END: "{{lastRetry.status}} {{lastRetry.exitCode}} {{lastRetry.message}}"}
    if cluster.memory_on_retry:
        before[MORE_MEMORY] = cluster.memory_on_retry
        limit = f"{{{{=asInt(retries) > 0 ? '{cluster.memory_on_retry}' : '{cluster.memory_limit}'}}}}"
        patch = json.loads(fields.get("pod_spec_patch", "{}"))
        patch.setdefault("containers", []).append({"name": "main", "resources": {"limits": {"memory": limit}}})
        fields["pod_spec_patch"] = json.dumps(patch, separators=(",", ":"))
    fields["env"] += [*(EnvVar(name=name, value=value) for name, value in before.items()), *env]
    return fields | retry_fields(expression)
