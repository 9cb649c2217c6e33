"""Fields of every tuneloop pod: image, store, scratch disk, requests, permissions, and its retries."""

import json
from collections.abc import Iterable, Sequence
from typing import Any

from tuneloop.argo import claims
from tuneloop.core.attempts import ATTEMPT, LAST_END, MORE_MEMORY
from tuneloop.core.component import Component
from tuneloop.core.ends import RETRY_STAGE, RETRY_STEP
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.server_token import VARIABLE
from tuneloop.inference.capabilities import Capabilities, find_capabilities
from tuneloop.workflow.plan import PodResources
from tuneloop.workflow.settings import (
    AUTO,
    GRACE_S,
    SANDBOX,
    TOKEN_KEY,
    TOKEN_SECRET,
    Cluster,
    ResourceRole,
    Resources,
)

SCRATCH = "/tmp"
SHM = "/dev/shm"
OUTPUTS = f"{SCRATCH}/tuneloop/outputs"
CLAIM = "/store"
"""Where `Cluster.claim` is mounted."""
TOKENS = "/run/tuneloop/server-token"
"""Where the Secret `TOKEN_SECRET` is mounted."""
STORE = "tuneloop-store"
"""ConfigMap and Secret with the store's ``AWS_*`` settings; optional, both."""
PLAIN = ("AWS_ENDPOINT_URL", "AWS_REGION")
SECRET = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""The kind of object, ConfigMap or Secret → its settings."""
PAUSE = "10s"
"""Pause between attempts. It is constant: ``duration * factor^n`` in 64-bit nanoseconds overflows after some thirty
attempts (Argo's ``processNodeRetries``). No ``maxDuration``, which counts from the start of the first attempt."""
LIMIT = 1000
"""Limit of attempts, for pods that end before they can count them (`tuneloop.core.attempts`): four preemptions an hour
for ten days. The controller only respects the pause if there is a limit."""
SMALL = {"cpu": "50m", "memory": "256Mi", "memory_on_retry": ""}
"""Resources of a pod that only talks to the API server."""
EXECUTOR = {"requests": {"cpu": "10m", "memory": "64Mi"}}
"""Resources of Argo's own containers in a pod."""
NOBODY = {
    "runAsNonRoot": True,
    "runAsUser": 1000,
    "runAsGroup": 1000,
    "fsGroup": 1000,
    "seccompProfile": {"type": "RuntimeDefault"},
}
"""Security context of a pod: its containers do not run as root."""
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
TOKEN_SOURCES: list[JsonObject] = [
    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    {
        "downwardAPI": {
            "items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]
        }
    },
]
"""Files of a projected volume with the token of a pod's account."""


def read_engine(component: Component, given: JsonMapping) -> Capabilities | None:
    """Return what the engine can do that a stage samples with, by its parameters; None where it
    does not sample."""
    field = component.Params.model_fields.get("engine")
    kind = given.get("engine", field and field.default)
    return find_capabilities(kind) if kind else None


def find_role(component: Component, given: JsonMapping, wired: Iterable[str] = ()) -> ResourceRole:
    """Find the resource role of a stage's pod: cpu, if it only calls a server. `wired`: parameters set by the graph."""
    engine = read_engine(component, given)
    served = given.get("endpoint") or "endpoint" in wired
    is_client = engine is not None and (not engine.in_process or (engine.serves and served))
    if not component.accelerator or is_client:
        return "cpu"
    if component.role == "trainer" or component.role == "scorer":
        return component.role
    return "sampler" if component.image == "rollout" else "scorer"


def plan_resources(role: ResourceRole, cluster: Cluster) -> PodResources:
    """Return what a pod of a role requests, before its memory is estimated (`tuneloop.argo.memory_estimate`)."""
    own = cluster.resources(role)
    share = None if role == "cpu" else cluster.share
    return PodResources(
        cpu=own.cpu,
        memory_request=(share and share.request) or own.memory_request,
        memory_limit=own.memory_limit,
        accelerators=cluster.count_gpus(role),
        shared_memory=own.shm,
    )


def pod_fields(
    image: str, role: ResourceRole, cluster: Cluster, resources: PodResources | None = None
) -> JsonObject:
    """Return the fields of every tuneloop pod: image, access to the store, disks, requests, placement, no rights.

    Args:
        image: the logical one: base, trainer, rollout or ray.
        role: what the pod computes.
        cluster: has its place, its queue and the names of images.
        resources: what the pod requests; None: what its role does.
    """
    from hera.workflows import (
        ConfigMapEnvFrom,
        EmptyDirVolume,
        ExistingVolume,
        Resources,
        SecretEnvFrom,
        models,
    )

    name = cluster.images.format(image=image)
    wanted = resources or plan_resources(role, cluster)
    shared_memory: Any = None if wanted.shared_memory == AUTO else wanted.shared_memory
    return {
        "image": name,
        "image_pull_policy": "IfNotPresent",
        "env": [
            models.EnvVar(name="TUNELOOP_OUTPUTS", value=OUTPUTS),
            models.EnvVar(name="TUNELOOP_IMAGE", value=name),
            models.EnvVar(name="TUNELOOP_NODE_WORKFLOW", value="{{workflow.name}}"),
            models.EnvVar(name="TUNELOOP_NODE_NAME", value="{{node.name}}"),
            *(
                models.EnvVar(name=name, value=value)
                for name, value in cluster.sandbox_environment.items()
            ),
        ],
        "env_from": [
            ConfigMapEnvFrom(name=STORE, optional=True),
            SecretEnvFrom(name=STORE, optional=True),
        ],
        "resources": Resources(
            cpu_request=wanted.cpu,
            memory_request=wanted.memory_request,
            memory_limit=wanted.memory_limit,
            gpus=wanted.accelerators or None,
        ),
        "security_context": models.SecurityContext.model_validate(RESTRICTED),
        "volumes": [
            EmptyDirVolume(name="scratch", mount_path=SCRATCH),
            *(
                [ExistingVolume(name="store", claim_name=cluster.claim, mount_path=CLAIM)]
                if cluster.claim
                else ()
            ),
            *([_mount_secret("sandbox", *SANDBOX)] if cluster.sandbox_environment else ()),
            *(
                [
                    EmptyDirVolume(
                        name="shm", mount_path=SHM, medium="Memory", size_limit=shared_memory
                    )
                ]
                if wanted.shared_memory
                else ()
            ),
        ],
        **role_fields(image, role, cluster),
    }


def mount_token(made: Any) -> None:
    """Mount the token of the workflow's servers as a file into a template's pod, if `submit` has made one."""
    from hera.workflows import models

    made.env = [*made.env, models.EnvVar(name=VARIABLE, value=f"{TOKENS}/{TOKEN_KEY}")]
    made.volumes = [*made.volumes, _mount_secret("server-token", TOKEN_SECRET, TOKENS)]


def _mount_secret(name: str, secret: str, path: str) -> Any:
    """Return the files of a Secret, if there is one, as a volume."""
    from hera.workflows import SecretVolume

    options: Any = {"secret_name": secret, "optional": True, "default_mode": 0o440}
    return SecretVolume(name=name, mount_path=path, **options)


def role_fields(image: str, role: ResourceRole, cluster: Cluster) -> JsonObject:
    """Return how a pod of a role is admitted, where it may run, and how it is ended."""
    from hera.workflows.models import Affinity

    own = cluster.resources(role)
    share = None if role == "cpu" else cluster.share
    labels = {"app.kubernetes.io/component": image, **cluster.build_queue_labels(role)}
    patch: JsonObject = (
        {} if own.grace_s == GRACE_S else {"terminationGracePeriodSeconds": own.grace_s}
    )
    fields = place_fields(own)
    if share:
        of = claims.role_of(image)
        labels |= claims.build_sharing_labels(share, of)
        patch |= claims.pod_patch(share, of)
        if placed := claims.build_affinity(share, of):
            fields["affinity"] = Affinity.model_validate(placed)
    if patch:
        fields["pod_spec_patch"] = json.dumps(patch, separators=(",", ":"))
    return {**fields, "labels": labels}


def place_fields(own: Resources) -> JsonObject:
    """Return the fields of a template that say on which nodes its pod may run."""
    return {
        "node_selector": own.place.get("nodeSelector"),
        "tolerations": own.place.get("tolerations"),
    }


def retry_fields(expression: str = RETRY_STAGE) -> JsonObject:
    """Return the fields by which a tuneloop pod is started again, depending on the class of its end."""
    from hera.workflows import RetryPolicy, RetryStrategy, models

    backoff = models.Backoff(duration=PAUSE)
    always = RetryPolicy.always
    return {
        "retry_strategy": RetryStrategy(
            limit=LIMIT, retry_policy=always, expression=expression, backoff=backoff
        )
    }


def step_fields(account: str, cluster: Cluster) -> JsonObject:
    """Return the fields of a small step that calls the API server with a service account."""
    rights = {"service_account_name": account, "automount_service_account_token": True}
    return {
        **rights,
        **pod_fields("base", "cpu", cluster.adjust_role("cpu", **SMALL)),
        **retry_fields(RETRY_STEP),
    }


def retried_pod_fields(
    image: str,
    role: ResourceRole,
    cluster: Cluster,
    expression: str = RETRY_STAGE,
    env: Sequence[Any] = (),
    resources: PodResources | None = None,
) -> JsonObject:
    """Return `pod_fields` and `retry_fields` of a pod that is told of earlier attempts and may get more memory."""
    from hera.workflows.models import EnvVar

    fields = pod_fields(image, role, cluster, resources)
    own = cluster.resources(role)
    # What the pod is told of earlier attempts: see `tuneloop.core.attempts`.
    before = {
        ATTEMPT: "{{retries}}",
        LAST_END: "{{lastRetry.status}} {{lastRetry.exitCode}} {{lastRetry.message}}",
    }
    if own.memory_on_retry:
        before[MORE_MEMORY] = own.memory_on_retry
        limit = f"{{{{=asInt(retries) > 0 ? '{own.memory_on_retry}' : '{own.memory_limit}'}}}}"
        patch = json.loads(fields.get("pod_spec_patch", "{}"))
        patch.setdefault("containers", []).append(
            {"name": "main", "resources": {"limits": {"memory": limit}}}
        )
        fields["pod_spec_patch"] = json.dumps(patch, separators=(",", ":"))
    fields["env"] += [*(EnvVar(name=name, value=value) for name, value in before.items()), *env]
    return fields | retry_fields(expression)
