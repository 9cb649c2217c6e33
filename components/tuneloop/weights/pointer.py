"""The ``latest`` pointer of a run: one key that names the weight version to be served.

It moves by compare-and-swap and never backward. Two publishers that race cannot both believe that
they moved it. The protocol follows the published disk-delta systems (slime, miles): the pointer is
moved last, and a rewind is refused.

`weights/publish.py` alone writes it; `inference/follower.py` polls it, and `Chain` of
`weights/versions.py` begins with it.
"""

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
    """The contents of the pointer.

    Replicas of earlier releases refuse a field that is added (``extra="forbid"``), as `Corrupt`.
    """

    version: int = Field(ge=0)
    ref: str = Field(description="``<directory>@xxh3-128:<digest of its index>``")


def read_pointer(root: str | Store) -> Latest | None:
    """Read the pointer below `root` (a URL, or a Store on it); None before the first publication.

    Raises:
        Corrupt: the key does not hold a pointer.
    """
    store = root if isinstance(root, Store) else Store(root)
    return _parse_pointer(store, store.get(KEY))


def _parse_pointer(store: Store, data: bytes | None) -> Latest | None:
    """Parse the bytes of the pointer in `store`; None stands for a key that does not exist."""
    if data is None:
        return None
    try:
        return Latest.model_validate_json(data)
    except ValueError as error:
        remedy = "is not a pointer; restore it from a copy"
        raise Corrupt("weights", f"{store.url}/{KEY}", remedy) from error


def _check_advance(store: Store, current: Latest, latest: Latest) -> None:
    """Check that `latest` follows `current`. Raises as `advance_pointer`."""
    if current.version > latest.version:
        raise PointerRewind(
            "weights",
            latest.version,
            f"{store.url} is at version {current.version} already",
        )
    if current.version == latest.version:
        raise PointerConflict(
            "weights",
            latest.ref,
            f"version {current.version} of {store.url} is {current.ref}",
        )


def advance_pointer(root: str | Store, latest: Latest) -> bool:
    """Advance the pointer below `root` to `latest`; return False if it is there already.

    Raises:
        PointerRewind: the pointer is at a newer version.
        PointerConflict: the pointer is at this version, with other weights.
        Retryable: the process has lost its device lease.
    """
    store = root if isinstance(root, Store) else Store(root)
    while True:
        data = store.get(KEY)
        current = _parse_pointer(store, data)
        if current == latest:
            # An earlier attempt of the same publication has moved it.
            return False
        if current is not None:
            _check_advance(store, current, latest)
        # A process that was suspended while another one took its lease must not publish.
        fencing.check_lease()
        try:
            store.swap(KEY, data, latest.model_dump_json().encode())
            return True
        except Conflict:
            # Another publisher moved the pointer meanwhile: compare with its version.
            continue
