"""What a workflow's steps reserve and release: the devices of a claim, and the number of runs that
share it.

`extensions/sharing/claim_steps.py` writes it into the rendered steps, as the flag ``--share``, and
`cluster/reservations.py` reads it in their pods. The tests are
`tests/extensions/sharing/test_claims.py`.
"""

from pydantic import BaseModel, Field

DEVICES = "devices"
"""The claim's name in a pod (`extensions/sharing/claims.py`), and the name of the one request in
its ResourceClaim (`cluster/reservations.py`).
"""
TAKE = "take-claim"
"""The template of the first step, which reserves claims; `cluster/watch.py` knows by it that a run
shares devices. It is the command of `cluster/reservations.py`, too, as `GIVE` is.
"""
GIVE = "give-claim"
"""The template of the exit handler that releases them."""


class ClaimRequest(BaseModel, frozen=True):
    """The devices that the runs of one group ask for; other keys of the flag are ignored.

    It is the base of the setting `cluster.share` (`extensions/sharing/settings.py: Share`), so that
    a field here is a setting of users. One that the devices of a claim depend on has to be in
    `_describe_devices` of `cluster/reservations.py`, which compares them between the runs of a
    group.
    """

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
        description="runs that share a claim, which no queue accounts for; a further run gets "
        "another claim; 1: each pod has its own claim, without leases, and Kueue accounts for "
        "it where it maps the device class",
    )

    @property
    def alone(self) -> bool:
        """Whether every pod has its devices to itself, so that no device lease is needed."""
        return bool(self.device_class) and self.runs_per_claim == 1
