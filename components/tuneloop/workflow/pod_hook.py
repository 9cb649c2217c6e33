"""What an extension changes of the pods that a pipeline renders, what the change needs on the cluster,
and what it means on this machine.

An extension declares a `PodHook` (`tuneloop.core.hooks.Extension.pod`). Who asks all of them: the
adapter of Argo (`argo/pod_fields.py`, `argo/jobset.py`, `argo/template.py`), `cluster/serving.py`,
lint, plan and preflight, and the local executor. Pods of Kubeflow Pipelines and of Trainer are made
by others, who ask no hook: a change that has to be in them refuses that use (`find_obstacle`). Objects
of Hera are `Any` here, as this package is below its adapter.

A method that is added does nothing in `PodHook`, and is called for each of `list_pod_hooks` where
its answer is used: that place is the only thing that makes it work. `extensions/sharing/pod.py` has
the hook that ships; `tests/unit/core/test_hooks.py` has another.
"""

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tuneloop.core.errors import UserError
from tuneloop.core.hooks import list_extensions
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.workflow.settings import Cluster, ResourceRole
from tuneloop.workflow.strategic_merge import merge_patches

PodUse = Literal["automatic iterations", "iterations", "several servers", "job", "trainjob", "kfp"]
"""How pods are used that not every change goes with: a pod runs whole iterations, by default or as
the user says; a run has several servers; a job has several pods; Trainer or Kubeflow Pipelines make
the pods. A use that is added is asked about where pods are made so (`check_use`), and needs a
branch or a remedy in `extensions/sharing/pod.py`, whose hook fails with a KeyError for a use that
it does not know.
"""


@dataclass(frozen=True)
class PodChange:
    """A change of a rendered pod.

    Attributes:
        labels: added to the pod's.
        spec: a strategic-merge patch of the pod's spec (`tuneloop.workflow.strategic_merge`); the
            container of a stage or server is called ``main``.
        is_queued: whether Kueue admits the pod as it would without the change.
    """

    labels: Mapping[str, str] = field(default_factory=dict)
    spec: JsonMapping = field(default_factory=dict)
    is_queued: bool = True


@dataclass(frozen=True)
class WorkflowChange:
    """What is added to a workflow before its graphs are drawn.

    Attributes:
        annotations: added to the workflow's.
        templates: of Hera, before all others.
        exit_template: the one of them that runs at the workflow's end; empty: none.
    """

    annotations: Mapping[str, str] = field(default_factory=dict)
    templates: Sequence[Any] = ()
    exit_template: str = ""


@dataclass(frozen=True)
class MachinePod:
    """A pod that the local executor runs, as a hook sees it.

    Attributes:
        template: as it is rendered.
        store: URL or absolute path of the run's store.
        stopping: set once the run is asked to stop.
        show_message: shows why the pod waits; an empty text ends the wait.
        local_path: path in the pod → the path of this machine.
    """

    template: JsonMapping
    store: str
    stopping: threading.Event
    show_message: Callable[[str], None]
    local_path: Callable[[str], Path]


class PodHook:
    """A change of rendered pods. Each method changes nothing unless a subclass overrides it."""

    def count_devices(self, cluster: JsonMapping) -> int | None:
        """Count the devices of a pod of any role that computes; None where the change brings none.

        Args:
            cluster: the section `cluster` as the user writes it, before it is validated.
        """
        return None

    def check_cluster(self, cluster: Cluster) -> None:
        """Check settings against one another. Raises UserError: some exclude the change."""

    def find_obstacle(self, cluster: Cluster, use: PodUse) -> UserError | None:
        """Return why pods with the change cannot be used so; None if they can."""
        return None

    def choose_memory_request(self, cluster: Cluster, role: ResourceRole) -> str:
        """Return the memory that a pod requests, where this is less than its limit; empty: the
        change brings no request of its own."""
        return ""

    def change_pod(self, cluster: Cluster, role: ResourceRole, image: str) -> PodChange | None:
        """Return the change of a pod.

        Args:
            cluster: the settings.
            role: what the pod computes.
            image: its logical image: base, trainer, rollout or ray.
        """
        return None

    def change_computing_stage(self, cluster: Cluster, image: str, template: Any) -> None:
        """Change Hera's template of a stage whose own process computes on an accelerator, or of a
        pod of iterations. A stage that calls a server is not one.
        """

    def change_workflow(self, cluster: Cluster) -> WorkflowChange | None:
        """Return what a workflow has besides its graphs."""
        return None

    def adjust_job_workflow(self, cluster: Cluster) -> Cluster:
        """Return the settings of a workflow whose one stage is a job of several pods, as they decide
        what the workflow has besides its graphs.
        """
        return cluster

    def complete_workflow(self, workflow: Any) -> None:
        """Change Hera's workflow once all its graphs are drawn."""

    def find_errors(self, workflow: JsonMapping) -> Iterator[UserError]:
        """Yield what is wrong with a rendered workflow, for `lint` and `submit`."""
        yield from ()

    def describe_plan(self, workflow: JsonMapping, parameters: int | None) -> Iterator[str]:
        """Yield lines for `plan` about a rendered workflow.

        Args:
            workflow: as it is rendered.
            parameters: of the model; None: unknown.

        Raises:
            UserError: the pods cannot run so.
        """
        yield from ()

    def find_cluster_problems(self, connection: Any, workflow: JsonMapping) -> Iterator[UserError]:
        """Yield what the change needs on the cluster and does not have.

        Args:
            connection: a `tuneloop.kube.connection.Connection`.
            workflow: as it is submitted.
        """
        yield from ()

    def replaces_container(self, container: JsonMapping) -> bool:
        """Return whether `hold_pod` does on this machine what an init container does in its pod.
        The local executor refuses any other one.
        """
        return False

    def hold_pod(self, pod: MachinePod) -> AbstractContextManager[None]:
        """Return what is held while a pod runs on this machine. It may wait before it begins.

        Raises (as it begins):
            UserError, Retryable: the pod fails with this error.
        """
        return nullcontext()


@functools.cache
def list_pod_hooks() -> tuple[PodHook, ...]:
    """Return the pod hooks of all extensions. Raises UserError: an extension is faulty."""
    hooks: list[PodHook] = []
    for extension in list_extensions():
        # Most extensions change no pod, and nothing of them is imported here.
        if not extension.pod:
            continue
        hook = extension.load(extension.pod)
        if not isinstance(hook, PodHook):
            remedy = f"its pod hook {extension.pod} is no PodHook: mend the extension"
            raise UserError("extension", extension.name, remedy)
        hooks.append(hook)
    return tuple(hooks)


def find_obstacle(cluster: Cluster, use: PodUse) -> UserError | None:
    """Return the first reason why pods cannot be used so; None if they can."""
    for hook in list_pod_hooks():
        obstacle = hook.find_obstacle(cluster, use)
        if obstacle:
            return obstacle
    return None


def check_use(cluster: Cluster, use: PodUse) -> None:
    """Check that pods can be used so. Raises UserError: they cannot."""
    obstacle = find_obstacle(cluster, use)
    if obstacle:
        raise obstacle


def choose_memory_request(cluster: Cluster, role: ResourceRole) -> str:
    """Return the memory that an extension lets a pod request; empty: no extension does."""
    for hook in list_pod_hooks():
        request = hook.choose_memory_request(cluster, role)
        # A pod has one request: the first extension that names one decides.
        if request:
            return request
    return ""


def collect_pod_changes(cluster: Cluster, role: ResourceRole, image: str) -> PodChange:
    """Collect the changes of a pod, which all extensions make, as one."""
    labels: dict[str, str] = {}
    spec: JsonObject = {}
    is_queued = True
    for hook in list_pod_hooks():
        change = hook.change_pod(cluster, role, image)
        if change:
            labels |= change.labels
            spec = merge_patches(spec, change.spec)
            # One extension that keeps a pod from Kueue is enough: the others cannot bring it back.
            is_queued = is_queued and change.is_queued
    return PodChange(labels, spec, is_queued)
