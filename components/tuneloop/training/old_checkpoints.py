"""Checkpoints that a loop has left behind: which of them are still needed, and the deletion of the others."""

import itertools
from collections.abc import Callable, Iterator
from typing import Protocol

from tuneloop.core.artifacts import PRUNED, Artifact, Manifest, find_manifest, split_ref
from tuneloop.core.context import Stage
from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.formats.facts import LineageFacts

STATE = "state"
"""Name, below a checkpoint of `policy_update`, of the artifact with its ``trainer/``, if that was written."""
STATE_FACT = "trainer_state"
"""The fact of such a checkpoint that describes its ``trainer/`` (`tuneloop.training.checkpoint`)."""
SINCE = "state_since"
"""The note that names the checkpoint from which updates must be repeated to restore that state."""
PINS = "pins"
"""Folder below a run: ``pins/<key of a checkpoint>/<who needs it>``, for forks and promoted versions."""
HISTORY = "metrics.jsonl"
"""The file that is kept of a deleted checkpoint, beside its manifest: the curves of a run need it."""


class RetentionParams(Protocol):
    """The parameters of a stage that say which of its checkpoints are kept; None: all, and none beside these."""

    save_total_limit: int | None
    keep_every: int | None


def pin_artifact(made: Artifact, who: str) -> None:
    """Pin an artifact of a loop for `who`, so that retention keeps it. Raises UserError if its files were deleted."""
    run, loop, key = made.url.rpartition("/iterations/")
    if not loop:
        return
    Store(run).put(pin := f"{PINS}{loop}{key}/{who}", b"")
    there = {
        *Store(f"{made.url}/{made.manifest.root}").keys("")
    }  # checked after pinning: from then on they are kept
    if there <= {HISTORY} and not made.manifest.files.keys() <= {HISTORY}:
        Store(run).delete(pin)
        raise UserError(
            "artifact",
            made.url,
            "has lost its files to retention (save_total_limit, gc); take another",
        )


def list_pinned(run: str) -> set[str]:
    """List the URLs of the pinned artifacts of the run at the URL `run`."""
    return {
        f"{run}/{key.removeprefix(f'{PINS}/').rpartition('/')[0]}" for key in Store(run).keys(PINS)
    }


def list_needed(url: str, made: Manifest, find: Callable[[str], Manifest | None]) -> Iterator[str]:
    """Yield the URLs that are needed to continue training from the checkpoint at `url`: its adapters' base, and the
    checkpoints since the trainer's state was written; rewards are never deleted. `find` returns a URL's manifest."""
    facts = LineageFacts.read(made)
    if base := facts.base:
        yield split_ref(base)[0]
    found = made if facts.trainer_state and not find(f"{url}/{STATE}") else None
    while found:
        yield (before := split_ref(found.inputs["policy"])[0])
        found = find(before) if before != split_ref(made.notes[SINCE])[0] else None


def delete_old_checkpoints(stage: Stage[RetentionParams], manifest: Manifest) -> None:
    """Delete the files of all but the newest ``save_total_limit`` checkpoints of a loop, if the stage has that limit.

    Also kept are pinned checkpoints, those needed to continue training from a kept one, the models of each
    ``keep_every``th iteration, and all manifests and histories: a run resumes and reports as before. Running stages
    read one of the newest two. It is idempotent."""
    keep = stage.params.save_total_limit
    keep_every = stage.params.keep_every
    if keep is None:
        return
    chain = _walk_back(stage.out_url, manifest)
    kept = [*itertools.islice(chain, keep)]
    needed = list_pinned(run := stage.out_url.rpartition("/iterations/")[0])
    kept += [(url, made) for url in needed if (made := find_manifest(url))]
    needed |= {needed for url, made in kept for needed in list_needed(url, made, find_manifest)}
    unneeded = (each for each in chain if each[0] not in needed)
    old = [*itertools.takewhile(lambda each: Store(each[0]).parts(each[1].root), unneeded)]
    for url, made in reversed(old):  # oldest first, so that none before a deleted one is kept
        if url in list_pinned(run):  # it was pinned meanwhile
            break
        if keep_every and made.params.get("iteration", 1) % keep_every == 0:
            Store(url).delete(STATE)
            continue
        prune_checkpoint(url, made, f"save_total_limit={keep}")
        stage.log(f"deleted version {made.version}: save_total_limit is {keep}")


def prune_checkpoint(url: str, made: Manifest, rule: str) -> None:
    """Delete the files of the checkpoint at `url` but for its manifest and history, and leave beside them by what
    `rule`. The rule is there first, so that no file is missing without it."""
    store = Store(url)
    store.put(PRUNED, rule.encode())
    store.delete(STATE)
    for part in sorted({name.split("/")[0] for name in made.files} - {HISTORY}):
        store.delete(f"{made.root}/{part}")


def check_trainable(made: Artifact) -> None:
    """Check that training can go on from a checkpoint: its trainer's state is there, or what restores it. Raises
    UserError where retention has deleted that."""
    if not LineageFacts.read(made).trainer_state or find_manifest(f"{made.url}/{STATE}"):
        return
    for url in list_needed(made.url, made.manifest, find_manifest):
        if Store(url).get(PRUNED) is not None:
            version = made.manifest.version
            remedy = f"the trainer's state of version {version} was pruned by retention, and that from which it"
            remedy += " could be restored; fork from a newer iteration, or export the model and train on from that"
            raise UserError("ITERATION", version, remedy)


def _walk_back(url: str, made: Manifest | None) -> Iterator[tuple[str, Manifest]]:
    """Yield URL and manifest of the checkpoint at `url` and of earlier ones in the same loop."""
    place, _, name = url.rsplit("/", 2)
    while made and place.endswith("/iterations") and url.rsplit("/", 2)[::2] == [place, name]:
        yield url, made
        url = split_ref(made.inputs["policy"])[0]
        made = find_manifest(url)
