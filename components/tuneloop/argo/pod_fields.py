"""Fields of every tuneloop pod: image, store, scratch disk, requests, permissions, and its retries.

They are keyword arguments of Hera's `Container`. Two other renderers state pods on their own and
take only some constants and functions from here, so a field that is added here is added there, too,
if it is for all pods: `argo/jobset.py: pod_spec` (pods of JobSets, Jobs, Ray) and `kfp/task_pod.py`
(tasks of KFP). `tests/unit/argo/test_pods.py` and `tests/unit/kfp/test_task_pod.py` compare what
the settings say.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tuneloop.core.attempts import ATTEMPT, LAST_END, MORE_MEMORY
from tuneloop.core.component import Component
from tuneloop.core.ends import RETRY_STAGE, RETRY_STEP
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import encode_value
from tuneloop.core.server_token import VARIABLE
from tuneloop.inference.capabilities import Capabilities, find_capabilities
from tuneloop.workflow.plan import PodResources
from tuneloop.workflow.pod_hook import choose_memory_request, collect_pod_changes
from tuneloop.workflow.pod_settings import (
    ARGO_CONTAINERS,
    ARGO_INIT_CONTAINERS,
    fit_patch,
)
from tuneloop.workflow.quantities import parse_resource_quantity
from tuneloop.workflow.settings import (
    AUTO,
    CLIENT_LABEL,
    GRACE_S,
    SANDBOX,
    TOKEN_KEY,
    TOKEN_SECRET,
    UNKNOWN,
    Cluster,
    ResourceRole,
    Resources,
)
from tuneloop.workflow.strategic_merge import merge_patches

SCRATCH = "/tmp"
SHM = "/dev/shm"
OUTPUTS = f"{SCRATCH}/tuneloop/outputs"
"""Where a pod writes its output parameters, a file each (`core/program.py: write_outputs`)."""
CLAIM = "/store"
"""Where `Cluster.claim` is mounted."""
TOKENS = "/run/tuneloop/server-token"
"""Where the Secret `TOKEN_SECRET` is mounted."""
PLAIN = ("AWS_ENDPOINT_URL", "AWS_REGION")
"""The settings of the store in the ConfigMap `STORE`. On Argo and in JobSets a pod gets all keys of
the two objects; a task of KFP gets only those that are named here and in `SECRET`
(`kfp/task_pod.py`). `cluster/doctor.py` looks for them."""
SECRET = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""The settings of the store in the Secret `STORE`."""
PAUSE = "10s"
"""Pause between attempts, with its unit. It is constant: ``duration * factor^n`` in 64-bit
nanoseconds overflows after some thirty attempts (Argo's ``processNodeRetries``). There is no
``maxDuration``, which counts from the start of the first attempt.
"""
LIMIT = 1000
"""Maximum number of attempts, for pods that end before they can count them
(`tuneloop.core.attempts`): four preemptions an hour for ten days. The controller only respects the
pause if there is a limit.
"""
SMALL = {"cpu": "50m", "memory": "256Mi", "memory_on_retry": ""}
"""Resources of a pod that only talks to the API server: fields of `Resources`
(`workflow/settings.py`). Small tasks of KFP have them, too. `memory_on_retry` is stated so that
what ``cluster.cpu`` sets for stages does not hold for these."""
EXECUTOR = {"requests": {"cpu": "10m", "memory": "64Mi"}}
"""Resources of Argo's own containers in a pod."""
EXECUTOR_LIMITS = {"cpu": "500m", "memory": "256Mi"}
"""Their limits, where every container has some (`Cluster.limits`)."""
ACCOUNT = "tuneloop-stage"
"""The account of pods that ask nothing of the API server, unless `service_account` is set."""
TOKEN_SOURCES: list[JsonObject] = [
    {"serviceAccountToken": {"path": "token", "expirationSeconds": 3600}},
    {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
    {
        "downwardAPI": {
            "items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]
        }
    },
]
"""Sources of a projected volume with the token of a pod's account, as Kubernetes mounts it by
itself: for a pod in which only one container is to have it (`argo/resize.py`, and the sidecar in
`extensions/sharing/lease_sidecar.py`)."""


def read_engine(component: Component, parameters: JsonMapping) -> Capabilities | None:
    """Return what the engine can do that a stage samples with; None where it does not sample.

    Args:
        component: the stage.
        parameters: those that are set.
    """
    field = component.Params.model_fields.get("engine")
    kind = parameters.get("engine", field and field.default)
    return find_capabilities(kind) if kind else None


def find_role(
    component: Component, parameters: JsonMapping, wired: Iterable[str] = ()
) -> ResourceRole:
    """Find the resource role of a stage's pod: cpu, if it only calls a server.

    `kfp/stage.py` asks it for JobSets, and `tests/component_pages.py` for docs/components.

    Args:
        component: the stage.
        parameters: those that are set.
        wired: parameters that the graph sets.
    """
    engine = read_engine(component, parameters)
    has_server = parameters.get("endpoint") or "endpoint" in wired
    is_client = engine is not None and (not engine.in_process or (engine.serves and has_server))
    if not component.accelerator or is_client:
        return "cpu"
    if component.role == "trainer" or component.role == "scorer":
        return component.role
    return "sampler" if component.image == "rollout" else "scorer"


def plan_resources(role: ResourceRole, cluster: Cluster) -> PodResources:
    """Return what a pod of a role requests, before its memory is estimated
    (`tuneloop.argo.memory_estimate`).
    """
    resources = cluster.resources(role)
    return PodResources(
        cpu=resources.cpu,
        memory_request=choose_memory_request(cluster, role) or resources.memory_request,
        memory_limit=resources.memory_limit,
        accelerators=cluster.count_gpus(role),
        shared_memory=resources.shm,
    )


def choose_memory_limit(resources: PodResources, cluster: Cluster) -> str | None:
    """Return the memory limit of a pod; None where it has none."""
    # A guess must not kill a pod, unless a quota asks for limits.
    if resources.memory_limit or not cluster.limits:
        return resources.memory_limit
    # An extension may request less than the pod uses.
    return max(resources.memory_request, UNKNOWN, key=parse_resource_quantity)


def pod_fields(
    image: str, role: ResourceRole, cluster: Cluster, resources: PodResources | None = None
) -> JsonObject:
    """Return the fields of every tuneloop pod: image, access to the store, disks, requests,
    placement. It has no rights at the API server.

    Variables whose names begin with ``TUNELOOP_`` cannot be set by users (`OWN_VARIABLES` of
    `workflow/pod_settings.py`).

    Args:
        image: the logical one: base, trainer, rollout or ray.
        role: what the pod computes.
        cluster: has its place, its queue and the names of images.
        resources: what the pod requests; None: what its role does.
    """
    from hera.workflows import Resources, models

    image_name = cluster.images.format(image=image)
    resources = resources or plan_resources(role, cluster)
    memory_limit = choose_memory_limit(resources, cluster)
    # Variables of the prefix TUNELOOP_NODE go into the manifests of artifacts
    # (`core/provenance.py`). KFP sets two of these by itself (`kfp/task_pod.py`,
    # `kfp/template.py`); one machine leaves the image out.
    variables = {
        "TUNELOOP_OUTPUTS": OUTPUTS,
        "TUNELOOP_IMAGE": image_name,
        "TUNELOOP_NODE_WORKFLOW": "{{workflow.name}}",
        "TUNELOOP_NODE_NAME": "{{node.name}}",
    }
    variables |= cluster.environment
    settings = cluster.pod_settings(role)
    sources = cluster.store_credentials.environment_sources
    fields: JsonObject = {
        "image": image_name,
        # A version of an image does not change: a node that has it asks no registry.
        "image_pull_policy": "IfNotPresent",
        "env": [models.EnvVar(name=name, value=value) for name, value in variables.items()],
        "env_from": [models.EnvFromSource.model_validate(source) for source in sources],
        "resources": Resources(
            cpu_request=resources.cpu,
            cpu_limit=cluster.resources(role).find_cpu_limit(cluster.limits),
            memory_request=resources.memory_request,
            memory_limit=memory_limit,
            gpus=resources.accelerators or None,
            gpu_flag=settings.gpu,
        ),
        "security_context": models.SecurityContext.model_validate(settings.container_security),
        "volumes": _build_volumes(cluster, resources.shared_memory, settings.secret_mode),
    }
    return fields | role_fields(image, role, cluster)


def _build_volumes(cluster: Cluster, shared_memory: str, secret_mode: int) -> list[Any]:
    """Build the disks of a pod: scratch, the store's claim, the sandbox's secret, shared memory."""
    from hera.workflows import EmptyDirVolume, ExistingVolume

    # The root file system of a restricted container is read-only.
    volumes: list[Any] = [EmptyDirVolume(name="scratch", mount_path=SCRATCH)]
    if cluster.claim:
        volumes.append(ExistingVolume(name="store", claim_name=cluster.claim, mount_path=CLAIM))
    if cluster.sandbox_environment:
        secret, path = SANDBOX
        volumes.append(_mount_secret("sandbox", secret, path, secret_mode))
    if shared_memory:
        size_limit: Any = None if shared_memory == AUTO else shared_memory
        volume = EmptyDirVolume(name="shm", mount_path=SHM, medium="Memory", size_limit=size_limit)
        volumes.append(volume)
    return volumes


def mount_token(template: Any, cluster: Cluster, role: ResourceRole) -> None:
    """Mount the token of the workflow's servers as a file into a template's pod, if `submit` has
    created one (`TOKEN_SECRET`). `cluster/serving.py` removes what names `TOKENS` from servers that
    outlive a run.

    Args:
        template: of the pod.
        cluster: where it runs.
        role: what it computes.
    """
    from hera.workflows import models

    variable = models.EnvVar(name=VARIABLE, value=f"{TOKENS}/{TOKEN_KEY}")
    template.env += [variable]
    mode = cluster.pod_settings(role).secret_mode
    template.volumes += [_mount_secret("server-token", TOKEN_SECRET, TOKENS, mode)]


def label_client(template: Any) -> None:
    """Label a template's pod as one that samples with servers of another owner, whose autoscaler
    counts such pods.
    """
    template.labels = (template.labels or {}) | {CLIENT_LABEL: "true"}


def _mount_secret(name: str, secret: str, path: str, mode: int) -> Any:
    """Return the files of a Secret, if there is one, as a volume."""
    from hera.workflows import SecretVolume

    options: Any = {"secret_name": secret, "optional": True, "default_mode": mode}
    return SecretVolume(name=name, mount_path=path, **options)


def role_fields(image: str, role: ResourceRole, cluster: Cluster) -> JsonObject:
    """Return how a pod of a role is admitted, where it may run, and how it is ended, with what
    extensions and the settings say of it."""
    from hera.workflows.models import Affinity

    resources = cluster.resources(role)
    change = collect_pod_changes(cluster, role, image)
    labels = {"app.kubernetes.io/component": image}
    if change.is_queued:
        labels |= cluster.build_queue_labels(role)
    labels |= change.labels
    # Argo has no fields for these: they are patched into the pod.
    patch: JsonObject = {}
    if resources.grace_s != GRACE_S:
        patch["terminationGracePeriodSeconds"] = resources.grace_s
    fields = place_fields(resources)
    patch = merge_patches(patch, change.spec)
    # Argo would lay its own field over that of the patch.
    affinity = patch.pop("affinity", None)
    if affinity:
        fields["affinity"] = Affinity.model_validate(affinity)
    fields["labels"] = labels
    return fields | custom_fields(role, cluster, patch, labels)


def custom_fields(
    role: ResourceRole,
    cluster: Cluster,
    patch: JsonMapping,
    labels: Mapping[str, str] | None = None,
    containers: Sequence[str] = ARGO_CONTAINERS,
) -> JsonObject:
    """Return the fields of a template by which `cluster.pod` and that of a role change its pod.

    Args:
        role: what the pod computes.
        cluster: where it runs.
        patch: what tuneloop itself patches into the pod; the settings win over it.
        labels: tuneloop's own of the pod.
        containers: Argo's own of the pod.
    """
    from hera.workflows import models

    settings = cluster.pod_settings(role)
    spec = fit_patch(
        cluster.build_spec_patch(role),
        containers=containers,
        init_containers=ARGO_INIT_CONTAINERS,
    )
    patch = merge_patches(patch, spec)
    fields: JsonObject = {}
    if patch:
        fields["pod_spec_patch"] = encode_value(patch)
    custom_labels = settings.build_labels()
    if custom_labels:
        fields["labels"] = dict(labels or {}) | custom_labels
    annotations = settings.build_annotations()
    if annotations:
        fields["annotations"] = annotations
    # The workflow says what all pods have; a role may say something else.
    default = cluster.common_pod_settings
    if settings.pod_security != default.pod_security:
        fields["pod_security_context"] = models.PodSecurityContext.model_validate(
            settings.pod_security
        )
    if settings.service_account != default.service_account:
        fields["service_account_name"] = settings.service_account
    return fields


def patch_container(text: str | None, container: JsonObject) -> str:
    """Return the text of a pod's patch with fields of a container added, where it sets none of
    them.

    Args:
        text: of the patch; None: there is none yet.
        container: its name, and the fields.
    """
    patch: JsonObject = json.loads(text or "{}")
    # What the user's settings say of the container wins.
    return encode_value(merge_patches({"containers": [container]}, patch))


def describe_executor(cluster: Cluster) -> JsonObject:
    """Return the resources of Argo's own containers in a pod."""
    return EXECUTOR | ({"limits": EXECUTOR_LIMITS} if cluster.limits else {})


def place_fields(resources: Resources) -> JsonObject:
    """Return the fields of a template that say on which nodes its pod may run."""
    return {
        "node_selector": resources.place.get("nodeSelector"),
        "tolerations": resources.place.get("tolerations"),
    }


def retry_fields(expression: str = RETRY_STAGE) -> JsonObject:
    """Return the fields by which a tuneloop pod is started again, depending on the class of its
    end.

    Args:
        expression: one of the ``RETRY_…`` conditions that `core/ends.py` makes of its table.
    """
    from hera.workflows import RetryPolicy, RetryStrategy, models

    strategy = RetryStrategy(
        limit=LIMIT,
        # The expression alone decides.
        retry_policy=RetryPolicy.always,
        expression=expression,
        backoff=models.Backoff(duration=PAUSE),
    )
    return {"retry_strategy": strategy}


def step_fields(account: str, cluster: Cluster) -> JsonObject:
    """Return the fields of a small step that calls the API server with a service account. The
    account and its role are in ``manifests/``, which `tests/unit/test_manifests.py` checks."""
    fields = pod_fields("base", "cpu", cluster.adjust_role("cpu", **SMALL))
    fields |= {"service_account_name": account, "automount_service_account_token": True}
    return fields | retry_fields(RETRY_STEP)


def retried_pod_fields(
    image: str,
    role: ResourceRole,
    cluster: Cluster,
    expression: str = RETRY_STAGE,
    env: Sequence[Any] = (),
    resources: PodResources | None = None,
) -> JsonObject:
    """Return `pod_fields` and `retry_fields` of a pod that is told of earlier attempts and may get
    more memory.

    Args:
        image: the logical one: base, trainer, rollout or ray.
        role: what the pod computes.
        cluster: as for `pod_fields`; a retry has the memory that it sets.
        expression: Argo's condition on which the pod is started again.
        env: further variables of the container, as Hera's objects.
        resources: what the pod requests; None: what its role does.

    With `memory_on_retry` the limit of the first attempt is what the role sets, and not
    `resources`: the settings refuse it where the limit is estimated.
    """
    from hera.workflows.models import EnvVar

    fields = pod_fields(image, role, cluster, resources)
    memory = cluster.resources(role)
    # How a pod learns of earlier attempts: see `tuneloop.core.attempts`.
    variables = {
        ATTEMPT: "{{retries}}",
        LAST_END: "{{lastRetry.status}} {{lastRetry.exitCode}} {{lastRetry.message}}",
    }
    if memory.memory_on_retry:
        variables[MORE_MEMORY] = memory.memory_on_retry
        # `cluster/pod_requests.py: read_amounts` reads both amounts out of this text.
        amount = f"asInt(retries) > 0 ? '{memory.memory_on_retry}' : '{memory.memory_limit}'"
        limits = {"memory": f"{{{{={amount}}}}}"}
        container: JsonObject = {"name": "main", "resources": {"limits": limits}}
        fields["pod_spec_patch"] = patch_container(fields.get("pod_spec_patch"), container)
    fields["env"] += [EnvVar(name=name, value=value) for name, value in variables.items()]
    fields["env"] += env
    return fields | retry_fields(expression)
