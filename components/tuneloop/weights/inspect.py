"""Look at published versions, and drop those that nothing needs."""

import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.weights import codec, live
from tuneloop.weights.layout import Bytes, Tensor
from tuneloop.weights.materialize import (
    check_directory,
    materialize_version,
    plan_restoration,
    read_tensors,
)
from tuneloop.weights.versions import INDEX, Chain, get_version_directory


@dataclass(frozen=True)
class Listed:
    """One version: `encoding` None is full, or `held` by readers; `density` is the share of elements that differ."""

    version: int
    base_version: int | None
    encoding: codec.Encoding | None
    stored_bytes: int
    full_bytes: int
    density: float | None
    latest: bool
    held: bool


def list_versions(root: str | Store, newest: int = 0) -> list[Listed]:
    """List all complete versions, or only the `newest` ones, oldest first."""
    chain = Chain(root)
    listed = []
    for version in chain.versions[-newest:]:
        index = chain.entry(version).index
        about, latest = index.tuneloop, version == chain.latest
        full = sum(f.size for f in about.files.values() if f.header)
        stored, held = about.stored_bytes, about.held is not None
        listed.append(
            Listed(version, index.base, index.encoding, stored, full, index.density, latest, held)
        )
    return listed


def verify_version(
    root: str | Store | Chain, version: int | None = None, *, base: Path | None = None
) -> int:
    """Prove that a version can be assembled; count its tensors. Raises UserError, Corrupt as `materialize_version`."""
    chain = root if isinstance(root, Chain) else Chain(root)
    entry = chain.entry(chain.target(version))
    with tempfile.TemporaryDirectory(prefix="tuneloop-weights-") as scratch:
        materialize_version(chain, entry.version, f"{scratch}/model", base=base)
        return check_directory(Path(scratch) / "model", entry)


@dataclass(frozen=True)
class Difference:
    """The tensors that were added, removed or changed (name → share of elements that differ), and their `roles`."""

    added: list[str]
    removed: list[str]
    changed: dict[str, float]
    same: int
    roles: dict[str, str]


def diff_versions(
    root: str | Store, first: int, second: int, role: str = "", base: Path | None = None
) -> Difference:
    """Compare two versions by checksums, and tensors whose checksums differ by their bytes; no other bytes are read. A
    tensor whose dtype or shape differs counts as changed everywhere (density 1). With `role` only those are compared
    whose role (`tuneloop.weights.roles`) begins with it, as ``expert``. Raises UserError: none has it."""
    chain = Chain(root)
    both = [
        chain.entry(chain.target(version)).index.tuneloop.checksums for version in (first, second)
    ]
    plans = [plan_restoration(chain, version) for version in (first, second)]
    roles = {
        n: r
        for plan in plans
        if plan.full
        for n, r in (plan.full.index.tuneloop.roles or {}).items()
    }
    if not any(each.startswith(role) for each in ("", *roles.values())):
        there = ", ".join(sorted({*roles.values()})) or "none"
        raise UserError("--role", role, f"no tensor has it; there are: {there}")
    a, b = ({n: d for n, d in each.items() if roles.get(n, "").startswith(role)} for each in both)
    names = [n for n in a if n in b and a[n] != b[n]]
    old, new = (
        read_tensors(chain, version, names, base=base) if names else ()
        for version in (first, second)
    )
    densities = {name: _density(*one, *other) for name, one, other in zip(names, old, new)}
    added, removed = sorted(b.keys() - a.keys()), sorted(a.keys() - b.keys())
    return Difference(added, removed, densities, sum(a[n] == b.get(n) for n in a), roles)


def _density(a: Tensor, old: Bytes, b: Tensor, new: Bytes) -> float:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return 1.0
    kind = f"<u{a.width}"
    return float(np.mean(old.view(kind) != new.view(kind)))


def delete_unused_versions(
    root: str | Store, keep: int = 1, pinned: Collection[int] = (), *, delete: bool = True
) -> list[int]:
    """Delete versions that nothing needs, and return them; with `delete` false, only return them.

    Kept are the latest, the `keep` newest, `pinned` ones, those that replicas announce (`live`), and every version from
    which one of these is assembled. Leftovers of crashed publications below the latest are deleted, too; above it a
    publication may be in progress. Raises UserError if `keep` is below 1, or a pinned version does not exist."""
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
    for version in dropped:  # the index first: without it the whole version does not exist
        chain.store.delete(f"{get_version_directory(version)}/{INDEX}")
    whole = {
        get_version_directory(v)
        for v in {*needed, *(v for v in chain.versions if v >= chain.latest)}
    }
    for place in sorted({key.partition("/")[0] for key in chain.keys}):
        number = place.removeprefix("weight_v")
        if (
            place not in whole
            and number != place
            and number.isdigit()
            and int(number) < chain.latest
        ):
            chain.store.delete(place)
    return dropped
