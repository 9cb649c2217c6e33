"""Checkpoints that a loop has left behind: which of them are still needed, and the deletion of the
others.

`policy_update` deletes after each commit. `tuneloop gc --keep` has code of its own
(`runs/retention.py`) on `list_needed`, `list_pinned` and the note `keep_every`.
`planning/disk.py` computes the room that the rules leave. Forks and promotions pin what they need.
The names of files and notes here are those of committed artifacts, and `runs/audit.py` reads them.

Tests: `tests/unit/runs/test_retention.py` and `test_forking.py`.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Protocol

from tuneloop.core.artifacts import PRUNED, Artifact, Manifest, find_manifest, split_ref
from tuneloop.core.context import METRICS, Stage
from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.formats.facts import LineageFacts

STATE = "state"
"""Name, below a checkpoint of `policy_update`, of the artifact with its ``trainer/``, if that was
written.
"""
STATE_FACT = "trainer_state"
"""The fact of such a checkpoint that describes its ``trainer/``, see
`tuneloop.training.checkpoint`.
"""
SINCE = "state_since"
"""The note that names the checkpoint from which updates must be repeated to restore that state."""
KEEP_EVERY = "keep_every"
"""The note of each checkpoint of a loop that has this setting, since it is not tracked."""
PINS = "pins"
"""Folder below a run: ``pins/<key of a checkpoint>/<who needs it>``, for forks and promoted
versions.
"""


class RetentionParams(Protocol):
    """The parameters of a stage that say which of its checkpoints are kept, as `policy_update` has
    them.

    `save_total_limit` of None keeps all. `keep_every` of None keeps no models beside the newest.
    """

    save_total_limit: int | None
    keep_every: int | None


def pin_artifact(artifact: Artifact, owner: str) -> None:
    """Pin an artifact of a loop for `owner`, so that retention keeps it.

    Raises:
        UserError: its files were deleted already.
    """
    run, loop, key = artifact.url.rpartition("/iterations/")
    if not loop:
        return
    pin = f"{PINS}{loop}{key}/{owner}"
    Store(run).put(pin, b"")
    # Only once the pin stands are the files sure to stay.
    files = set(Store(f"{artifact.url}/{artifact.manifest.root}").keys(""))
    if files <= {METRICS} and not artifact.manifest.files.keys() <= {METRICS}:
        Store(run).delete(pin)
        remedy = "has lost its files to retention (save_total_limit, gc); take another"
        raise UserError("artifact", artifact.url, remedy)


def list_pinned(run: str) -> set[str]:
    """List the URLs of the pinned artifacts of the run at the URL `run`."""
    urls: set[str] = set()
    for key in Store(run).keys(PINS):
        artifact_key, _, _ = key.removeprefix(f"{PINS}/").rpartition("/")
        urls.add(f"{run}/{artifact_key}")
    return urls


def list_needed(
    url: str,
    manifest: Manifest,
    find: Callable[[str], Manifest | None],
) -> Iterator[str]:
    """Yield the URLs that are needed to continue training from the checkpoint at `url`.

    These are its adapters' base, and the checkpoints since the trainer's state was written, back to
    the one that ``notes.state_since`` names. The rewards of these updates are needed as well;
    nothing deletes rewards.

    Args:
        find: returns the manifest at a URL, None if there is none.
    """
    facts = LineageFacts.read(manifest)
    if facts.base:
        yield split_ref(facts.base)[0]
    checkpoint: Manifest | None = None
    if facts.trainer_state and not find(f"{url}/{STATE}"):
        checkpoint = manifest
    since = split_ref(manifest.notes[SINCE])[0] if checkpoint else ""
    while checkpoint:
        previous = split_ref(checkpoint.inputs["policy"])[0]
        yield previous
        checkpoint = find(previous) if previous != since else None


def delete_old_checkpoints(stage: Stage[RetentionParams], manifest: Manifest) -> None:
    """Delete the files of all but the newest ``save_total_limit`` checkpoints of a loop, if the
    stage has that limit.

    Also kept are pinned checkpoints, those needed to continue training from a kept one, the models
    of each ``keep_every``th iteration, and all manifests and histories: a run resumes and reports
    as before. Running stages read one of the newest two. It is idempotent.

    Args:
        manifest: of the newest checkpoint, which `stage` has committed.
    """
    limit = stage.params.save_total_limit
    keep_every = stage.params.keep_every
    if limit is None:
        return
    run = stage.out_url.rpartition("/iterations/")[0]
    chain = _walk_back(stage.out_url, manifest)
    newest = list(itertools.islice(chain, limit))
    needed = list_needed_by(run, newest)
    # Oldest first, so that no checkpoint before a deleted one is left if this is interrupted.
    for url, old in reversed(_list_deletable(chain, needed)):
        # A fork may have pinned it since `needed` was listed.
        if url in list_pinned(run):
            break
        # A model that stays is for evaluation and export; training does not go on from it.
        if keep_every and is_kept(old, keep_every):
            Store(url).delete(STATE)
            continue
        prune_checkpoint(url, old, f"save_total_limit={limit}")
        stage.log(f"deleted version {old.version}: save_total_limit is {limit}")


def is_kept(manifest: Manifest, keep_every: int) -> bool:
    """Return whether the model of a checkpoint stays when retention passes on."""
    iteration = manifest.params.get("iteration", 1)
    return bool(iteration % keep_every == 0)


def list_needed_by(run: str, newest: Sequence[tuple[str, Manifest]]) -> set[str]:
    """List the URLs of the pinned checkpoints of a run, and of all that these and the `newest` ones
    need.
    """
    pinned = list_pinned(run)
    needed = set(pinned)
    continued = list(newest)
    for url in pinned:
        manifest = find_manifest(url)
        if manifest:
            continued.append((url, manifest))
    for url, manifest in continued:
        needed.update(list_needed(url, manifest, find_manifest))
    return needed


def _list_deletable(
    chain: Iterable[tuple[str, Manifest]],
    needed: Set[str],
) -> list[tuple[str, Manifest]]:
    """List the checkpoints that are not `needed`, newest first, up to the first without files.

    Those before it were deleted in an earlier iteration.
    """
    deletable: list[tuple[str, Manifest]] = []
    for url, manifest in chain:
        if url in needed:
            continue
        if not Store(url).parts(manifest.root):
            break
        deletable.append((url, manifest))
    return deletable


def prune_checkpoint(url: str, manifest: Manifest, rule: str) -> None:
    """Delete the files of the checkpoint at `url` but for its manifest and history.

    The `rule` by which they are deleted is left beside them. It is there first, so that no file is
    missing without it.
    """
    store = Store(url)
    store.put(PRUNED, rule.encode())
    store.delete(STATE)
    folders = {name.split("/")[0] for name in manifest.files}
    for folder in sorted(folders - {METRICS}):
        store.delete(f"{manifest.root}/{folder}")


def check_trainable(checkpoint: Artifact) -> None:
    """Check that training can go on from a checkpoint: its trainer's state is there, or what
    restores it.

    Raises:
        UserError: retention has deleted that.
    """
    has_facts = LineageFacts.read(checkpoint).trainer_state is not None
    if not has_facts or find_manifest(f"{checkpoint.url}/{STATE}"):
        return
    for url in list_needed(checkpoint.url, checkpoint.manifest, find_manifest):
        if Store(url).get(PRUNED) is not None:
            version = checkpoint.manifest.version
            remedy = (
                f"the trainer's state of version {version} was pruned by retention, and that from "
                "which it could be restored; fork from a newer iteration, or export the model and "
                "train on from that"
            )
            raise UserError("ITERATION", version, remedy)


def _walk_back(url: str, manifest: Manifest | None) -> Iterator[tuple[str, Manifest]]:
    """Yield URL and manifest of the checkpoint at `url` and of earlier ones in the same loop."""
    folder, _, stage_name = url.rsplit("/", 2)
    while manifest and folder.endswith("/iterations"):
        yield url, manifest
        url = split_ref(manifest.inputs["policy"])[0]
        # The policy before the first iteration lies elsewhere.
        if url.rsplit("/", 2)[::2] != [folder, stage_name]:
            return
        manifest = find_manifest(url)
