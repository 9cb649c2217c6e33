"""What a pipeline says of the cluster it is rendered for; nothing of it matters on one machine."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

RUN_LABEL = "tuneloop.dev/run"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"


AUTO = "auto"
UNKNOWN = "2Gi"
"""What a stage requests of whose needs nothing is known."""


class Cluster(BaseModel):
    """Names and sizes that a platform team sets. The defaults are those of ``manifests/``."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    images: str = Field(
        "tuneloop/{image}:dev",
        pattern=r"\{image\}",
        description="where images lie; {image} is base, trainer or rollout",
    )
    queue: str = Field("tuneloop", description="Kueue LocalQueue of accelerator stages; empty: not queued")
    priority: str = Field("", description="Kueue WorkloadPriorityClass of accelerator stages")
    gpus: int = Field(0, ge=0, description="nvidia.com/gpu of each accelerator stage; 0: they run on CPU, and say so")
    cpu: str = Field("500m", pattern=r"^\d+(\.\d+)?m?$", description="CPU that each stage requests: 500m, 2")
    memory: str = Field(
        AUTO,
        pattern=rf"^({AUTO}|\d+(\.\d+)?[KMGTPE]i)$",
        description="memory that each stage requests, and its limit: 512Mi, 2Gi; auto: what `tuneloop plan` estimates, "
        f"and {UNKNOWN} without a limit where it cannot",
    )
    claim: str = Field(
        "", description="PersistentVolumeClaim that every stage sees at /store; for --store file:///store/…"
    )

    @property
    def memory_request(self) -> str:
        """What a pod requests before `tuneloop.argo.memory` has seen its workflow."""
        return UNKNOWN if self.memory == AUTO else self.memory

    @property
    def memory_limit(self) -> str | None:
        return None if self.memory == AUTO else self.memory

    @property
    def queue_labels(self) -> dict[str, str]:
        """What makes Kueue admit a pod or a job; nothing where there is no queue."""
        labels = {QUEUE_LABEL: self.queue, PRIORITY_LABEL: self.priority}
        return {name: value for name, value in labels.items() if value and self.queue}
