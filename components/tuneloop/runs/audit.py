"""Audit of a run: whether all that it has committed fits together, proved by SHA-256 from its root to its files.

An artifact's digest covers the digests of its inputs (`tuneloop.core.artifacts`), so the artifacts of a run are a hash
tree, and its *root* is one digest over them all. Who holds the root, told by somebody they trust, need not trust the
store.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from tuneloop.core.artifacts import MANIFEST, Artifact, dump_canonical_json, find_manifest, parse_manifest, split_ref
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Store
from tuneloop.runs.run_record import Entry, Run
from tuneloop.runs.verification import verify_artifact
from tuneloop.training.old_checkpoints import HISTORY, STATE


@dataclass(frozen=True)
class Proof:
    """What the audit of one artifact, or of an input from outside the run, came to.

    Attributes:
        key: of the artifact below the run's URL; of an input from outside, its reference.
        files: how many files hold what was committed; None where they were not read.
        problems: a line each; empty where everything fits.
        deleted: only its manifest and history are left, as retention leaves old checkpoints; they are proved.
    """

    key: str
    files: int | None
    problems: tuple[str, ...] = ()
    deleted: bool = False


def compute_root(run: Run) -> str:
    """Compute the root of what the run has committed so far: the SHA-256 of the canonical JSON of key → digest."""
    digests = {entry.key: entry.manifest.digest for entry in run.entries}
    return f"sha256:{hashlib.sha256(dump_canonical_json(digests).encode()).hexdigest()}"


def audit_run(run: Run) -> Iterator[Proof]:
    """Prove each artifact of a run, oldest first, and whatever they were made from outside it.

    Manifests are read again from the store, never from the run's index. A file is proved by its SHA-256; an input by
    an artifact of that digest.
    """
    run.refresh(whole=True)
    store = Store(run.url)
    known = {entry.manifest.digest for entry in run.entries}
    # The root leaves the trainer's states out that checkpoints have below them, as they may be deleted.
    states = ((f"{entry.key}/{STATE}", entry) for entry in run.with_role("trainer"))
    below = [Entry(k, e.stage, e.iteration, made) for k, e in states if (made := find_manifest(f"{run.url}/{k}"))]
    for entry in [*run.entries, *below]:
        problems = [*_check_manifest(store, entry)]
        for name, ref in entry.manifest.inputs.items():
            digest = split_ref(ref)[1]
            if digest not in known:
                known.add(str(digest))
                yield _prove_outsider(name, ref)
        checked = [*verify_artifact(run, entry)]
        missing = {one.key.rpartition("/")[2] for one in checked if one.found is None}
        deleted = bool(missing) and all((one.found is None) != one.key.endswith(f"/{HISTORY}") for one in checked)
        wrong = [one for one in checked if not one.good and not (deleted and one.found is None)]
        problems += [f"{one.key} " + ("is missing" if one.found is None else "was changed") for one in wrong]
        yield Proof(entry.key, sum(one.good for one in checked), tuple(problems), deleted)


def _check_manifest(store: Store, entry: Entry) -> Iterator[str]:
    try:
        manifest = parse_manifest(f"{store.url}/{entry.key}", store.get(f"{entry.key}/{MANIFEST}") or b"")
    except Corrupt as error:
        yield str(error)
    else:
        if manifest.digest != entry.manifest.digest:
            yield f"{entry.key}/{MANIFEST} is another than before: {manifest.digest}, not {entry.manifest.digest}"


def _prove_outsider(name: str, ref: str) -> Proof:
    """Prove the manifest of an input that no artifact of the run is; its files are not read."""
    try:
        return Proof(Artifact(ref).ref, None)
    except UserError as error:
        return Proof(ref, None, (f"input {name} is not in this run: {error}",))
