"""Weight versions: published once, full or as a delta; pulled by any number of replicas; proved before they serve.

The trainer calls `publish_version`, a replica `materialize_version`; `docs/weights.md` is the protocol between them,
written so that either side can be replaced. Which stage publishes, and how a server changes, is not known here.
"""

from tuneloop.weights.inspect import Listed, delete_unused_versions, diff_versions, list_versions, verify_version
from tuneloop.weights.materialize import Materialized, materialize_version
from tuneloop.weights.pointer import PointerConflict, PointerRewind
from tuneloop.weights.publish import Published, publish_version

__all__ = [
    "Listed",
    "Materialized",
    "PointerConflict",
    "PointerRewind",
    "Published",
    "delete_unused_versions",
    "diff_versions",
    "list_versions",
    "materialize_version",
    "publish_version",
    "verify_version",
]
