"""Which turns a URL names, and where their document is."""

from __future__ import annotations

from tuneloop.core.errors import UserError
from tuneloop.kube.connection import connect_to_cluster
from tuneloop.sharing.document import POLICIES, Policy
from tuneloop.sharing.file import File
from tuneloop.sharing.lease import Lease
from tuneloop.sharing.turns import Turns


def open_turns(url: str, *, who: str, policy: Policy = "fifo", patience: float = 30.0) -> Turns:
    """Open the turns of the group at `url`, for the run `who`.

    Args:
        url: ``lease://namespace/group``, or a URL of the store whose last part is the group's name.
        policy, patience: as `Turns`.

    Raises:
        UserError: another kind of URL, no such policy, or a patience too short to beat in.
    """
    if policy not in POLICIES:
        raise UserError("policy", policy, f"use one of {', '.join(POLICIES)}")
    if patience < 1:
        raise UserError("patience", patience, "seconds, at least 1: a holder shows six times within it that it lives")
    if url.startswith("lease://"):
        namespace, _, group = url.removeprefix("lease://").partition("/")
        if not namespace or not group or "/" in group:
            raise UserError("turns", url, "write lease://namespace/group")
        return Turns(Lease(connect_to_cluster(namespace), group), group, who=who, policy=policy, patience=patience)
    group = url.rstrip("/").rpartition("/")[2]
    return Turns(File(url), group, who=who, policy=policy, patience=patience)
