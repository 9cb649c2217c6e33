"""Whether all that a run has committed, and goes by, is still there.

A finished run that is not whole is not called finished: `run` and `resume` refuse it
(`runs/resumption.py`), and `status` and the page say what is missing.
"""

from collections.abc import Iterator
from pathlib import Path

from tuneloop.core.artifacts import DIGEST, split_ref
from tuneloop.core.store import local_path
from tuneloop.runs.committed import Entry
from tuneloop.runs.run_record import Run

NAMED = 3
"""How many of several keys a message names."""


def list_missing(run: Run) -> list[str]:
    """List the keys of artifacts that a run has committed and that are gone, in whole or in part.

    What the run has committed is known from the inputs of other artifacts and from the outputs of
    its stages. The files of checkpoints that the loop has gone beyond may be deleted
    (`tuneloop.runs.retention`). In an object store only manifests are looked for, and no files.
    """
    missing = set(_find_lost_keys(run))
    replaced: set[str] = set()
    # The newest checkpoint is the one that the loop goes on from: its files have to be there.
    for checkpoint in run.checkpoints[:-1]:
        if checkpoint.iteration is not None:
            replaced.add(checkpoint.key)
    for entry in run.entries:
        if entry.key not in replaced and not _has_files(run, entry):
            missing.add(entry.key)
    return sorted(missing)


def describe_missing(keys: list[str]) -> str:
    """Describe missing artifacts in words: the first ones, and how many more there are."""
    named = ", ".join(keys[:NAMED])
    return named if len(keys) <= NAMED else f"{named} and {len(keys) - NAMED} more"


def _find_lost_keys(run: Run) -> Iterator[str]:
    """Yield the keys that references of the run name and that hold nothing, or something else."""
    references: list[str] = []
    for entry in run.entries:
        references += entry.manifest.inputs.values()
    state = run.state
    if state:
        for node in state.nodes.values():
            if node.phase == "Succeeded":
                references += node.outputs.values()
    for reference in references:
        # An output may also be a number, such as a reward.
        if f"@{DIGEST}:" not in reference:
            continue
        url, _ = split_ref(reference)
        if url.startswith(f"{run.url}/") and run.find_entry(reference) is None:
            yield url.removeprefix(f"{run.url}/")


def _has_files(
    run: Run,
    entry: Entry,
) -> bool:
    """Return whether an artifact's directory is there, and not empty if it is to have files."""
    root = local_path(run.url)
    # In an object store each answer would take a request.
    if root is None:
        return True
    directory = Path(root, entry.path)
    if not directory.is_dir():
        return False
    return not entry.manifest.files or any(directory.iterdir())
