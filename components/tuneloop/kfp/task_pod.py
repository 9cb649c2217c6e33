"""The pod of a task of Kubeflow Pipelines: its resources, queue, store and rights."""

from kfp import dsl, kubernetes

from tuneloop.argo.pod_fields import PLAIN, SECRET, SHM, STORE
from tuneloop.config.pipeline import Kfp
from tuneloop.workflow.pod_hook import check_use
from tuneloop.workflow.settings import AUTO, SANDBOX, Cluster, ResourceRole

GPU = "nvidia.com/gpu"
USER = 1000
"""The user and group that the images are made for."""
NO_DEADLINE = "8760h"


def configure_task_pod(
    task: dsl.PipelineTask, image: str, cluster: Cluster, kfp: Kfp, role: ResourceRole = "cpu"
) -> None:
    """Set the resources, queue, store and rights of a task's pod.

    Raises:
        UserError: an extension changes the pod, or it should have more memory after the first attempt.
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
    kubernetes.set_security_context(task, run_as_user=USER, run_as_group=USER, run_as_non_root=True)
    if kfp.image_pull_secrets:
        kubernetes.set_image_pull_secrets(task, kfp.image_pull_secrets)
    if kfp.timeout_s:
        kubernetes.set_timeout(task, kfp.timeout_s)
    _give_secrets(task, cluster)
    for claim, path in kfp.volumes.items():
        kubernetes.mount_pvc(task, claim, path)
    _request_resources(task, cluster, role)


def _give_secrets(task: dsl.PipelineTask, cluster: Cluster) -> None:
    """Let a task's pod reach the store and the sandbox."""
    # No variable is read from both: KFP's patch would merge two of one name into one with two
    # sources, which Kubernetes refuses.
    kubernetes.use_config_map_as_env(task, STORE, {key: key for key in PLAIN}, optional=True)
    kubernetes.use_secret_as_env(task, STORE, {key: key for key in SECRET}, optional=True)
    for name, value in cluster.sandbox_environment.items():
        task.set_env_variable(name, value)
    if cluster.sandbox_environment:
        kubernetes.use_secret_as_volume(task, *SANDBOX, optional=True)


def _request_resources(task: dsl.PipelineTask, cluster: Cluster, role: ResourceRole) -> None:
    """Set what a task's pod requests, and which nodes and queue it waits for."""
    resources = cluster.resources(role)
    task.set_cpu_request(resources.cpu)
    task.set_memory_request(resources.memory_request)
    # The request is the limit here, also if it is the 2Gi of `auto` (docs/cluster.md).
    task.set_memory_limit(resources.memory_request)
    gpus = cluster.count_gpus(role)
    if gpus:
        task.set_accelerator_type(GPU).set_accelerator_limit(gpus)
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
