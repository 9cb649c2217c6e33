"""Verification of the files that a run has committed, by hashing them again."""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuneloop.core.artifacts import File, find_manifest, hash_file
from tuneloop.core.store import Store
from tuneloop.runs.run_record import Entry, Run
from tuneloop.training.old_checkpoints import STATE


@dataclass(frozen=True)
class Checked:
    """A file of a checkpoint, hashed again: what was `found`, or None if it is missing."""

    key: str
    want: File
    found: File | None

    @property
    def good(self) -> bool:
        return self.found == self.want


def find_state_entry(run: Run, checkpoint: Entry) -> Entry | None:
    """Find the trainer's state below a checkpoint; None where there is none. Raises Corrupt for a damaged manifest."""
    made = find_manifest(f"{run.url}/{checkpoint.key}/{STATE}")
    return (
        Entry(f"{checkpoint.key}/{STATE}", checkpoint.stage, checkpoint.iteration, made)
        if made
        else None
    )


def verify_artifact(run: Run, entry: Entry) -> Iterator[Checked]:
    """Hash every file of an artifact again, one at a time."""
    store = Store(run.url)
    there = set(store.keys(f"{entry.key}/{entry.manifest.root}"))
    for name, want in sorted(entry.manifest.files.items()):
        key = f"{entry.key}/{entry.manifest.root}/{name}"
        if key not in there:
            yield Checked(key, want, None)
        elif store.root is not None:
            yield Checked(key, want, hash_file(store.root / key))
        else:
            with tempfile.TemporaryDirectory() as scratch:
                store.download(key, Path(scratch) / "file")
                yield Checked(key, want, hash_file(Path(scratch) / "file"))
