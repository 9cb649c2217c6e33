"""Audit of a run: whether all that it has committed fits together, proved by SHA-256 from its root to its files. As an
artifact's digest covers those of its inputs, a run's artifacts are a hash tree, and its *root* is one digest over all
of them: whoever has the root from somebody they trust need not trust the store."""

from collections.abc import Iterator
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
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Store
from tuneloop.runs.run_record import Entry, Run
from tuneloop.runs.verification import find_state_entry, verify_artifact
from tuneloop.training.old_checkpoints import HISTORY, STATE, STATE_FACT


@dataclass(frozen=True)
class Proof:
    """The audit of an artifact, or of an input from outside the run: `key` is its key or reference. `files` counts the
    files that are unchanged (None: not read); `problems` has a line for each flaw. `deleted`: retention has deleted an
    old checkpoint of the loop but for its manifest and history, which are verified."""

    key: str
    files: int | None
    problems: tuple[str, ...] = ()
    deleted: bool = False


def compute_root(run: Run) -> str:
    """Compute the root of what the run has committed so far: the SHA-256 of the canonical JSON of key → digest."""
    digests = {entry.key: entry.manifest.digest for entry in run.entries}
    return f"{DIGEST}:{hash_canonical_json(digests)}"


def audit_run(run: Run) -> Iterator[Proof]:
    """Prove each artifact of a run, oldest first, and its inputs from outside the run; then the trainer's states.
    Manifests are read from the store again, never from the run's index. A file is verified by its SHA-256, an input by
    an artifact with its digest, and a trainer's state, which the root leaves out, by the facts of its checkpoint."""
    run.refresh(whole=True)
    known = {entry.manifest.digest for entry in run.entries}
    for entry in run.entries:
        for name, ref in entry.manifest.inputs.items():
            if (digest := split_ref(ref)[1]) not in known:
                known.add(str(digest))
                try:  # an input from outside the run: only its manifest is verified
                    proof = Proof(Artifact(ref).ref, None)
                except UserError as error:
                    proof = Proof(ref, None, (f"input {name} is not in this run: {error}",))
                yield proof
        yield _prove(run, entry, [*_check_manifest(run, entry)])
    for entry in run.checkpoints:
        try:
            state = find_state_entry(run, entry)
        except Corrupt as error:
            yield Proof(f"{entry.key}/{STATE}", 0, (str(error),))
        else:
            if state:
                same = state.manifest.facts == entry.manifest.facts.get(STATE_FACT)
                yield _prove(
                    run,
                    state,
                    [] if same else ["its facts are not those that its checkpoint states"],
                )


def prove_chain(run: Run, version: int, entry: Entry, *judged: Entry) -> list[Entry]:
    """Audit a checkpoint, its evaluations and their sources in the run; return all, or raise UserError for a flaw."""
    chain = {each.key: each for each in (entry, *judged)}
    for each in (queue := [*chain.values()]):
        for source in filter(None, map(run.maker, each.manifest.inputs.values())):
            if source.key not in chain:
                queue.append(chain.setdefault(source.key, source))
    for proof in audit_run(run):
        flaws = [
            *proof.problems,
            *(["its files were deleted"] if proof.deleted and proof.key == entry.key else []),
        ]
        if flaws and (proof.key in chain or proof.files is None):
            raise UserError("VERSION", version, f"does not pass the audit: {proof.key}: {flaws[0]}")
    return sorted(chain.values(), key=lambda each: (each.started, each.key))


def _prove(run: Run, entry: Entry, problems: list[str]) -> Proof:
    checked = [*verify_artifact(run, entry)]
    left = {name for name, one in zip(sorted(entry.manifest.files), checked) if one.found}
    # Retention deletes the files of checkpoints that later ones follow, all but their history.
    followed = [
        checkpoint.key for checkpoint in run.checkpoints if checkpoint.iteration is not None
    ][:-1]
    is_bare = left == {HISTORY} & {*entry.manifest.files} != {*entry.manifest.files}
    # A kill may have left some files of a checkpoint that is being pruned.
    is_partial = len(left) < len(entry.manifest.files) and entry.key in followed
    is_pruned = is_partial and Store(run.url).get(f"{entry.key}/{PRUNED}") is not None
    deleted = entry.key in followed and (is_bare or is_pruned)
    wrong = [one for one in checked if not one.good and not (deleted and one.found is None)]
    problems += [
        f"{one.key} " + ("is missing" if one.found is None else "was changed") for one in wrong
    ]
    return Proof(entry.key, sum(one.good for one in checked), tuple(problems), deleted)


def _check_manifest(run: Run, entry: Entry) -> Iterator[str]:
    try:
        manifest = parse_manifest(
            f"{run.url}/{entry.key}", Store(run.url).get(f"{entry.key}/{MANIFEST}") or b""
        )
    except Corrupt as error:
        yield str(error)
    else:
        if manifest != entry.manifest:  # which the index of the run may have, with any digest
            before = entry.manifest.compute_digest()
            yield f"{entry.key}/{MANIFEST} has changed: its digest was {before}, and is {manifest.digest}"
