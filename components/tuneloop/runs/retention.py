"""Data that a run no longer needs: uncommitted attempts, resume points of committed stages, and
old checkpoints.

A manifest names the one directory that is the artifact; other data below its URL belongs to
attempts that lost a race or died. It is not touched if it was written to lately, as its stage may
still be running, on any machine.

`tuneloop gc` calls it. The loop itself deletes old checkpoints while it runs, and both ask the same
functions what is still needed (`training/old_checkpoints.py`).
"""

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tuneloop.core.artifacts import MANIFEST, PRUNED, Manifest, find_manifest, parse_manifest
from tuneloop.core.context import METRICS
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import STAGED, Store
from tuneloop.runs.run_record import Run
from tuneloop.training.old_checkpoints import (
    KEEP_EVERY,
    STATE,
    is_kept,
    list_needed,
    list_pinned,
)

IDLE_S = 86400.0
"""The seconds without a write after which an attempt counts as dead."""
FileSizes = Mapping[str, tuple[int, float]]
"""Key below the run's URL → bytes, and when the file was written, Unix seconds."""


@dataclass(frozen=True)
class Leftover:
    """Something to delete.

    Attributes:
        key: a file or a directory below the run's URL.
        reason: why it is not needed, in words.
        size: its bytes.
        checkpoint: the key of the old checkpoint that it is part of; empty for other data.
    """

    key: str
    reason: str
    size: int
    checkpoint: str = ""


def find_leftovers(
    run: Run,
    *,
    keep: int | None = None,
    idle: float = IDLE_S,
) -> list[Leftover]:
    """Find what `delete_leftovers` deletes, sorted by key.

    The `keep` newest checkpoints and pinned ones are kept, and those needed to continue training
    from them: the base of adapters, and all since the trainer's state was written. Of those that
    the run keeps by `keep_every`, the model is kept. Others keep only manifest and history: the run
    still resumes and reports, but they cannot be loaded.

    Args:
        run: the run whose data is looked at.
        keep: how many of the newest checkpoints are kept; None: all.
        idle: only attempts that were not written to for so many seconds are deleted.

    Raises:
        UserError: `keep` is below 1.
    """
    if keep is not None and keep < 1:
        remedy = "must be at least 1: the loop goes on from the newest checkpoint"
        raise UserError("--keep", keep, remedy)
    store = Store(run.url)
    files = store.stat()
    leftovers = _find_dead_attempts(
        files,
        _find_roots(store, files),
        time.time() - idle,
    )
    if keep:
        leftovers += _find_old_files(run, keep, files)
    return sorted(leftovers, key=lambda leftover: leftover.key)


def delete_leftovers(
    run: Run,
    leftovers: list[Leftover],
) -> None:
    """Delete the leftovers of a run."""
    store = Store(run.url)
    # A checkpoint is marked before its first file is deleted, so that an audit knows why files
    # are missing.
    for key in sorted({leftover.checkpoint for leftover in leftovers if leftover.checkpoint}):
        store.put(f"{key}/{PRUNED}", b"gc --keep")
    for leftover in leftovers:
        store.delete(leftover.key)


def _find_roots(
    store: Store,
    files: FileSizes,
) -> dict[str, str | None]:
    """Return the prefix of each artifact, as ``sft/``, and the name of the data directory that is
    the artifact.

    The name is None where that directory has no files, or the manifest is damaged.
    """
    roots: dict[str, str | None] = {}
    for key in files:
        if key.rpartition("/")[2] != MANIFEST:
            continue
        prefix = key.removesuffix(MANIFEST)
        root = _read_root(store, key)
        has_files = any(other.startswith(f"{prefix}{root}/") for other in files)
        roots[prefix] = root if has_files else None
    return roots


def _read_root(
    store: Store,
    key: str,
) -> str | None:
    """Return the data directory that the manifest `key` names; None if the manifest is damaged."""
    url = f"{store.url}/{key.removesuffix(f'/{MANIFEST}')}"
    with contextlib.suppress(Corrupt):
        return parse_manifest(url, store.get(key) or b"").root
    return None


def _find_dead_attempts(
    files: FileSizes,
    roots: Mapping[str, str | None],
    limit: float,
) -> list[Leftover]:
    """Find the directories and files that belong to no artifact and were last written before
    `limit`, Unix seconds.
    """
    keys_by_directory: dict[str, list[str]] = {}
    reasons: dict[str, str] = {}
    for key in files:
        unused = _find_unused_directory(key, roots)
        if unused:
            directory, reason = unused
            keys_by_directory.setdefault(directory, []).append(key)
            reasons[directory] = reason
    attempts: list[Leftover] = []
    for directory, keys in keys_by_directory.items():
        # One fresh file shows that the whole attempt may still be running.
        written = max(files[key][1] for key in keys)
        if written < limit:
            size = sum(files[key][0] for key in keys)
            attempts.append(Leftover(directory, reasons[directory], size))
    return attempts


def _find_unused_directory(
    key: str,
    roots: Mapping[str, str | None],
) -> tuple[str, str] | None:
    """Return the directory that a file belongs to, and why it can be deleted; None for a file in
    use.

    Beside the data of an artifact, files stay, and so do directories with a manifest of their own.
    Any other directory there is deleted, whatever stage writes it.
    """
    parts = key.split("/")
    if STAGED.fullmatch(parts[-1]):
        return key, "unfinished write"
    for depth in range(1, len(parts)):
        prefix = "/".join(parts[:depth]) + "/"
        name = parts[depth]
        is_directory = depth < len(parts) - 1
        if prefix not in roots:
            # An artifact whose manifest is further up may have such a directory, too.
            is_inside = any(prefix.startswith(artifact) for artifact in roots)
            if name.startswith("data-") and is_directory and not is_inside:
                return prefix + name, "attempt of a stage that did not commit"
            continue
        # Nothing is deleted beside a damaged manifest: it does not say what the artifact is.
        if roots[prefix] is None or name in (MANIFEST, roots[prefix]):
            return None
        # An artifact of its own, committed later.
        if f"{prefix}{name}/" in roots:
            continue
        if name == "resume":
            return prefix + name, "resume point of a stage that has committed"
        if is_directory:
            return prefix + name, "attempt that lost the race to commit"
    return None


def _find_old_files(
    run: Run,
    keep: int,
    files: FileSizes,
) -> Iterator[Leftover]:
    """Yield the files of checkpoints that the loop has gone beyond, all but their histories."""
    old = _find_old_checkpoints(run, keep)
    for key, (size, _) in files.items():
        # iterations/<i>/<stage>/<part>/<name>
        parts = key.split("/", 4)
        if len(parts) < 5:
            continue
        checkpoint = "/".join(parts[:3])
        manifest = old.get(checkpoint)
        if manifest is None:
            continue
        keep_every = manifest.notes.get(KEEP_EVERY)
        if keep_every and is_kept(manifest, keep_every):
            # What is left of it is no pruned checkpoint: its model can be loaded.
            if parts[3] == STATE:
                reason = f"trainer's state of version {manifest.version}"
                yield Leftover(key, reason, size)
        elif parts[3] in (manifest.root, STATE) and parts[4] != METRICS:
            reason = f"checkpoint of version {manifest.version}"
            yield Leftover(key, reason, size, checkpoint)


def _find_old_checkpoints(
    run: Run,
    keep: int,
) -> dict[str, Manifest]:
    """Return key → manifest of the checkpoints that neither the loop nor anybody else needs any
    more.
    """
    looped = [entry for entry in run.checkpoints if entry.iteration is not None]
    manifests = {f"{run.url}/{entry.key}": entry.manifest for entry in run.checkpoints}
    needed = {f"{run.url}/{entry.key}" for entry in looped[-keep:]}
    needed |= list_pinned(run.url)

    def find_source(url: str) -> Manifest | None:
        # A fork's checkpoints go back to those of another run.
        return manifests.get(url) or find_manifest(url)

    for url in needed & manifests.keys():
        needed |= set(list_needed(url, manifests[url], find_source))
    return {
        entry.key: entry.manifest
        for entry in looped[:-keep]
        if f"{run.url}/{entry.key}" not in needed
    }
