"""Verification of the files that a run has committed, by hashing them again.

`weights verify`, the audit and signatures read files by it; nothing is repaired. It has no test
file of its own: `tests/unit/runs/test_runs.py` and `test_audit.py`.
"""

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tuneloop.core.artifacts import File, find_manifest, hash_file
from tuneloop.core.store import Store
from tuneloop.runs.committed import Entry
from tuneloop.runs.run_record import Run
from tuneloop.training.old_checkpoints import STATE


@dataclass(frozen=True)
class FileCheck:
    """A file of an artifact that was hashed again.

    Attributes:
        key: where it lies below the run's URL.
        expected: its size and digests in the manifest.
        actual: its size and digests now; None if it is missing.
    """

    key: str
    expected: File
    actual: File | None

    @property
    def is_unchanged(self) -> bool:
        """Whether the file is there, and as it was committed."""
        return self.actual == self.expected


def find_state_entry(run: Run, checkpoint: Entry) -> Entry | None:
    """Find the trainer's state below a checkpoint; None if there is none.

    Raises:
        Corrupt: its manifest is damaged.
    """
    key = f"{checkpoint.key}/{STATE}"
    manifest = find_manifest(f"{run.url}/{key}")
    if manifest is None:
        return None
    return Entry(key, checkpoint.stage, checkpoint.iteration, manifest)


def verify_artifact(run: Run, entry: Entry) -> Iterator[FileCheck]:
    """Hash every file of an artifact again, one at a time, sorted by name."""
    store = Store(run.url)
    # One listing costs less than a request for each file.
    present = set(store.keys(entry.path))
    for name, expected in sorted(entry.manifest.files.items()):
        key = f"{entry.path}/{name}"
        if key not in present:
            yield FileCheck(key, expected, None)
        elif store.root is not None:
            yield FileCheck(key, expected, hash_file(store.root / key))
        else:
            # A checkpoint may be larger than the disk: it is downloaded a file at a time.
            with tempfile.TemporaryDirectory() as scratch:
                copy = Path(scratch) / "file"
                store.download(key, copy)
                yield FileCheck(key, expected, hash_file(copy))
