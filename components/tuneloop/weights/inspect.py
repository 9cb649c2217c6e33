"""Look at published versions, and drop those that nothing needs."""

import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.weights import codec, delta, live
from tuneloop.weights.layout import Checkpoint
from tuneloop.weights.materialize import check_directory, materialize_version
from tuneloop.weights.versions import INDEX, Chain, get_version_directory


@dataclass(frozen=True)
class Listed:
    """One version: `encoding` None is full; `density` is the share of elements that differ from `base_version`."""

    version: int
    base_version: int | None
    encoding: codec.Encoding | None
    stored_bytes: int
    full_bytes: int
    density: float | None
    latest: bool


def list_versions(root: str | Store) -> list[Listed]:
    """List all complete versions, oldest first."""
    chain = Chain(root)
    listed = []
    for version in chain.versions:
        index = chain.entry(version).index
        about, latest = index.tuneloop, chain.pointed is not None and chain.pointed.version == version
        full = sum(f.size for f in about.files.values() if f.header)
        listed.append(Listed(version, index.base, index.encoding, about.stored_bytes, full, index.density, latest))
    return listed


@dataclass(frozen=True)
class Verified:
    """`tensors` of `tensors` were found identical (anything less raises)."""

    version: int
    tensors: int


def verify_version(root: str | Store, version: int | None = None, held: Path | str | None = None) -> Verified:
    """Prove that a version (None: the latest) can be assembled, or that the directory `held` is that version.

    Raises:
        Corrupt: the first difference.
        UserError: no such version.
    """
    chain = Chain(root)
    entry = chain.entry(chain.target(version))
    if held is not None:
        return Verified(entry.version, check_directory(Path(held), entry, delta.thread_count()))
    with tempfile.TemporaryDirectory(prefix="tuneloop-weights-") as scratch:
        materialize_version(chain.store, entry.version, f"{scratch}/model")
        return Verified(entry.version, check_directory(Path(scratch) / "model", entry, delta.thread_count()))


@dataclass(frozen=True)
class Difference:
    """Tensor names by what became of them, and the share of elements that differ in those that changed."""

    added: list[str]
    removed: list[str]
    changed: dict[str, float]
    same: int


def diff_versions(root: str | Store, first: int, second: int) -> Difference:
    """Compare two versions: names by their checksums, densities by their bytes.

    A tensor whose dtype or shape differs counts as changed everywhere (density 1).
    """
    chain = Chain(root)
    a, b = (chain.entry(chain.target(v)).index.tuneloop.checksums for v in (first, second))
    names, densities = [n for n in a if n in b and a[n] != b[n]], dict[str, float]()
    with tempfile.TemporaryDirectory(prefix="tuneloop-weights-") as scratch:
        if names:
            for version in (first, second):
                materialize_version(chain.store, version, f"{scratch}/{version}")
            old, new = (Checkpoint(Path(scratch) / str(v)) for v in (first, second))
            densities = {n: _density(old, new, n) for n in names}
    added, removed = sorted(b.keys() - a.keys()), sorted(a.keys() - b.keys())
    return Difference(added, removed, densities, sum(a[n] == b.get(n) for n in a))


def _density(old: Checkpoint, new: Checkpoint, name: str) -> float:
    a, b = old.tensors[name], new.tensors[name]
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return 1.0
    kind = f"<u{a.width}"
    return float(np.mean(old.view(name).view(kind) != new.view(name).view(kind)))


def delete_unused_versions(
    root: str | Store, keep: int = 1, pinned: Collection[int] = (), *, delete: bool = True
) -> list[int]:
    """Delete versions; return those deleted, or with `delete` false those that would be.

    What stays: the latest, the `keep` newest, those in `pinned`, those that replicas say they serve (`live`), and every
    version that one of them is assembled from. Leftovers of crashed publications below the latest go too;
    above it somebody may be publishing.

    Raises:
        UserError: `keep` is below 1, or a pinned version does not exist.
    """
    if keep < 1:
        raise UserError("keep", keep, "must be at least 1")
    chain = Chain(root)
    if chain.latest is None:
        return []
    needed: set[int] = set()
    served = set(live.list_served_versions(chain.store).values()) & set(chain.versions)
    for version in {*chain.versions[-keep:], chain.latest, *pinned, *served}:
        for _, entry in chain.steps(chain.target(version)):
            needed.add(entry.version)
            if entry.index.encoding is None:
                break
    dropped = [v for v in chain.versions if v < chain.latest and v not in needed]
    if not delete:
        return dropped
    for version in dropped:  # the index first: without it the version is gone as a whole
        chain.store.delete(f"{get_version_directory(version)}/{INDEX}")
    whole = {get_version_directory(v) for v in {*needed, *(v for v in chain.versions if v >= chain.latest)}}
    for place in sorted({key.partition("/")[0] for key in chain.keys}):
        number = place.removeprefix("weight_v")
        if place not in whole and number != place and number.isdigit() and int(number) < chain.latest:
            chain.store.delete(place)
    return dropped
