"""Weight versions: published once, full or as a delta; pulled by any number of replicas; proved before they serve.

The trainer calls `publish`, a replica `materialize`; `docs/weights.md` is the protocol between them, written so that
either side can be replaced.
"""

from tuneloop.weights.inspect import Difference, Listed, Verified, diff, gc, ls, verify
from tuneloop.weights.materialize import Materialized, materialize
from tuneloop.weights.pointer import PointerConflict, PointerRewind
from tuneloop.weights.publish import Published, publish

__all__ = [
    "Difference", "Listed", "Materialized", "PointerConflict", "PointerRewind", "Published", "Verified",
    "diff", "gc", "ls", "materialize", "publish", "verify",
]  # fmt: skip
