"""Data that a run no longer needs: uncommitted attempts, resume points of committed stages, and old checkpoints. A
manifest names the one directory that is the artifact; other data below its URL belongs to attempts that lost a race or
died. It is not touched if it was written to lately, as its stage may still be running, on any machine."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tuneloop.core.artifacts import MANIFEST, PRUNED, find_manifest, parse_manifest
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import STAGED, Store
from tuneloop.runs.run_record import Run
from tuneloop.training.old_checkpoints import HISTORY, STATE, list_needed, list_pinned


@dataclass(frozen=True)
class Leftover:
    """Something to delete: its key below the run's URL, why in words, and its bytes. `checkpoint`: the key of the old
    checkpoint that it is part of; empty for other data."""

    key: str
    why: str
    size: int
    checkpoint: str = ""


def find_leftovers(run: Run, *, keep: int | None = None, idle: float = 86400.0) -> list[Leftover]:
    """Find what `delete_leftovers` deletes, sorted by key: data not written to for `idle` seconds, and old checkpoints.
    The `keep` newest checkpoints (None: all) and pinned ones are kept, and those needed to continue training from them:
    the base of adapters, and all since the trainer's state was written. Others keep only manifest and history: the run
    still resumes and reports, but they cannot be loaded. Raises UserError if `keep` is below 1."""
    if keep is not None and keep < 1:
        raise UserError(
            "--keep", keep, "must be at least 1: the loop goes on from the newest checkpoint"
        )
    store = Store(run.url)
    files = store.stat()
    roots = {
        key.removesuffix(MANIFEST): _root(store, key)
        for key in files
        if key.rpartition("/")[2] == MANIFEST
    }
    roots = {
        at: root if any(key.startswith(f"{at}{root}/") for key in files) else None
        for at, root in roots.items()
    }
    found: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for key in files:
        if named := _dead(key, roots):
            found.setdefault(named[0], []).append(key)
            reasons[named[0]] = named[1]
    limit = time.time() - idle
    dead = [
        Leftover(place, reasons[place], sum(files[key][0] for key in keys))
        for place, keys in found.items()
        if max(files[key][1] for key in keys) < limit
    ]
    return sorted([*dead, *(_old(run, keep, files) if keep else ())], key=lambda item: item.key)


def delete_leftovers(run: Run, items: list[Leftover]) -> None:
    """Delete the leftovers of a run."""
    store = Store(run.url)
    for place in sorted({item.checkpoint for item in items if item.checkpoint}):
        store.put(f"{place}/{PRUNED}", b"gc --keep")
    for item in items:
        store.delete(item.key)


def _root(store: Store, key: str) -> str | None:
    """Return the data directory that the manifest `key` names; None where it is none, or damaged."""
    with contextlib.suppress(Corrupt):
        return parse_manifest(
            f"{store.url}/{key.removesuffix(f'/{MANIFEST}')}", store.get(key) or b""
        ).root
    return None


def _dead(key: str, roots: Mapping[str, str | None]) -> tuple[str, str] | None:
    """Return the directory that `key` belongs to, and why it can be deleted; None for a file in use."""
    parts = key.split("/")
    if STAGED.fullmatch(parts[-1]):
        return key, "unfinished write"
    for depth in range(1, len(parts)):
        above = "/".join(parts[:depth]) + "/"
        if above not in roots:
            inside = any(
                above.startswith(place) for place in roots
            )  # an artifact whose manifest is further up
            if parts[depth].startswith("data-") and depth < len(parts) - 1 and not inside:
                return above + parts[depth], "attempt of a stage that did not commit"
            continue
        if roots[above] is None or parts[depth] in (MANIFEST, roots[above]):
            return None
        if f"{above}{parts[depth]}/" in roots:
            continue  # an artifact of its own, committed later
        if parts[depth] == "resume":
            return above + "resume", "resume point of a stage that has committed"
        if depth < len(parts) - 1:
            return above + parts[depth], "attempt that lost the race to commit"
    return None


def _old(run: Run, keep: int, files: Mapping[str, tuple[int, float]]) -> Iterator[Leftover]:
    """Yield the files of checkpoints that the loop has left behind."""
    looped = [entry for entry in run.checkpoints if entry.iteration is not None]
    known = {f"{run.url}/{entry.key}": entry.manifest for entry in run.checkpoints}
    needed = {f"{run.url}/{entry.key}" for entry in looped[-keep:]} | list_pinned(run.url)
    kept = ((url, known[url]) for url in needed & known.keys())
    needed |= {
        each
        for place in kept
        for each in list_needed(*place, lambda url: known.get(url) or find_manifest(url))
    }
    old = {
        entry.key: entry.manifest
        for entry in looped[:-keep]
        if f"{run.url}/{entry.key}" not in needed
    }
    for key, (size, _) in files.items():
        *place, part, name = key.split("/", 4) if key.count("/") > 3 else ("", "")
        made = old.get("/".join(place))
        if made and part in (made.root, STATE) and name != HISTORY:
            why = f"checkpoint of version {made.facts['version']}"
            yield Leftover(key, why, size, "/".join(place))
