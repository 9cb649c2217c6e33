"""The ``latest`` pointer of a run: one key that says which weight version is to be served.

It moves by compare-and-swap, never backward, and two publishers that race cannot both believe they moved it.
The protocol follows the published disk-delta systems (pointer moved last, rewind refused).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from tuneloop.errors import UserError
from tuneloop.store import Conflict, Store

KEY = "latest"


class PointerRewind(UserError):
    """The pointer would move backward."""


class PointerConflict(UserError):
    """The pointer names other weights under the same version."""


class Latest(BaseModel):
    """What the pointer says."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    version: int = Field(ge=0)
    ref: str = Field(description="reference of the checkpoint that holds the weights")


def read(url: str) -> Latest | None:
    """The pointer below `url`, or None before the first publication."""
    data = Store(url).get(KEY)
    return None if data is None else Latest.model_validate_json(data)


def advance(url: str, latest: Latest) -> bool:
    """Move the pointer below `url` to `latest`; False if it says so already.

    Raises:
        PointerRewind: it stands at a newer version.
        PointerConflict: it stands at this version, with other weights.
    """
    store = Store(url)
    while True:
        data = store.get(KEY)
        now = None if data is None else Latest.model_validate_json(data)
        if now == latest:
            return False
        if now is not None and now.version > latest.version:
            raise PointerRewind("weights", latest.version, f"{store.url} is at version {now.version} already")
        if now is not None and now.version == latest.version:
            raise PointerConflict("weights", latest.ref, f"version {now.version} of {store.url} is {now.ref}")
        try:
            store.swap(KEY, data, latest.model_dump_json().encode())
            return True
        except Conflict:
            continue  # somebody moved it meanwhile: look again
