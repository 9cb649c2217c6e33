"""Audit of a run: whether all that it has committed fits together, proved by SHA-256 from its
root to its files.

As an artifact's digest covers those of its inputs, a run's artifacts are a hash tree, and its
*root* is one digest over all of them: whoever has the root from somebody they trust need not
trust the store.

`tuneloop audit` prints it (`cli/prove.py`); promotions and attestations go by `prove_chain` and
`compute_root` (`runs/promotions.py`, `extensions/provenance/attestation.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tuneloop.core.artifacts import (
    DIGEST,
    MANIFEST,
    PRUNED,
    Artifact,
    hash_canonical_json,
    parse_manifest,
    split_ref,
)
from tuneloop.core.context import METRICS
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Store
from tuneloop.runs.committed import Entry
from tuneloop.runs.run_record import Run
from tuneloop.runs.verification import FileCheck, find_state_entry, verify_artifact
from tuneloop.training.old_checkpoints import STATE, STATE_FACT


@dataclass(frozen=True)
class Proof:
    """The audit of an artifact, or of an input from outside the run.

    Attributes:
        key: its key below the run's URL, or its reference.
        files: how many files are unchanged; None if they were not read.
        problems: a line for each flaw.
        deleted: retention has deleted an old checkpoint of the loop but for its manifest and
            history, which are verified.
    """

    key: str
    files: int | None
    problems: tuple[str, ...] = ()
    deleted: bool = False


def compute_root(run: Run) -> str:
    """Compute the root of what the run has committed so far: the SHA-256 of the canonical JSON of
    key → digest.
    """
    digests = {entry.key: entry.manifest.digest for entry in run.entries}
    return f"{DIGEST}:{hash_canonical_json(digests)}"


def audit_run(run: Run) -> Iterator[Proof]:
    """Prove each artifact of a run, oldest first, and its inputs from outside the run; then the
    trainer's states.

    Manifests are read from the store again, never from the run's index. A file is verified by its
    SHA-256, an input by an artifact with its digest, and a trainer's state, which the root does not
    cover, by the facts of its checkpoint.
    """
    run.refresh(all_iterations=True)
    proved = {entry.manifest.digest for entry in run.entries}
    for entry in run.entries:
        for name, reference in entry.manifest.inputs.items():
            digest = split_ref(reference)[1]
            if digest not in proved:
                proved.add(str(digest))
                yield _prove_outside_input(name, reference)
        yield _prove_entry(run, entry, list(_check_manifest(run, entry)))
    # The root covers no trainer's state: a run may go on without it.
    for checkpoint in run.checkpoints:
        yield from _prove_state(run, checkpoint)


def _prove_outside_input(name: str, reference: str) -> Proof:
    """Verify the manifest of an input from outside the run; its files are not read."""
    try:
        return Proof(Artifact(reference).ref, None)
    except UserError as error:
        return Proof(
            reference,
            None,
            (f"input {name} is not in this run: {error}",),
        )


def _prove_state(run: Run, checkpoint: Entry) -> Iterator[Proof]:
    """Prove the trainer's state below a checkpoint, if it has one."""
    try:
        state = find_state_entry(run, checkpoint)
    except Corrupt as error:
        yield Proof(f"{checkpoint.key}/{STATE}", 0, (str(error),))
        return
    if state is None:
        return
    problems: list[str] = []
    if state.manifest.facts != checkpoint.manifest.facts.get(STATE_FACT):
        problems.append("its facts are not those that its checkpoint states")
    yield _prove_entry(run, state, problems)


def prove_chain(
    run: Run,
    version: int,
    checkpoint: Entry,
    related: Sequence[Entry] = (),
) -> list[Entry]:
    """Audit a checkpoint, other artifacts such as its evaluations, and what all of them were made
    from in the run.

    Returns:
        All of these, oldest first.

    Raises:
        UserError: one of them, or an input from outside the run, has a flaw.
    """
    chain: dict[str, Entry] = {}
    unvisited = [checkpoint]
    unvisited += related
    while unvisited:
        entry = unvisited.pop()
        if entry.key in chain:
            continue
        chain[entry.key] = entry
        sources = map(run.find_entry, entry.manifest.inputs.values())
        unvisited += [source for source in sources if source]
    for proof in audit_run(run):
        problems = list(proof.problems)
        if proof.deleted and proof.key == checkpoint.key:
            problems.append("its files were deleted")
        # Flaws elsewhere in the run do not concern this version.
        is_outside = proof.files is None
        if problems and (proof.key in chain or is_outside):
            remedy = f"does not pass the audit: {proof.key}: {problems[0]}"
            raise UserError("VERSION", version, remedy)
    return sorted(
        chain.values(),
        key=lambda entry: (entry.started, entry.key),
    )


def _prove_entry(
    run: Run,
    entry: Entry,
    problems: list[str],
) -> Proof:
    """Verify the files of an artifact, and add what is wrong with them to the problems of its
    manifest.
    """
    checks = list(verify_artifact(run, entry))
    deleted = _was_pruned(run, entry, checks)
    problems = list(problems)
    for check in checks:
        if check.is_unchanged:
            continue
        if check.actual is not None:
            problems.append(f"{check.key} was changed")
        elif not deleted:
            problems.append(f"{check.key} is missing")
    unchanged = sum(check.is_unchanged for check in checks)
    return Proof(entry.key, unchanged, tuple(problems), deleted)


def _was_pruned(run: Run, entry: Entry, checks: Sequence[FileCheck]) -> bool:
    """Return whether retention has deleted files of this artifact, an old checkpoint of the
    loop.

    `training/old_checkpoints.py: prune_checkpoint` and `runs/retention.py: delete_leftovers` put
    the mark `PRUNED` beside an artifact before they delete its first file, and leave it there.
    Without the mark, an artifact counts as deleted only if nothing but its history is left.
    """
    looped = [checkpoint for checkpoint in run.checkpoints if checkpoint.iteration is not None]
    # The newest checkpoint is never pruned.
    if entry.key not in {checkpoint.key for checkpoint in looped[:-1]}:
        return False
    names = sorted(entry.manifest.files)
    present = {name for name, check in zip(names, checks) if check.actual}
    if len(present) == len(names):
        return False
    # Retention keeps the history alone. A kill may have left more, which the mark beside it
    # explains.
    is_bare = present == {METRICS}.intersection(names)
    return is_bare or Store(run.url).get(f"{entry.key}/{PRUNED}") is not None


def _check_manifest(run: Run, entry: Entry) -> Iterator[str]:
    """Yield what is wrong with the manifest in the store."""
    data = Store(run.url).get(f"{entry.key}/{MANIFEST}") or b""
    try:
        manifest = parse_manifest(f"{run.url}/{entry.key}", data)
    except Corrupt as error:
        yield str(error)
        return
    if manifest != entry.manifest:
        # The run's index may state any digest for what it holds: compute it.
        indexed_digest = entry.manifest.compute_digest()
        yield (
            f"{entry.key}/{MANIFEST} has changed: "
            f"its digest was {indexed_digest}, and is {manifest.digest}"
        )
