"""The versions that replicas serve: each replica announces its own, and `delete_unused_versions` keeps it::

    <root>/live/<replica>.json             {"version": 7}
    <root>/served/NNNNNN/<replica>.json    what the pull of that version took

A replica writes the first with each version and every minute, and deletes it when it ends normally. A file older than
`EXPIRY_S` belongs to a dead replica, and does not count; pin the version of a replica without write access by hand.
The second is written once and kept, for people and reports."""

import time
from collections.abc import Mapping
from typing import Any

from tuneloop.core.artifacts import dump_checked_json, load_checked_json
from tuneloop.core.store import Store

PLACE, MEND = "live", "delete it"
RECORDS = "served"
PULL: dict[str, Any] = {"version": int, "full": int | None, "tensors": int, "identical": int}
PULL |= dict.fromkeys(("served_at", "fetch_s", "apply_s", "pause_s"), float)
RENEW_S = 60.0
EXPIRY_S = 600.0
"""The time of ten missed announcements: a store's clock and ours may differ by minutes."""


def announce_version(root: Store, replica: str, version: int) -> None:
    """Announce for `EXPIRY_S` that `replica` serves `version`. Raises UserError, Retryable: it is not writable."""
    root.put(key := f"{PLACE}/{replica}.json", dump_checked_json({"version": version}, key))


def withdraw_replica(root: Store, replica: str) -> None:
    """Withdraw the announcement of a replica that has ended."""
    root.delete(f"{PLACE}/{replica}.json")


def list_served_versions(root: Store) -> dict[str, int]:
    """Return replica → version for the replicas that are alive."""
    since = time.time() - EXPIRY_S
    found = {
        key: root.get(key)
        for key, (_, at) in root.stat().items()
        if key.startswith(f"{PLACE}/") and at > since
    }
    told = {
        key: load_checked_json(data, key, root.url, MEND, {"version": int})
        for key, data in found.items()
        if data
    }
    return {
        key.removeprefix(f"{PLACE}/").removesuffix(".json"): about["version"]
        for key, about in told.items()
    }


def record_pull(root: Store, replica: str, about: Mapping[str, Any]) -> None:
    """Record the timings `about` of a pull of ``about["version"]`` by `replica`. Raises as `announce_version`."""
    root.put(
        key := f"{RECORDS}/{about['version']:06d}/{replica}.json", dump_checked_json(about, key)
    )


def read_pulls(root: Store, version: int) -> list[dict[str, Any]]:
    """Read the records of all replicas that pulled `version`."""
    found = {key: root.get(key) for key in root.keys(f"{RECORDS}/{version:06d}")}
    return [
        load_checked_json(data, key, root.url, MEND, PULL) for key, data in found.items() if data
    ]
