"""List, verify and compare published versions, and delete those that nothing needs.

`tuneloop weights` (`cli/weights.py`), the page and the report (`ui/describe.py`, `ui/report.py`)
call it. Nothing is deleted that a replica serves (`weights/live.py`) or that a kept version builds
on. The tests are `tests/unit/weights/test_protocol.py`.
"""

import re
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.weights import codec, live
from tuneloop.weights.layout import Bytes, Tensor
from tuneloop.weights.materialize import check_directory, materialize_version
from tuneloop.weights.restoration import plan_restoration
from tuneloop.weights.tensors import read_tensors
from tuneloop.weights.versions import INDEX, Chain, get_version_directory

_VERSION_DIRECTORY = re.compile(r"weight_v(\d+)")
"""Matches what `weights/versions.py: get_version_directory` returns, also of leftovers."""


@dataclass(frozen=True)
class Listed:
    """One version in a list; the page reads the fields by name (``ui/static/weights.js``).

    Attributes:
        version, base_version: as in the index.
        encoding: of the delta; None for a full version, and one whose weights readers hold.
        stored_bytes, full_bytes: bytes in the store, and of the model's safetensors.
        density: the share of elements that differ from the base version.
        latest: whether the pointer names it.
        held_by_readers: whether readers hold its weights, so that the store does not.
    """

    version: int
    base_version: int | None
    encoding: codec.Encoding | None
    stored_bytes: int
    full_bytes: int
    density: float | None
    latest: bool
    held_by_readers: bool


def list_versions(root: str | Store, newest: int = 0) -> list[Listed]:
    """List all complete versions below `root`, or only the `newest` ones, oldest first."""
    chain = Chain(root)
    listed: list[Listed] = []
    for version in chain.versions[-newest:]:
        index = chain.entry(version).index
        extra = index.tuneloop
        entry = Listed(
            version=version,
            base_version=index.base,
            encoding=index.encoding,
            stored_bytes=extra.stored_bytes,
            full_bytes=sum(file.size for file in extra.files.values() if file.header),
            density=index.density,
            latest=version == chain.latest,
            held_by_readers=extra.readers_digest is not None,
        )
        listed.append(entry)
    return listed


def verify_version(
    root: str | Store | Chain,
    version: int | None = None,
    *,
    base: Path | None = None,
) -> int:
    """Prove that a version (None: the latest) can be assembled, and count its tensors.

    `base` is the model that the chain starts on, where it stores none.

    Raises:
        UserError, Corrupt: as `materialize_version`.
    """
    chain = root if isinstance(root, Chain) else Chain(root)
    entry = chain.entry(chain.resolve_version(version))
    with tempfile.TemporaryDirectory(prefix="tuneloop-weights-") as scratch:
        directory = Path(scratch) / "model"
        materialize_version(
            chain,
            entry.version,
            directory,
            base=base,
        )
        return check_directory(directory, entry)


@dataclass(frozen=True)
class Difference:
    """The difference of two versions.

    Attributes:
        added, removed: tensors that only the second or only the first version has.
        changed: tensor → share of its elements that differ.
        same: the number of equal tensors.
        roles: tensor → its role (`tuneloop.weights.roles`).
    """

    added: list[str]
    removed: list[str]
    changed: dict[str, float]
    same: int
    roles: dict[str, str]


def diff_versions(
    root: str | Store,
    first: int,
    second: int,
    role: str = "",
    base: Path | None = None,
) -> Difference:
    """Compare two versions by checksums, and tensors whose checksums differ by their bytes.

    No other bytes are read. A tensor whose dtype or shape differs counts as changed everywhere
    (density 1).

    Args:
        root: the URL of the weights root, or a store on it.
        first, second: the versions.
        role: compare only tensors whose role begins with this text, such as ``expert``.
        base: the model that the chain starts on, where it stores none.

    Raises:
        UserError: a version is not published, or no tensor has the role.
        Corrupt: the published files are damaged.
    """
    chain = Chain(root)
    roles: dict[str, str] = {}
    for version in (first, second):
        # Deltas keep the roles of the full version that they build on.
        plan = plan_restoration(chain, chain.resolve_version(version))
        if plan.full:
            roles |= plan.full.index.tuneloop.roles or {}
    if role and not any(name.startswith(role) for name in roles.values()):
        choices = ", ".join(sorted(set(roles.values()))) or "none"
        raise UserError(
            "--role",
            role,
            f"no tensor has it; there are: {choices}",
        )

    def read_checksums(version: int) -> dict[str, str]:
        checksums = chain.entry(version).index.tuneloop.checksums
        return {
            name: checksum
            for name, checksum in checksums.items()
            if roles.get(name, "").startswith(role)
        }

    old = read_checksums(first)
    new = read_checksums(second)
    common = [name for name in old if name in new]
    changed = [name for name in common if old[name] != new[name]]
    densities: dict[str, float] = {}
    if changed:
        # Generators: one tensor of either version is in memory at a time.
        old_tensors = read_tensors(chain, first, changed, base=base)
        new_tensors = read_tensors(chain, second, changed, base=base)
        for name, old_tensor, new_tensor in zip(changed, old_tensors, new_tensors):
            densities[name] = _compute_density(old_tensor, new_tensor)
    return Difference(
        added=sorted(new.keys() - old.keys()),
        removed=sorted(old.keys() - new.keys()),
        changed=densities,
        same=len(common) - len(changed),
        roles=roles,
    )


def _compute_density(
    old: tuple[Tensor, Bytes],
    new: tuple[Tensor, Bytes],
) -> float:
    """Return the share of elements that differ in two states of a tensor."""
    old_tensor, old_data = old
    new_tensor, new_data = new
    if (old_tensor.dtype, old_tensor.shape) != (new_tensor.dtype, new_tensor.shape):
        return 1.0
    # Integers, not floats: -0.0 equals 0.0, and NaN differs from itself.
    element = f"<u{old_tensor.width}"
    is_different = old_data.view(element) != new_data.view(element)
    return float(np.mean(is_different))


def delete_unused_versions(
    root: str | Store,
    keep: int = 1,
    pinned: Collection[int] = (),
    *,
    delete: bool = True,
) -> list[int]:
    """Delete versions that nothing needs, and return them; with `delete` false, only return them.

    The latest, the `keep` newest and the `pinned` versions stay, those that replicas announce
    (`live`), and every version from which one of these is assembled. Leftovers of crashed
    publications below the latest are deleted, too; above it a publication may be in progress. What
    `weights/publication.py` and `weights/live.py` recorded of a version stays, for reports.

    Raises:
        UserError: `keep` is below 1, or a pinned version does not exist.
    """
    if keep < 1:
        raise UserError("keep", keep, "must be at least 1")
    chain = Chain(root)
    latest = chain.latest
    if latest is None:
        return []
    wanted_versions = {latest}
    wanted_versions.update(chain.versions[-keep:], pinned)
    served = live.list_served_versions(chain.store).values()
    # A replica may announce a version of another root, or one that is gone.
    wanted_versions.update(set(served) & set(chain.versions))
    needed = _find_needed_versions(chain, wanted_versions)
    unused = [version for version in chain.versions if version < latest and version not in needed]
    if not delete:
        return unused

    # The index first: without it the whole version does not exist.
    for version in unused:
        chain.store.delete(f"{get_version_directory(version)}/{INDEX}")
    complete = needed.union(version for version in chain.versions if version >= latest)
    complete_directories = set(map(get_version_directory, complete))
    directories = {key.partition("/")[0] for key in chain.keys}
    for directory in sorted(directories - complete_directories):
        match = _VERSION_DIRECTORY.fullmatch(directory)
        # Above the latest version another process may be publishing.
        if match and int(match[1]) < latest:
            chain.store.delete(directory)
    return unused


def _find_needed_versions(chain: Chain, wanted_versions: set[int]) -> set[int]:
    """Return `wanted_versions` and all versions from which one of them is assembled.

    Raises:
        UserError: one of them does not exist.
    """
    needed: set[int] = set()
    for version in wanted_versions:
        for _, entry in chain.walk_back(chain.resolve_version(version)):
            needed.add(entry.version)
            # A reader without a version begins at the newest full one.
            if entry.index.encoding is None:
                break
    return needed
