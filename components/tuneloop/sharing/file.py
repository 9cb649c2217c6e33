"""A group's document as an object in the store, for runs of one machine, or of clusters that share nothing else.

The object stays when the last run has left: an empty one, so that the numbers of its turns go on.
"""

from __future__ import annotations

from tuneloop.core.errors import Corrupt
from tuneloop.core.store import Store
from tuneloop.sharing.document import Document
from tuneloop.sharing.turns import Turns

KEY = "turns.json"
STORED = ".turns"
"""Below a store: where the groups lie."""


class File:
    """See the module.

    Args:
        url: of the group, below the store.
    """

    def __init__(self, url: str) -> None:
        self.store = Store(url)

    def read(self) -> tuple[Document, bytes | None]:
        data = self.store.get(KEY)
        if data is None:
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
