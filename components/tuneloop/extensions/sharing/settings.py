"""The section `cluster.share`: with whom a run shares devices, and how.

Everything else here reads it; a field that is added is a key of the configuration, and a line of
docs/sharing.md. A field that the step which reserves claims reads belongs in
`sharing/claim_request.py: ClaimRequest`; one that the lease reads is a flag of `lease_sidecar.py`,
too. Rendered workflows have the section in an annotation (`claims.py: ANNOTATION`): an older
release refuses to read it there with a field that it does not know.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from tuneloop.sharing.claim_request import ClaimRequest
from tuneloop.workflow.settings import MEMORY, Cluster

SECTION = "share"
"""The key below `cluster`."""


class Share(ClaimRequest, frozen=True, extra="forbid"):
    """Share devices with other runs (docs/sharing.md). A run whose devices, policy or patience
    differ from those of its `group` is refused.
    """

    policy: Literal["fifo", "lrs"] = Field(
        "fifo",
        description="which run gets the lease next: fifo: the first to ask; lrs: the least "
        "recently served",
    )
    patience: float = Field(
        30.0, ge=1, description="seconds after which a silent holder has lost its lease"
    )
    roles: Literal["together", "apart", "strict"] = Field(
        "together",
        description="together: trainers and samplers share one claim; apart: each has its own, "
        "on nodes labelled tuneloop.dev/role=trainer or sampler where there are any; strict: on "
        "such nodes only",
    )
    request: str = Field(
        "",
        pattern=rf"^({MEMORY})?$",
        description="memory (512Mi, 2Gi) that a sharing stage requests, less than its limit; "
        "empty: all it may use",
    )
    node_memory: str = Field(
        "",
        pattern=rf"^({MEMORY})?$",
        description="memory (64Gi) of the node that runs share; a run that cannot fit is "
        "refused; empty: not checked",
    )
    overhead: str = Field(
        "4Gi", pattern=rf"^{MEMORY}$", description="memory (4Gi) of the node that is not the runs'"
    )

    @model_validator(mode="after")
    def _check_devices(self) -> Share:
        """Refuse a description of devices that nothing claims."""
        # Without a class there is no claim, so that neither would have an effect.
        if not self.device_class and (self.count > 1 or self.selector):
            raise ValueError("count and selector describe a claim: set device_class")
        return self


def find_share(cluster: Cluster) -> Share | None:
    """Return how the pods of a cluster's settings share devices; None if they do not."""
    share = cluster.find_section(SECTION)
    return share if isinstance(share, Share) else None
