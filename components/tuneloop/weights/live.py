"""Record which version each replica serves; `delete_unused_versions` keeps these versions.

The files below a weights root are::

    <root>/live/<replica>.json             {"version": 7}
    <root>/served/NNNNNN/<replica>.json    what the pull of that version took

A replica writes the first file with each version and every minute, and deletes it when it ends
normally. A file older than `EXPIRY_S` belongs to a dead replica and does not count. The version of
a replica without write access has to be pinned by hand. The second file is written once and kept,
for people and reports.

`inference/follower.py` writes both. `weights/inspect.py` reads the first before it deletes, and
`ui/describe.py` to show it; `runs/delivery.py` reads the second. Both are checked JSON
(`core/artifacts.py: dump_checked_json`).
"""

import time

from tuneloop.core.artifacts import dump_checked_json, load_checked_json
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.store import Store

# The folders of both kinds of files.
_ANNOUNCEMENTS = "live"
_PULL_RECORDS = "served"
_REMEDY = "delete it"

PULL: JsonObject = {
    "version": int,
    "full": int | None,
    "tensors": int,
    "identical": int,
    "served_at": float,
    "fetch_s": float,
    "apply_s": float,
    "pause_s": float,
}
"""Field → type of what readers require of the record of a pull; it may have more fields.

`inference/follower.py: _describe_pull` makes the record, and `runs/delivery.py` checks the note
``pulled`` of stages by it, too. A field that is added here refuses the records of all earlier runs.
"""

RENEW_S = 60.0
"""Seconds after which a replica announces again what it serves (`inference/follower.py`)."""
EXPIRY_S = 600.0
"""Seconds after which a replica counts as dead, ten missed announcements: a store's clock and ours
may differ by minutes. ``docs/weights.md`` says ten minutes.
"""


def _get_announcement_key(replica: str) -> str:
    """Return the key of a replica's announcement."""
    return f"{_ANNOUNCEMENTS}/{replica}.json"


def announce_version(root: Store, replica: str, version: int) -> None:
    """Announce for `EXPIRY_S` seconds that `replica` serves `version`.

    Raises:
        UserError, Retryable: the store cannot be written.
    """
    key = _get_announcement_key(replica)
    root.put(key, dump_checked_json({"version": version}, key))


def withdraw_replica(root: Store, replica: str) -> None:
    """Withdraw the announcement of a replica that has ended."""
    root.delete(_get_announcement_key(replica))


def list_served_versions(root: Store) -> dict[str, int]:
    """Return replica → version for the replicas that are alive."""
    folder = f"{_ANNOUNCEMENTS}/"
    oldest = time.time() - EXPIRY_S
    versions: dict[str, int] = {}
    for key, (_, written_at) in root.stat().items():
        if not key.startswith(folder):
            continue
        # A replica that is alive has written again since: the file's writer is dead.
        if written_at <= oldest:
            continue
        data = root.get(key)
        # A replica that ended since the listing has withdrawn its file.
        if not data:
            continue
        announcement = load_checked_json(
            data,
            key,
            root.url,
            _REMEDY,
            shape={"version": int},
        )
        replica = key.removeprefix(folder).removesuffix(".json")
        versions[replica] = announcement["version"]
    return versions


def record_pull(root: Store, replica: str, pull: JsonMapping) -> None:
    """Record how `replica` pulled the version ``pull["version"]``; `pull` has the fields of `PULL`.

    Raises:
        UserError, Retryable: the store cannot be written.
    """
    key = f"{_PULL_RECORDS}/{pull['version']:06d}/{replica}.json"
    root.put(key, dump_checked_json(pull, key))


def read_pulls(root: Store, version: int) -> list[JsonObject]:
    """Read the records of all replicas that pulled `version`."""
    pulls: list[JsonObject] = []
    for key in root.keys(f"{_PULL_RECORDS}/{version:06d}"):
        data = root.get(key)
        if data:
            pull = load_checked_json(
                data,
                key,
                root.url,
                _REMEDY,
                shape=PULL,
            )
            pulls.append(pull)
    return pulls
