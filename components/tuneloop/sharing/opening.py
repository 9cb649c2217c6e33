"""Which turns a URL names, and where their document is."""

from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Store
from tuneloop.kube.connection import connect_to_cluster
from tuneloop.sharing.document import POLICIES, Document, Policy
from tuneloop.sharing.lease import Lease
from tuneloop.sharing.turns import Turns

KEY = "turns.json"
STORED = ".turns"
"""Below a store: where the groups lie."""


class File:
    """A group's document as an object in the store, for runs of one machine, or of clusters that share nothing else.

    It stays when the last run has left: an empty one, so that the numbers of its turns go on.
    """

    def __init__(self, url: str) -> None:
        self.store = Store(url)

    def read(self) -> tuple[Document, bytes | None]:
        if (data := self.store.get(KEY)) is None:
            return Document(), None
        try:
            return Document.model_validate_json(data), data
        except ValueError as error:
            raise Corrupt("turns", f"{self.store.url}/{KEY}", "is not a document of turns; delete it") from error

    def write(self, document: Document, seen: bytes | None) -> None:
        self.store.swap(KEY, seen, document.model_dump_json().encode())


def release_leases(url: str, run: str) -> None:
    """Release the leases and requests that an ended run left in all groups below `url`."""
    for key in Store(url).keys(""):
        if key.endswith(f"/{KEY}"):
            group = key.removesuffix(f"/{KEY}")
            Turns(File(f"{url}/{group}"), group, who=run).leave()


def open_turns(url: str, *, who: str, policy: Policy = "fifo", patience: float = 30.0) -> Turns:
    """Open the turns of the group at `url`, for the run `who`. Raises UserError at another kind of URL, an unknown
    policy, or a patience too short to beat in.

    Args:
        url: ``lease://namespace/group``, or a URL of the store whose last part is the group's name.
        policy, patience: as `Turns`.
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
