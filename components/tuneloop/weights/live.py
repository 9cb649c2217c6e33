"""Which versions replicas serve: each that may write below the root says so, and `gc` keeps these.

::

    <root>/live/<replica>.json      {"version": 7}

A replica writes it with each version and each minute, and deletes it when it ends in good order. One that was not
written for `EXPIRY_S` is of a replica that died, and counts no more; who has no key that writes is pinned by hand.
"""

from __future__ import annotations

import json
import time

from tuneloop.artifacts import canonical
from tuneloop.store import Store

PLACE = "live"
RENEW_S = 60.0
EXPIRY_S = 600.0
"""Ten misses: a store's clock and ours may differ by minutes."""


def announce(root: Store, replica: str, version: int) -> None:
    """Say that `replica` serves `version`, from now until `RENEW_S` from now.

    Raises:
        UserError, Retryable: the store can not be written to.
    """
    root.put(f"{PLACE}/{replica}.json", canonical({"version": version}).encode())


def withdraw(root: Store, replica: str) -> None:
    """`replica` has ended."""
    root.delete(f"{PLACE}/{replica}.json")


def versions(root: Store) -> dict[str, int]:
    """Replica → version, of those that live."""
    since = time.time() - EXPIRY_S
    found = {key: root.get(key) for key, (_, at) in root.stat().items() if key.startswith(f"{PLACE}/") and at > since}
    names = {key: key.removeprefix(f"{PLACE}/").removesuffix(".json") for key in found}
    return {names[key]: int(json.loads(data)["version"]) for key, data in found.items() if data}
