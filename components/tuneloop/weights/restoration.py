"""Plan how a version is restored: from a full version and deltas, or by deltas alone.

A plan is only arithmetic over indexes: `weights/materialize.py` carries it out for a whole model,
`weights/tensors.py` for some tensors. `weights/inspect.py` reads roles from the full version of a
plan. The tests are in `tests/unit/weights/test_protocol.py`.
"""

from dataclasses import dataclass
from pathlib import Path

from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Store
from tuneloop.weights import delta, versions
from tuneloop.weights.layout import Checkpoint, build_blame
from tuneloop.weights.versions import Chain, Entry


@dataclass(frozen=True)
class Plan:
    """How to restore a version.

    Attributes:
        target: the version to restore.
        current: the version that the directory holds; None if it holds none.
        full: the full version to copy; None if `steps` continue from `current`.
        steps: the deltas to apply, in order.
    """

    target: Entry
    current: int | None
    full: Entry | None
    steps: list[Entry]

    @property
    def read_bytes(self) -> int:
        """Bytes of all stored files that the plan reads."""
        total = sum(step.index.tuneloop.stored_bytes for step in self.steps)
        if self.full:
            total += self.full.index.tuneloop.stored_bytes
        return total


def plan_restoration(chain: Chain, target: int, current: int | None = None) -> Plan:
    """Choose the way that reads fewer bytes: deltas from the `current` version, or a full version.

    The full version is the newest one at or below the target.

    Raises:
        UserError: `target` is not published.
        Corrupt: no full version is left below it, or an index is damaged.
    """
    entry = chain.entry(target)
    # The deltas that lead from `version_entry` to the target, last one first.
    steps: list[Entry] = []
    from_full: Plan | None = None
    # `step` is the delta that leads to `version_entry` from its base; None where no delta is stored.
    for step, version_entry in chain.walk_back(target):
        if version_entry.version == current:
            in_place = Plan(entry, current, None, steps[::-1])
            if from_full is None or in_place.read_bytes <= from_full.read_bytes:
                return in_place
            return from_full
        if version_entry.index.encoding is None and from_full is None:
            from_full = Plan(entry, current, version_entry, steps[::-1])
            # Further back lies the current version, if it is older: its deltas may be smaller.
            if current is None or current > version_entry.version:
                return from_full
        if step is None:
            break
        steps.append(step)
    if from_full is None:
        raise Corrupt(
            "weights",
            f"{chain.store.url}/{versions.get_version_directory(target)}",
            "builds on a version that is gone, and no full version is left below it",
        )
    return from_full


def open_base(full: Entry, base: Path | None) -> Store:
    """Open the directory `base`, which has to hold the weights of the full version `full`.

    The root has only their digest (`Extra.readers_digest` of `weights/versions.py`).

    Raises:
        UserError: it holds others, or none was given.
    """
    expected = full.index.tuneloop.readers_digest
    # The digest of all bytes, as names and sizes would not tell another model of this shape.
    digest = None
    if base:
        model = Checkpoint(base)
        digest = versions.digest_weights(model.headers, delta.compute_checksums(model))
    if base is None or digest != expected:
        raise UserError(
            "--base",
            base and str(base),
            f"its weights are {digest}, but version {full.version}, which stores no weights,"
            f" needs {expected}; give the model that the run began with",
        )
    return Store(str(base))


def fetch_file(
    store: Store,
    key: str,
    path: Path,
    *,
    copy: bool = False,
) -> Path:
    """Return a local file with the bytes of `key`.

    It is downloaded to `path` if the store is remote or a copy is wanted; else it is the store's.

    Raises:
        Corrupt: there is no such file in a local store.
    """
    if store.root is None or copy:
        store.download(key, path)
        return path
    local_file = store.root / key
    if not local_file.is_file():
        blame = build_blame(f"{store.url}/{key}", delta.MEND)
        raise blame("is missing although its index exists")
    return local_file
