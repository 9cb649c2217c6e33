"""Settings of the cluster that a pipeline is rendered for. On one machine few of them have a
meaning, such as `sandbox` and the sections of extensions.

A setting of pods has to be rendered by each of those who make pods, or it is ignored by some
without a word: `argo/pod_fields.py` (Argo), `argo/jobset.py` (pods of several nodes),
`extensions/trainers/trainjob_pods.py` (Trainer), `kfp/task_pod.py` (Kubeflow Pipelines) and `cluster/serving.py`
(a served model). docs/cluster.md and docs/pods.md describe the settings; presets are in
manifests/presets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, field_validator, model_validator

from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.workflow.credentials import (
    Credentials,
    PodIdentitySettings,
    SecretKeys,
    StoreCredentials,
)
from tuneloop.workflow.pod_settings import PodSettings
from tuneloop.workflow.quantities import parse_resource_quantity

RUN_LABEL = "tuneloop.dev/run"
"""Label of the workflows and pods of a run, by which they are found again. Objects of runs that
were submitted keep their labels: a new name would hide them."""
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
"""Kueue's own labels, of pods and jobs."""
DELETE_DELAY = "600s"
"""Delay after which Argo deletes a pod that succeeded."""
QUEUE = "tuneloop"
"""LocalQueue of ``manifests/base``."""
SAMPLER_QUEUE = "tuneloop-samplers"
"""LocalQueue of servers, which never hold quota that stages wait for."""
GROUP_LABEL = "tuneloop.dev/share-group"
"""Label of the pods and claims of runs that share devices."""
ROLE_LABEL = "tuneloop.dev/role"
"""Label of pods, claims and nodes: ``trainer`` or ``sampler``."""
CLIENT_LABEL = "tuneloop.dev/fleet-client"
"""Label of pods that sample with the engine `endpoint`: an autoscaler counts them."""
TOKEN_SECRET = "tuneloop-server-{{workflow.uid}}"
"""Secret of a workflow with the token of its rollout servers (`tuneloop.core.server_token`),
which `submit` makes.
"""
TOKEN_KEY = "token"
"""The key of the token in that secret."""
PROCESS = "process"
"""The place of programs in a process of the pod itself, jailed (`rewards/sandbox`)."""
# The form of `Cluster.sandbox`; `rewards/sandbox` takes the URL and the word after `#` apart.
SANDBOX_PLACE = rf"{PROCESS}|https?://[^\s#]*[^\s#/](#({PROCESS}|gvisor))?"
SANDBOX_VARIABLE = "TUNELOOP_SANDBOX"
"""Variable of a pod: where a policy's programs run. `rewards/sandbox` reads it, from whatever has
set it: a command such as `tuneloop probe` takes that of its shell."""
SANDBOX_TOKEN = "TUNELOOP_SANDBOX_TOKEN_FILE"
"""Variable of a pod: the file with the token of that service."""
SANDBOX = "tuneloop-sandbox", "/run/tuneloop/sandbox-token"
"""Secret with that token, under `TOKEN_KEY`, and where it is mounted. The local executor mounts a
file of this machine in its place (`local/pod.py`), and refuses all other Secrets
(`workflow/manifest.py`)."""
AUTO = "auto"
"""Of memory: as estimated (`argo/memory_estimate.py`); of /dev/shm: as much as the pod's memory."""
LIMIT_CPU = "1"
"""The CPU limit of a container that requests less, where every container has limits."""
CPU = r"\d+(\.\d+)?m?"
UNKNOWN = "2Gi"
"""The memory request of a stage whose needs are unknown (`argo/memory_estimate.py`)."""
MEMORY = r"\d+(\.\d+)?[KMGTPE]i"
"""Matches what a setting of memory may be, as `CPU` of CPU: fewer forms than Kubernetes has, which
`workflow/quantities.py` parses."""


ResourceRole = Literal["trainer", "sampler", "scorer", "cpu"]
"""What a pod computes: training; sampling; scores and log-probabilities of a model; nothing on an
accelerator. `argo/pod_fields.py: find_role` gives a stage its role. Each role is a field of
`Cluster`, read by its name.
"""
ROLES: tuple[ResourceRole, ...] = get_args(ResourceRole)
"""All roles. The order decides: a pod of several roles has the first of them (`merge_roles`).
`config/machine.py: ROLES` lists those that compute."""
GRACE_S = 30
"""Kubernetes' own grace period, seconds."""
SharedMemory = Annotated[
    str,
    Field(
        pattern=rf"^({AUTO}|{MEMORY})?$",
        description="size limit (8Gi) of an in-memory /dev/shm, which counts as the pod's "
        "memory; auto: all of the pod's memory; empty: the runtime's 64 MiB",
    ),
]
Grace = Annotated[
    int,
    Field(
        ge=0,
        description="seconds between SIGTERM and SIGKILL, for the last step and a resume point; "
        "tasks of Kubeflow Pipelines have 30, a TrainJob has what its runtime sets",
    ),
]


class Toleration(BaseModel, frozen=True, extra="forbid"):
    """A toleration of a node's taint, with the fields of Kubernetes."""

    key: str = Field("", description="key of the taint; empty: any")
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = Field("", description="value of the taint, where the operator is Equal")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


class Resources(BaseModel, frozen=True, extra="forbid", coerce_numbers_to_str=True):
    """The resources that a pod of a role requests."""

    cpu: str = Field("500m", pattern=rf"^{CPU}$", description="CPU that a pod requests: 500m, 2")
    cpu_limit: str = Field(
        "",
        pattern=rf"^({CPU})?$",
        description="the most CPU that a pod uses: 2; empty: no limit, or with cluster.limits what it "
        f"requests, at least {LIMIT_CPU}",
    )
    memory: str = Field(
        AUTO,
        pattern=rf"^({AUTO}|{MEMORY})$",
        description="memory that a pod requests, and its limit: 512Mi, 2Gi; auto: what "
        f"`tuneloop plan` estimates, and {UNKNOWN} without a limit where it cannot",
    )
    memory_on_retry: str = Field(
        "",
        pattern=rf"^({MEMORY})?$",
        description="memory limit (4Gi) of attempts after the first: a stage that ran out of "
        "memory is retried once; empty: it is not retried",
    )
    shm: SharedMemory = ""
    grace_s: Grace = GRACE_S
    node_selector: dict[str, str] = Field({}, description="labels of the nodes where a pod may run")
    tolerations: list[Toleration] = Field(
        [], description="of taints of the nodes: key, operator, value, effect"
    )
    pod: PodSettings | None = Field(
        None, description="what these pods have besides that of cluster.pod"
    )

    @model_validator(mode="after")
    def _check_memory(self) -> Resources:
        """Refuse a limit for retries beside a first limit that is estimated."""
        # The estimate is made later, from the whole workflow, and may be the higher one.
        if self.memory_on_retry and self.memory == AUTO:
            raise ValueError("memory_on_retry raises the limit that memory sets: set it, too")
        return self

    @model_validator(mode="after")
    def _check_cpu(self) -> Resources:
        """Refuse a limit below the request, as Kubernetes does."""
        if not self.cpu_limit:
            return self
        if parse_resource_quantity(self.cpu_limit) < parse_resource_quantity(self.cpu):
            raise ValueError(f"cpu_limit {self.cpu_limit} is below cpu {self.cpu}: raise it")
        return self

    def find_cpu_limit(self, is_required: bool) -> str | None:
        """Find the CPU limit of a pod; None: it has none, unless one is required."""
        # A limit slows a pod whose node has CPU to spare, so there is none unless somebody wants it.
        if self.cpu_limit or not is_required:
            return self.cpu_limit or None
        return max(self.cpu, LIMIT_CPU, key=parse_resource_quantity)

    @property
    def memory_request(self) -> str:
        """What a pod requests before `tuneloop.argo.memory_estimate` has seen its workflow."""
        return UNKNOWN if self.memory == AUTO else self.memory

    @property
    def memory_limit(self) -> str | None:
        """The limit of a pod's memory; None before `tuneloop.argo.memory_estimate` has seen its
        workflow.
        """
        return None if self.memory == AUTO else self.memory

    @property
    def place(self) -> dict[str, Any]:
        """On which nodes a pod may run, as fields of its spec; empty: on all."""
        # An empty field would be one more difference between two manifests.
        fields: dict[str, Any] = {}
        if self.node_selector:
            fields["nodeSelector"] = self.node_selector
        if self.tolerations:
            fields["tolerations"] = [
                toleration.model_dump(exclude_defaults=True) for toleration in self.tolerations
            ]
        return fields


class AcceleratorResources(Resources):
    """The resources that a pod requests whose role computes on accelerators."""

    gpus: int = Field(
        0,
        ge=0,
        description="nvidia.com/gpu of a pod, or pod.gpu_resource; 0: it runs on CPU, and says so",
    )
    queue: str | None = Field(
        None, description="Kueue LocalQueue of its pods and jobs; none: that of cluster.queue"
    )
    shm: SharedMemory = AUTO
    grace_s: Grace = 300


class Cluster(BaseModel, frozen=True, extra="forbid"):
    """Names and sizes that a platform team sets. The defaults are those of ``manifests/``."""

    images: str = Field(
        "tuneloop/{image}:dev",
        pattern=r"\{image\}",
        description="where images lie; {image} is base, trainer or rollout",
    )
    queue: str = Field(
        QUEUE,
        description=f"Kueue LocalQueue of accelerator stages; samplers wait in {SAMPLER_QUEUE} "
        "unless this is set; empty: not queued",
    )
    priority: str = Field(
        "", description="Kueue WorkloadPriorityClass of accelerator stages; empty: priority 0"
    )
    trainer: AcceleratorResources = Field(
        AcceleratorResources(), description="pods of stages that train"
    )
    sampler: AcceleratorResources = Field(
        AcceleratorResources(),
        description="the rollout server, and pods of stages that sample in their own process",
    )
    scorer: AcceleratorResources = Field(
        AcceleratorResources(), description="pods of stages that score with a model and train none"
    )
    cpu: Resources = Field(
        Resources(), description="all other pods, including those that only call a server"
    )
    limits: bool = Field(
        False,
        description="every container has limits of CPU and memory, also Argo's own, as a ResourceQuota "
        "of limits asks for",
    )
    claim: str = Field(
        "",
        description="PersistentVolumeClaim that stages see at /store; for --store file:///store/…",
    )
    sandbox: str = Field(
        PROCESS,
        pattern=rf"^({SANDBOX_PLACE})$",
        description="where the policy's programs run: process, or URL[#gvisor]",
    )
    credentials: Credentials = Field(
        None, description="how pods get credentials for the store (docs/cluster.md)"
    )
    pod: PodSettings | None = Field(
        None, description="what all pods have besides tuneloop's own (docs/pods.md)"
    )

    @field_validator("queue", "priority", "claim", mode="before")
    @classmethod
    def _read_empty(cls, value: object) -> object:
        """Read nothing, as in ``--set cluster.queue=``, as an empty text: there is none."""
        return "" if value is None else value

    @model_validator(mode="after")
    def _check_credentials(self) -> Cluster:
        """Refuse what the settings of pods say against `credentials`."""
        credentials = self.store_credentials
        if not isinstance(credentials, PodIdentitySettings):
            return self
        if self.pod:
            credentials.check_pod(self.pod, "pod")
            credentials.check_account(self.pod)
        for role in ROLES:
            pod = self.resources(role).pod
            if pod:
                credentials.check_pod(pod, f"{role}.pod")
        return self

    @property
    def store_credentials(self) -> StoreCredentials:
        """How pods get credentials for the store: the section `credentials`, or its default."""
        return self.credentials or SecretKeys()

    @property
    def environment(self) -> dict[str, str]:
        """The variables of a pod that follow from these settings."""
        return self.sandbox_environment | self.store_credentials.environment

    @property
    def sandbox_environment(self) -> dict[str, str]:
        """The variables of a pod that follow from `sandbox`."""
        # A program in the pod's own process needs no service, and so no token.
        if self.sandbox == PROCESS:
            return {}
        return {
            SANDBOX_VARIABLE: self.sandbox,
            SANDBOX_TOKEN: f"{SANDBOX[1]}/{TOKEN_KEY}",
        }

    def find_section(self, name: str) -> BaseModel | None:
        """Return the section `name` that an extension adds; None where it is not set, or not
        there.
        """
        return dict(self).get(name)

    def resources(self, role: ResourceRole) -> Resources:
        """Return what a pod of a role requests."""
        return getattr(self, role)

    @property
    def common_pod_settings(self) -> PodSettings:
        """What all pods have besides tuneloop's own."""
        return self.store_credentials.pod.merge(self.pod)

    def pod_settings(self, role: ResourceRole) -> PodSettings:
        """Return what the pods of a role have besides tuneloop's own."""
        return self.common_pod_settings.merge(self.resources(role).pod)

    def build_spec_patch(self, role: ResourceRole) -> JsonObject:
        """Build the patch of the spec of a role's pods; empty where nothing is said of them."""
        sources = self.store_credentials.environment_sources
        settings = self.pod_settings(role)
        return settings.build_spec_patch(role != "cpu", environment_sources=sources)

    def refuse_pod_setting(
        self, role: ResourceRole, path: str, value: object, remedy: str
    ) -> UserError:
        """Return the refusal of a setting of a role's pods, under the section that has it.

        Args:
            role: of the pods.
            path: of the setting within ``pod``.
            value: it has.
            remedy: why it is refused, and what to do.
        """
        name, _, rest = path.partition(".")
        role_settings = self.resources(role).pod
        is_roles = role_settings and getattr(role_settings, name)
        # A patch may be in both sections: the field itself tells in which.
        if is_roles and name in ("spec", "metadata"):
            field = rest.partition(".")[0].partition("[")[0]
            is_roles = field in getattr(role_settings, name)
        section = f"cluster.{role}.pod" if is_roles else "cluster.pod"
        if name == "service_account" and value == self.store_credentials.pod.service_account:
            section = "cluster.credentials"
        return UserError(f"{section}.{path}", value, remedy)

    def check_one_memory_limit(self, role: ResourceRole, runner: str) -> None:
        """Raise UserError if a retry is to have more memory, and `runner` gives all attempts the
        same.
        """
        # An empty limit asks for no second attempt.
        limit = self.resources(role).memory_on_retry
        if limit:
            remedy = (
                f"{runner} gives all attempts one limit: "
                f"leave it out, and raise cluster.{role}.memory"
            )
            raise UserError(f"cluster.{role}.memory_on_retry", limit, remedy)

    def count_gpus(self, role: ResourceRole) -> int:
        """Return the GPUs of a pod of a role."""
        return int(getattr(self.resources(role), "gpus", 0))

    def adjust_role(self, role: ResourceRole, **changes: Any) -> Cluster:
        """Return these settings with other resources of one role."""
        # Settings are read by many, and so are never changed in place.
        resources = self.resources(role).model_copy(update=changes)
        return self.model_copy(update={role: resources})

    def merge_roles(
        self, roles: Iterable[ResourceRole], served: bool = False
    ) -> tuple[ResourceRole, Cluster]:
        """Merge the roles of a pod that runs several stages in turn.

        Only the GPUs are merged: nodes, shared memory and grace are those of the pod's role, and
        memory is estimated for all stages (`argo/memory_estimate.py`).

        Args:
            roles: those of the stages.
            served: whether a rollout server runs beside them, in the same pod.

        Returns:
            The pod's role, the first one in `ROLES`, and settings in which this role has the GPUs
            of the stage with most, and those of the server.
        """
        stage_roles = set(roles)
        pod_roles = set(stage_roles)
        if served:
            pod_roles.add("sampler")
        first = min(pod_roles, key=ROLES.index)
        if first == "cpu":
            return first, self
        # Stages run one after the other, and use the same devices; the server runs all the while.
        gpus = max(self.count_gpus(role) for role in stage_roles)
        if served:
            gpus += self.sampler.gpus
        return first, self.adjust_role(first, gpus=gpus)

    def build_queue_labels(self, role: ResourceRole) -> dict[str, str]:
        """Build the labels by which Kueue admits a role's pod or job; none for cpu or without a
        queue.
        """
        # Kueue accounts for accelerators alone.
        resources = self.resources(role)
        if not isinstance(resources, AcceleratorResources):
            return {}
        # Samplers wait apart, unless one queue was chosen for all.
        queue = self.queue
        if role == "sampler" and queue == QUEUE:
            queue = SAMPLER_QUEUE
        if resources.queue is not None:
            queue = resources.queue
        if not queue:
            return {}
        labels = {QUEUE_LABEL: queue}
        if self.priority:
            labels[PRIORITY_LABEL] = self.priority
        return labels


NEXT = "next"
"""The output that says where a run continues: ``{"entrypoint": …, "arguments": {…}}``; the last
workflow has none. `cluster/continue_run.py` writes it, `local/executor.py` reads it, and
`argo/loop.py` declares it.
"""
LOCAL = "TUNELOOP_LOCAL"
"""Variable that is set in pods on this machine (`local/executor.py: execute_parts`):
`cluster/continue_run.py` and `cluster/reservations.py` then ask no cluster."""
