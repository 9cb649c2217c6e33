"""Settings of the cluster that a pipeline is rendered for; on one machine they have no meaning."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, Field, model_validator

from tuneloop.core.errors import UserError

RUN_LABEL = "tuneloop.dev/run"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
DELETE_DELAY = "600s"
"""Delay after which Argo deletes a pod that succeeded."""
QUEUE = "tuneloop"
SAMPLER_QUEUE = "tuneloop-samplers"
"""LocalQueues of ``manifests/base``. Servers have their own, so that they never hold quota that stages wait for."""
GROUP_LABEL = "tuneloop.dev/share-group"
"""Label of the pods and claims of a `Share`."""
ROLE_LABEL = "tuneloop.dev/role"
"""Label of pods, claims and nodes: ``trainer`` or ``sampler``."""
CLIENT_LABEL = "tuneloop.dev/fleet-client"
"""Label of pods that sample with the engine `endpoint`: an autoscaler counts them."""
TOKEN_SECRET = "tuneloop-server-{{workflow.uid}}"
TOKEN_KEY = "token"
"""Secret of a workflow with the token of its rollout servers (`tuneloop.core.server_token`), which `submit` makes."""
SHARE = "tuneloop.dev/share"
"""Annotation of a Workflow: its `Share`, as JSON."""
PROCESS = "process"
SANDBOX_PLACE = rf"{PROCESS}|https?://[^\s#]*[^\s#/](#({PROCESS}|gvisor))?"
SANDBOX_VARIABLE = "TUNELOOP_SANDBOX"
SANDBOX_TOKEN = "TUNELOOP_SANDBOX_TOKEN_FILE"
"""Variables of a pod: where a policy's programs run, and the file with the token of that service."""
SANDBOX = "tuneloop-sandbox", "/run/tuneloop/sandbox-token"
"""Secret with that token, under `TOKEN_KEY`, and where it is mounted."""
AUTO = "auto"
UNKNOWN = "2Gi"
"""The memory request of a stage whose needs are unknown."""
MEMORY = r"\d+(\.\d+)?[KMGTPE]i"


class Share(BaseModel, frozen=True, extra="forbid"):
    """Runs that use the same devices. Runs of one `group` are set up alike: what differs between them is refused."""

    group: str = Field(
        pattern=r"^[a-z0-9]([-a-z0-9]{0,38}[a-z0-9])?$",
        description="name of the runs that share: at most 40 lower-case letters, digits and dashes",
    )
    device_class: str = Field(
        "",
        description="DRA DeviceClass of the devices; empty: no claim, runs only lease them in turn",
    )
    count: int = Field(
        1, ge=1, description="devices of a claim; every run that uses the claim sees all of them"
    )
    selector: str = Field("", description="CEL expression that each device satisfies")
    runs_per_claim: int = Field(
        2,
        ge=1,
        description="runs that share a claim, which no queue accounts for; a further run gets another claim; 1: each "
        "pod has its own claim, without leases, and Kueue accounts for it where it maps the device class",
    )
    policy: Literal["fifo", "lrs"] = Field(
        "fifo",
        description="which run gets the lease next: fifo: the first to ask; lrs: the least recently served",
    )
    patience: float = Field(
        30.0, ge=1, description="seconds after which a silent holder has lost its lease"
    )
    roles: Literal["together", "apart", "strict"] = Field(
        "together",
        description="together: trainers and samplers share one claim; apart: each has its own, on nodes labelled "
        "tuneloop.dev/role=trainer or sampler where there are any; strict: on such nodes only",
    )
    request: str = Field(
        "",
        pattern=rf"^({MEMORY})?$",
        description="memory (512Mi, 2Gi) that a sharing stage requests, less than its limit; empty: all it may use",
    )
    node_memory: str = Field(
        "",
        pattern=rf"^({MEMORY})?$",
        description="memory (64Gi) of the node that runs share; a run that cannot fit is refused; empty: not checked",
    )
    overhead: str = Field(
        "4Gi", pattern=rf"^{MEMORY}$", description="memory (4Gi) of the node that is not the runs'"
    )

    @property
    def alone(self) -> bool:
        """Whether every pod has its devices to itself, so that no device lease is needed."""
        return bool(self.device_class) and self.runs_per_claim == 1

    @model_validator(mode="after")
    def _devices(self) -> Share:
        if not self.device_class and (self.count > 1 or self.selector):
            raise ValueError("count and selector describe a claim: set device_class")
        return self


ResourceRole = Literal["trainer", "sampler", "scorer", "cpu"]
"""What a pod computes: training; sampling; scores and log-probabilities of a model; nothing on an accelerator."""
ROLES: tuple[ResourceRole, ...] = get_args(ResourceRole)
GRACE_S = 30
"""Kubernetes' own grace period, seconds."""
SharedMemory = Annotated[
    str,
    Field(
        pattern=rf"^({AUTO}|{MEMORY})?$",
        description="size limit (8Gi) of an in-memory /dev/shm, which counts as the pod's memory; auto: all of the "
        "pod's memory; empty: the runtime's 64 MiB",
    ),
]
Grace = Annotated[
    int,
    Field(
        ge=0,
        description="seconds between SIGTERM and SIGKILL, for the last step and a resume point; tasks of Kubeflow "
        "Pipelines have 30, a TrainJob has what its runtime sets",
    ),
]


class Toleration(BaseModel, frozen=True, extra="forbid"):
    """A toleration of a node's taint, with the fields of Kubernetes."""

    key: str = Field("", description="key of the taint; empty: any")
    operator: Literal["Equal", "Exists"] = "Equal"
    value: str = Field("", description="value of the taint, where the operator is Equal")
    effect: Literal["", "NoSchedule", "PreferNoSchedule", "NoExecute"] = ""


class Resources(BaseModel, frozen=True, extra="forbid"):
    """The resources that a pod of a role requests."""

    cpu: str = Field(
        "500m", pattern=r"^\d+(\.\d+)?m?$", description="CPU that a pod requests: 500m, 2"
    )
    memory: str = Field(
        AUTO,
        pattern=rf"^({AUTO}|{MEMORY})$",
        description="memory that a pod requests, and its limit: 512Mi, 2Gi; auto: what `tuneloop plan` estimates, "
        f"and {UNKNOWN} without a limit where it cannot",
    )
    memory_on_retry: str = Field(
        "",
        pattern=rf"^({MEMORY})?$",
        description="memory limit (4Gi) of attempts after the first: a stage that ran out of memory is retried "
        "once; empty: it is not retried",
    )
    shm: SharedMemory = ""
    grace_s: Grace = GRACE_S
    node_selector: dict[str, str] = Field({}, description="labels of the nodes where a pod may run")
    tolerations: list[Toleration] = Field(
        [], description="of taints of the nodes: key, operator, value, effect"
    )

    @model_validator(mode="after")
    def _more_memory(self) -> Resources:
        if self.memory_on_retry and self.memory == AUTO:
            raise ValueError("memory_on_retry raises the limit that memory sets: set it, too")
        return self

    @property
    def memory_request(self) -> str:
        """What a pod requests before `tuneloop.argo.memory_estimate` has seen its workflow."""
        return UNKNOWN if self.memory == AUTO else self.memory

    @property
    def memory_limit(self) -> str | None:
        return None if self.memory == AUTO else self.memory

    @property
    def place(self) -> dict[str, Any]:
        """On which nodes a pod may run, as fields of its spec; empty: on all."""
        tolerations = [each.model_dump(exclude_defaults=True) for each in self.tolerations]
        fields = {"nodeSelector": self.node_selector, "tolerations": tolerations}
        return {name: value for name, value in fields.items() if value}


class AcceleratorResources(Resources):
    """The resources that a pod requests whose role computes on accelerators."""

    gpus: int = Field(
        0, ge=0, description="nvidia.com/gpu of a pod; 0: it runs on CPU, and says so"
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
        description=f"Kueue LocalQueue of accelerator stages; samplers wait in {SAMPLER_QUEUE} unless this is set; "
        "empty: not queued",
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
    claim: str = Field(
        "",
        description="PersistentVolumeClaim that stages see at /store; for --store file:///store/…",
    )
    sandbox: str = Field(
        PROCESS,
        pattern=rf"^({SANDBOX_PLACE})$",
        description="where the policy's programs run: process, or URL[#gvisor]",
    )
    share: Share | None = Field(None, description="share devices with other runs (docs/sharing.md)")

    @model_validator(mode="after")
    def _either(self) -> Cluster:
        if self.share and self.share.device_class and any(map(self.count_gpus, ROLES)):
            raise ValueError(
                "gpus belong to this run alone, share.device_class to a shared claim: set one of them"
            )
        return self

    @property
    def sandbox_environment(self) -> dict[str, str]:
        """The variables of a pod that follow from `sandbox`."""
        token = f"{SANDBOX[1]}/{TOKEN_KEY}"
        return (
            {}
            if self.sandbox == PROCESS
            else {SANDBOX_VARIABLE: self.sandbox, SANDBOX_TOKEN: token}
        )

    def resources(self, role: ResourceRole) -> Resources:
        return getattr(self, role)

    def check_one_memory_limit(self, role: ResourceRole, runner: str) -> None:
        """Raise UserError where attempts after the first are to have more memory, but `runner` gives all the same."""
        limit = self.resources(role).memory_on_retry
        if limit:
            remedy = f"{runner} gives all attempts one limit: leave it out, and raise cluster.{role}.memory"
            raise UserError(f"cluster.{role}.memory_on_retry", limit, remedy)

    def count_gpus(self, role: ResourceRole) -> int:
        """Return the GPUs of a pod of a role."""
        return int(getattr(self.resources(role), "gpus", 0))

    def adjust_role(self, role: ResourceRole, **changes: Any) -> Cluster:
        """Return these settings with other resources of one role."""
        return self.model_copy(update={role: self.resources(role).model_copy(update=changes)})

    def merge_roles(
        self, roles: Iterable[ResourceRole], served: bool = False
    ) -> tuple[ResourceRole, Cluster]:
        """Return the role of a pod that runs stages of `roles` in turn (the first of them in `ROLES`), and settings
        with the GPUs of the role with most; if `served`, those of the rollout server beside them are added."""
        known = set(roles)
        first = next(role for role in ROLES if role in known or (served and role == "sampler"))
        gpus = max(map(self.count_gpus, known)) + (self.sampler.gpus if served else 0)
        return first, self if first == "cpu" else self.adjust_role(first, gpus=gpus)

    def build_queue_labels(self, role: ResourceRole) -> dict[str, str]:
        """Build the labels by which Kueue admits a role's pod or job; none for cpu, without a queue, or on a claim."""
        own = self.resources(role)
        claimed = self.share and self.share.device_class and not self.share.alone
        if claimed or not isinstance(own, AcceleratorResources):
            return {}
        common = SAMPLER_QUEUE if role == "sampler" and self.queue == QUEUE else self.queue
        queue = common if own.queue is None else own.queue
        labels = {QUEUE_LABEL: queue, PRIORITY_LABEL: self.priority}
        return {name: value for name, value in labels.items() if value and queue}


NEXT = "next"
"""The output that says where a run continues: ``{"entrypoint": …, "arguments": {…}}``; the last workflow has none."""
LOCAL = "TUNELOOP_LOCAL"
"""Set in the environment of pods on this machine."""
