"""Whether all that a run has committed, and goes by, is still there."""

from collections.abc import Iterator
from pathlib import Path

from tuneloop.core.artifacts import DIGEST, split_ref
from tuneloop.core.store import local_path
from tuneloop.runs.run_record import Entry, Run

NAMED = 3
"""How many of several keys a message names."""


def list_missing(run: Run) -> list[str]:
    """List the keys of artifacts that a run has committed and that are gone, in whole or in part.

    What the run has committed is known from the inputs of other artifacts and from the outputs of
    its stages. The files of checkpoints that the loop has left behind may be deleted (`tuneloop.runs.retention`).
    """
    missing = set(_list_lost(run))
    followed = {
        checkpoint.key for checkpoint in run.checkpoints if checkpoint.iteration is not None
    }
    followed -= {checkpoint.key for checkpoint in run.checkpoints[-1:]}
    for entry in run.entries:
        if entry.key not in followed and not _has_files(run, entry):
            missing.add(entry.key)
    return sorted(missing)


def describe_missing(keys: list[str]) -> str:
    """Describe missing artifacts in words: the first ones, and how many more there are."""
    named = ", ".join(keys[:NAMED])
    return named if len(keys) <= NAMED else f"{named} and {len(keys) - NAMED} more"


def _list_lost(run: Run) -> Iterator[str]:
    """Yield the keys that references of the run name and that hold nothing, or something else."""
    state = run.state
    nodes = state.nodes.values() if state else ()
    outputs = [
        value for node in nodes if node.phase == "Succeeded" for value in node.outputs.values()
    ]
    inputs = [ref for entry in run.entries for ref in entry.manifest.inputs.values()]
    for ref in inputs + outputs:
        if f"@{DIGEST}:" in ref:
            url, _ = split_ref(ref)
            if url.startswith(f"{run.url}/") and run.maker(ref) is None:
                yield url.removeprefix(f"{run.url}/")


def _has_files(run: Run, entry: Entry) -> bool:
    """Return whether an artifact's directory is there."""
    root = local_path(run.url)
    # In an object store each answer would take a request.
    if root is None:
        return True
    directory = Path(root, entry.key, entry.manifest.root)
    return directory.is_dir() and (not entry.manifest.files or any(directory.iterdir()))
