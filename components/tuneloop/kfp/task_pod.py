"""The pod of a task of Kubeflow Pipelines: its resources, queue, store and rights, and what
`cluster.pod` says of it, as far as the platform spec has fields for it.

Argo's pods are configured by `argo/pod_fields.py`; of that only `plan_resources` (CPU, memory and
accelerators) is used here, too. So another setting that is added to a role (`workflow/settings.py:
Resources`) or to `Cluster` has no effect on tasks until it is written or refused here, as
``grace_s`` has none. What is added to `workflow/pod_settings.py: PodSettings` gets here by its
patch, and what `_configure_custom_pod` does not know of a patch is refused. docs/pods.md ("Where it
arrives") lists what is supported.
"""

from typing import Any

from kfp import dsl, kubernetes

from tuneloop.argo.pod_fields import (
    CLAIM,
    PLAIN,
    SECRET,
    SHM,
    choose_memory_limit,
    plan_resources,
)
from tuneloop.config.pipeline import Kfp
from tuneloop.core.json_types import JsonMapping
from tuneloop.workflow.plan import PodResources
from tuneloop.workflow.pod_hook import check_use
from tuneloop.workflow.pod_schema import list_deletions
from tuneloop.workflow.pod_settings import MAIN, USER, fit_patch
from tuneloop.workflow.settings import AUTO, SANDBOX, Cluster, ResourceRole

REMEDY = "Kubeflow Pipelines have no field for it: leave it out"
MISSING = ("service_account", "priority_class", "env_from")
"""The shortcuts of `PodSettings` that the platform spec has no field for; they are refused by their
own names. Others without a field are refused by the path in the patch that they make."""
DELETES = "Kubeflow Pipelines can only add to a pod: leave out what deletes"
RUN_ACCOUNT = "a run of Kubeflow Pipelines has one for all tasks: give it when it is started"
"""Remedies of settings that are refused: in general, for a patch that deletes, for an account."""
OTHER_KEYS = (
    "AWS_SESSION_TOKEN",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCOUNT_NAME",
    "AZURE_STORAGE_ACCOUNT_KEY",
)
"""Keys of the Secret beside those of S3. A task names each that it takes, and may lack any."""
NO_DEADLINE = "8760h"
"""A year: the deadline of all attempts of a task together, which cannot be left out."""


def configure_task_pod(
    task: dsl.PipelineTask,
    image: str,
    cluster: Cluster,
    kfp: Kfp,
    role: ResourceRole = "cpu",
    resources: PodResources | None = None,
) -> None:
    """Set the resources, queue, store and rights of a task's pod.

    Args:
        task: of the pipeline.
        image: of its container.
        cluster: settings of the pod.
        kfp: settings of the task.
        role: what the pod computes.
        resources: what it requests; None: what its role does.

    Raises:
        UserError: an extension changes the pod, or it should have more memory after the first
            attempt, or something that the platform spec has no field for.
    """
    check_use(cluster, "kfp")
    cluster.check_one_memory_limit(role, "Kubeflow Pipelines")
    # The maximum becomes Argo's maxDuration, a deadline from the start of the first attempt; so it
    # must be long.
    task.set_retry(
        kfp.retries,
        backoff_duration="10s",
        backoff_factor=1,
        backoff_max_duration=NO_DEADLINE,
    )
    task.set_env_variable("TUNELOOP_IMAGE", image)
    kubernetes.set_image_pull_policy(task, "IfNotPresent")
    _configure_custom_pod(task, cluster, role)
    if kfp.timeout_s:
        kubernetes.set_timeout(task, kfp.timeout_s)
    _give_secrets(task, cluster)
    _request_resources(task, cluster, role, resources or plan_resources(role, cluster))


def _give_secrets(task: dsl.PipelineTask, cluster: Cluster) -> None:
    """Let a task's pod reach the store and the sandbox."""
    if cluster.claim:
        kubernetes.mount_pvc(task, cluster.claim, CLAIM)
    # No variable is read from both: KFP's patch would merge two of one name into one with two
    # sources, which Kubernetes refuses.
    credentials = cluster.store_credentials
    plain = {key: key for key in PLAIN if key not in credentials.environment}
    kubernetes.use_config_map_as_env(task, credentials.config_map, plain, optional=True)
    if credentials.secret:
        secret = {key: key for key in (*SECRET, *OTHER_KEYS)}
        kubernetes.use_secret_as_env(task, credentials.secret, secret, optional=True)
    for name, value in cluster.environment.items():
        task.set_env_variable(name, value)
    if cluster.sandbox_environment:
        kubernetes.use_secret_as_volume(task, *SANDBOX, optional=True)


def _request_resources(
    task: dsl.PipelineTask, cluster: Cluster, role: ResourceRole, pod: PodResources
) -> None:
    """Set what a task's pod requests, and which nodes and queue it waits for."""
    resources = cluster.resources(role)
    task.set_cpu_request(pod.cpu)
    cpu_limit = resources.find_cpu_limit(cluster.limits)
    if cpu_limit:
        task.set_cpu_limit(cpu_limit)
    task.set_memory_request(pod.memory_request)
    memory_limit = choose_memory_limit(pod, cluster)
    if memory_limit:
        task.set_memory_limit(memory_limit)
    if pod.accelerators:
        gpu = cluster.pod_settings(role).gpu
        task.set_accelerator_type(gpu).set_accelerator_limit(pod.accelerators)
    for label, value in cluster.build_queue_labels(role).items():
        kubernetes.add_pod_label(task, label, value)
    if resources.shm:
        # Without a limit the pod's memory is the limit.
        limit = None if resources.shm == AUTO else resources.shm
        kubernetes.empty_dir_mount(task, "shm", SHM, medium="Memory", size_limit=limit)
    for label, value in resources.node_selector.items():
        kubernetes.add_node_selector(task, label, value)
    for toleration in resources.tolerations:
        kubernetes.add_toleration(task, **toleration.model_dump(exclude_defaults=True))


def _configure_custom_pod(task: dsl.PipelineTask, cluster: Cluster, role: ResourceRole) -> None:
    """Give a task's pod what the settings say of the pods of its role.

    Raises:
        UserError: a setting is one that the platform spec has no field for.
    """
    settings = cluster.pod_settings(role)
    # A setting that is silently left out would only show on the cluster.
    for name in MISSING:
        value = getattr(settings, name)
        if value:
            remedy = RUN_ACCOUNT if name == "service_account" else REMEDY
            raise cluster.refuse_pod_setting(role, name, value, remedy)
    if role != "cpu" and settings.network.rdma:
        raise cluster.refuse_pod_setting(role, "network", settings.network.rdma, REMEDY)
    # The compiler itself drops all capabilities and privileges.
    if settings.security == "openshift":
        kubernetes.set_security_context(task, run_as_non_root=True)
    elif settings.security != "none":
        kubernetes.set_security_context(
            task, run_as_user=USER, run_as_group=USER, run_as_non_root=True
        )
    for label, value in settings.build_labels().items():
        kubernetes.add_pod_label(task, label, value)
    for annotation, value in settings.build_annotations().items():
        kubernetes.add_pod_annotation(task, annotation, value)
    for path, source in settings.volumes.items():
        _mount_volume(task, cluster, role, path, source)
    # Volumes are mounted by functions of their own.
    patch = settings.model_copy(update={"volumes": {}}).build_spec_patch(
        is_accelerated=role != "cpu"
    )
    for name, value in fit_patch(patch).items():
        for path, deleted in list_deletions(value, f"spec.{name}"):
            raise cluster.refuse_pod_setting(role, path, deleted, DELETES)
        if name == "containers":
            _configure_container(task, cluster, role, value)
        elif name == "imagePullSecrets":
            secrets = [item["name"] for item in value]
            kubernetes.set_image_pull_secrets(task, list(dict.fromkeys(secrets)))
        elif name == "nodeSelector":
            for label, label_value in value.items():
                kubernetes.add_node_selector(task, label, label_value)
        elif name == "tolerations":
            for toleration in value:
                _add_toleration(task, toleration)
        else:
            raise cluster.refuse_pod_setting(role, f"spec.{name}", value, REMEDY)


def _configure_container(
    task: dsl.PipelineTask, cluster: Cluster, role: ResourceRole, containers: list[Any]
) -> None:
    """Set the variables of a task's container, which is all that a task can say of it."""
    for container in containers:
        for name, value in container.items():
            path = f"spec.containers[{MAIN}].{name}"
            if name == "name":
                continue
            if name != "env":
                raise cluster.refuse_pod_setting(role, path, value, REMEDY)
            for variable in value:
                if "value" not in variable:
                    path = f"{path}[{variable['name']}]"
                    remedy = "Kubeflow Pipelines take a plain value here: give it one"
                    raise cluster.refuse_pod_setting(role, path, variable, remedy)
                task.set_env_variable(variable["name"], variable["value"])


def _mount_volume(
    task: dsl.PipelineTask, cluster: Cluster, role: ResourceRole, path: str, source: str
) -> None:
    """Mount a volume of the settings into a task's pod."""
    kind, _, name = source.partition("/")
    if kind == "pvc":
        kubernetes.mount_pvc(task, name, path)
    elif kind == "secret":
        kubernetes.use_secret_as_volume(task, name, path)
    elif kind == "configmap":
        kubernetes.use_config_map_as_volume(task, name, path)
    elif kind == "emptydir":
        volume = path.strip("/").replace("/", "-")
        kubernetes.empty_dir_mount(task, volume, path, size_limit=name or None)
    else:
        raise cluster.refuse_pod_setting(role, "volumes", source, REMEDY)


def _add_toleration(task: dsl.PipelineTask, toleration: JsonMapping) -> None:
    """Add a toleration in Kubernetes' own form."""
    kubernetes.add_toleration(
        task,
        key=toleration.get("key"),
        operator=toleration.get("operator"),
        value=toleration.get("value"),
        effect=toleration.get("effect"),
        toleration_seconds=toleration.get("tolerationSeconds"),
    )
