"""The ``latest`` pointer of a run: one key that names the weight version to be served.

It moves by compare-and-swap, never backward, and two publishers that race cannot both believe they moved it. The
protocol follows the published disk-delta systems (pointer moved last, rewind refused)."""

from pydantic import BaseModel, Field

from tuneloop.core import fencing
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Conflict, Store

KEY = "latest"


class PointerRewind(UserError):
    """The pointer would move backward."""


class PointerConflict(UserError):
    """The pointer names other weights under the same version."""


class Latest(BaseModel, frozen=True, extra="forbid"):
    """The contents of the pointer."""

    version: int = Field(ge=0)
    ref: str = Field(description="``<directory>@xxh3-128:<digest of its index>``")


def read_pointer(root: str | Store) -> Latest | None:
    """Read the pointer below `root` (a URL, or a Store on it); None before the first publication."""
    store = root if isinstance(root, Store) else Store(root)
    return _parse(store, store.get(KEY))


def _parse(store: Store, data: bytes | None) -> Latest | None:
    try:
        return None if data is None else Latest.model_validate_json(data)
    except ValueError as error:
        raise Corrupt(
            "weights", f"{store.url}/{KEY}", "is not a pointer; restore it from a copy"
        ) from error


def advance_pointer(root: str | Store, latest: Latest) -> bool:
    """Advance the pointer below `root` to `latest`; return False if it is there already. Raises PointerRewind: it is at
    a newer version; PointerConflict: at this version, with other weights; Retryable: the process has lost its lease."""
    store = root if isinstance(root, Store) else Store(root)
    while True:
        data = store.get(KEY)
        now = _parse(store, data)
        if now == latest:
            return False
        if now is not None and now.version > latest.version:
            raise PointerRewind(
                "weights", latest.version, f"{store.url} is at version {now.version} already"
            )
        if now is not None and now.version == latest.version:
            raise PointerConflict(
                "weights", latest.ref, f"version {now.version} of {store.url} is {now.ref}"
            )
        fencing.check_lease()
        try:
            store.swap(KEY, data, latest.model_dump_json().encode())
            return True
        except Conflict:
            continue  # somebody moved it meanwhile: look again
