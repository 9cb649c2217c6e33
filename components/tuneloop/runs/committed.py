"""The artifacts that a run has committed, as they lie below its URL.

They lie at ``<stage>`` and ``iterations/<i>/<stage>``. The manifests and metrics of all of them
are read from the run's index (`tuneloop.core.index`) as far as that has them.

`Run` (`runs/run_record.py`) adds the executor's state. Nothing is ever written here but the index.

The layout ``iterations/<i>/<stage>`` is written by `argo/tasks.py`, `local/iterations.py` and
`kfp/loop.py`, and read here, in `runs/stages.py` (`COMMITTED_BELOW`), `runs/retention.py`,
`training/old_checkpoints.py`, `kfp/iterations.py` and `formats/stored_models.py`.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import xxhash

from tuneloop.core.artifacts import (
    MANIFEST,
    Manifest,
    Role,
    load_checked_json,
    parse_manifest,
    split_ref,
)
from tuneloop.core.attempts import FAILED, FAILURE
from tuneloop.core.context import METRICS
from tuneloop.core.errors import Corrupt
from tuneloop.core.index import DIGEST, Index, map_requests
from tuneloop.core.store import Store
from tuneloop.formats.facts import VersionFacts

MANIFEST_KEY = re.compile(
    r"^(?:iterations/(?P<iteration>\d+)/)?(?P<stage>[a-z0-9][a-z0-9_-]*)/manifest\.json$"
)
"""The keys of the artifacts of a run. A manifest elsewhere below the run is in no list, summary or
audit."""
SETTLED_AFTER = 2
"""An iteration is complete once this many later ones exist: each starts from the policy of the
previous one.
"""
LISTED_TOGETHER = 64
"""If more iterations than this are new, they are listed by one request instead of one by one."""


@dataclass(frozen=True)
class Entry:
    """A committed artifact of a run.

    A trainer's state below a checkpoint is none of `CommittedArtifacts.entries`: its key is longer
    than `MANIFEST_KEY` allows. `runs/verification.py: find_state_entry` makes its entry.

    Attributes:
        key: where it lies below the run's URL: ``sft``, ``iterations/3/reward``.
        stage: the last part of the key, the task's name in the graph.
        iteration: None outside the loop.
        manifest: what the stage has stated of it.
    """

    key: str
    stage: str
    iteration: int | None
    manifest: Manifest

    @property
    def version(self) -> int:
        """The policy version that a checkpoint holds. Raises UserError where it is no checkpoint."""
        return VersionFacts.read(self.manifest).version

    @property
    def started(self) -> float:
        """When the stage began to work, Unix seconds; 0.0 if the manifest does not say."""
        started = self.manifest.provenance.get("started")
        return float(started) if isinstance(started, int | float) else 0.0

    @property
    def seconds(self) -> float:
        """How long the stage worked."""
        return self.manifest.timings.get("total", 0.0)

    @property
    def finished(self) -> float:
        """When the stage committed the artifact, Unix seconds."""
        return self.started + self.seconds

    @property
    def path(self) -> str:
        """The key of the directory that holds the artifact's files."""
        return f"{self.key}/{self.manifest.root}"

    @property
    def model_bytes(self) -> int:
        """The bytes of the model in the artifact, 0 if it has none."""
        files = self.manifest.files.items()
        return sum(file.size for name, file in files if name.startswith("model/"))


class CommittedArtifacts:
    """The artifacts below a run's URL, oldest first in `entries`; `refresh` reads them again."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.entries: list[Entry] = []
        # The index proves what it reads, so that nothing is proved twice.
        self._index = Index(Store(url), self._prove_manifest)
        # Key → the index's mark of the entry, and the entry as it was read under that mark.
        self._parsed: dict[str, tuple[str, Entry]] = {}
        self._by_digest: dict[str | None, Entry] = {}
        self.refresh()

    def refresh(self, *, all_iterations: bool | None = None) -> None:
        """Read the manifests that were committed since the last call.

        Args:
            all_iterations: list every iteration, or only those that the index lacks or that are
                not settled. The default is True for a store with directories, where it costs no
                requests.
        """
        store = self._index.store
        if all_iterations is None:
            all_iterations = store.root is not None
        indexed = {
            key: mark for key, (mark, _) in self._index.files.items() if MANIFEST_KEY.match(key)
        }
        marks = _find_marks(store, {} if all_iterations else indexed)
        # The loop's own failure lies above the folders that are listed.
        self._failure_keys = [f"iterations/{FAILURE}"]
        self._failure_keys += [key for key in marks if key.endswith(f"/{FAILURE}")]
        committed = {key: mark for key, mark in marks.items() if MANIFEST_KEY.match(key)}
        deleted = indexed.keys() - marks.keys()
        if not deleted and committed == {key: mark for key, (mark, _) in self._parsed.items()}:
            return
        data = self._index.read(committed, deleted, save=all_iterations)
        self._parsed = {
            key: (
                committed[key],
                self._parse(key, committed[key], data[key]),
            )
            for key in data
        }
        entries = [entry for _, entry in self._parsed.values()]
        self.entries = sorted(
            entries,
            key=lambda entry: (entry.started, entry.key),
        )
        # Of several artifacts with the same digest, the oldest is the one that is found by it.
        self._by_digest = {entry.manifest.digest: entry for entry in reversed(self.entries)}

    def _prove_manifest(self, key: str, data: bytes) -> None:
        """Raise Corrupt for a manifest that is damaged, or that belongs to another place in the
        run.
        """
        if not MANIFEST_KEY.match(key):
            return
        url = f"{self.url}/{key.removesuffix(f'/{MANIFEST}')}"
        stated_place = parse_manifest(url, data).place
        if not url.endswith(stated_place):
            remedy = f"is the manifest of {stated_place}; put it back there"
            raise Corrupt("artifact", f"{self.url}/{key}", remedy)

    def _parse(self, key: str, mark: str, data: bytes) -> Entry:
        """Parse a manifest into an entry; return the same entry as before if its mark is the
        same.
        """
        if key in self._parsed and self._parsed[key][0] == mark:
            return self._parsed[key][1]
        match = MANIFEST_KEY.match(key)
        assert match
        iteration = int(match["iteration"]) if match["iteration"] else None
        entry_key = key.removesuffix(f"/{MANIFEST}")
        # The index has proved it when it read it from the store.
        manifest = parse_manifest(f"{self.url}/{entry_key}", data, proved=True)
        return Entry(
            entry_key,
            match["stage"],
            iteration,
            manifest,
        )

    def read_failures(self) -> dict[str, str]:
        """Return task → why it failed, for tasks without a later commit; only runs on KFP record
        this.
        """
        messages: dict[str, str] = {}
        for key in self._failure_keys:
            task = key.removesuffix(f"/{FAILURE}")
            data = self._index.store.get(key)
            failure = load_checked_json(
                data,
                FAILURE,
                f"{self.url}/{task}",
                "delete it",
                FAILED,
            )
            if failure and not self._has_commit(task, after=failure["time"]):
                messages[task] = failure["message"]
        return messages

    def _has_commit(self, task: str, after: float) -> bool:
        """Return whether a stage of this task, or below it, began to work later and committed."""
        return any(
            entry.started > after and f"{entry.key}/".startswith(f"{task}/")
            for entry in self.entries
        )

    def with_role(self, *roles: Role) -> list[Entry]:
        """List the artifacts of the stages that have one of these roles, oldest first."""
        return [entry for entry in self.entries if entry.manifest.role in roles]

    @property
    def iteration(self) -> int:
        """The newest iteration that committed anything; 0 before the first."""
        return max(
            (entry.iteration or 0 for entry in self.entries),
            default=0,
        )

    @property
    def checkpoints(self) -> list[Entry]:
        """The artifacts that hold a policy version and its weights, by version."""
        checkpoints = [
            entry
            for entry in self.entries
            if entry.manifest.version is not None
            and any(name.startswith("model/") for name in entry.manifest.files)
        ]
        return sorted(checkpoints, key=lambda entry: (entry.version, entry.started))

    def reference(self, entry: Entry) -> str:
        """Return the reference ``URL@digest`` of an artifact of this run."""
        return f"{self.url}/{entry.key}@{entry.manifest.digest}"

    def find_entry(self, ref: str) -> Entry | None:
        """Return the artifact of this run that a reference names: at its URL, else any of the
        same bytes.
        """
        # The run may have been moved since the reference was written: then only the digest tells.
        url, digest = split_ref(ref)
        key = f"{url.removeprefix(f'{self.url}/')}/{MANIFEST}"
        _, entry = self._parsed.get(key, ("", None))
        if entry and entry.manifest.digest == digest:
            return entry
        return self._by_digest.get(digest)

    def find_policy(self, entry: Entry) -> Entry | None:
        """Return the checkpoint that an artifact was made with."""
        ref = entry.manifest.inputs.get("policy")
        return self.find_entry(ref) if ref else None

    def list_evaluations(self, checkpoint: Entry) -> list[Entry]:
        """List the evaluations of a checkpoint, oldest first."""
        evaluations = self.with_role("evaluator")
        return [entry for entry in evaluations if self.find_policy(entry) == checkpoint]

    def find_version(self, entry: Entry) -> int | None:
        """Return the policy version that an artifact was made with: its checkpoint's, or as its
        facts say.
        """
        source = self.find_policy(entry) or entry
        return source.manifest.version

    def read(self, entry: Entry, name: str) -> bytes | None:
        """Read the file `name` of an artifact, checked against its manifest.

        Returns:
            Its bytes; None if the artifact has no file of that name.

        Raises:
            Corrupt: it is missing, or differs from the manifest.
        """
        file = entry.manifest.files.get(name)
        if file is None:
            return None
        key = f"{entry.path}/{name}"
        data = self._index.store.get(key)
        if data is None:
            remedy = "is missing; restore it from a copy"
            raise Corrupt("artifact", f"{self.url}/{key}", remedy)
        if xxhash.xxh3_128_hexdigest(data) != file.digest:
            remedy = "differs from its manifest; see `tuneloop weights verify`"
            raise Corrupt("artifact", f"{self.url}/{key}", remedy)
        return data

    def read_metrics(
        self,
        entries: Sequence[Entry],
    ) -> Iterator[list[dict[str, float]]]:
        """Yield the rows of each artifact's ``metrics.jsonl``, none where it has no such file."""
        marks = {
            f"{entry.path}/{METRICS}": f"{DIGEST}{entry.manifest.files[METRICS].digest}"
            for entry in entries
            if METRICS in entry.manifest.files
        }
        # All are requested at once, since each request to an object store takes a while.
        indexed = self._index.read(marks)
        for entry in entries:
            data = indexed.get(f"{entry.path}/{METRICS}")
            if data is None:
                # `read` explains what is wrong with a file that the index could not prove.
                data = self.read(entry, METRICS) or b""
            yield [json.loads(line) for line in data.splitlines()]


def _find_marks(
    store: Store,
    indexed: Mapping[str, str],
) -> dict[str, str]:
    """Find the manifests and failures of a run, and their marks.

    Args:
        store: the run's.
        indexed: key → mark of the manifests in the run's index; those of settled iterations are
            taken from it.
    """
    # What lies outside the loop counts as iteration 0, which is never settled.
    keys_by_iteration: dict[int, list[str]] = {}
    for key in indexed:
        number = int(key.split("/")[1]) if key.startswith("iterations/") else 0
        keys_by_iteration.setdefault(number, []).append(key)
    present = {int(name) for name in store.parts("iterations") if name.isdigit()}
    newest = max(present & keys_by_iteration.keys(), default=0)
    settled = {
        number for number in present & keys_by_iteration.keys() if number + SETTLED_AFTER <= newest
    }
    marks = {key: indexed[key] for number in settled for key in keys_by_iteration[number]}
    # Only what may have changed is listed.
    # A folder, and how many levels below it the manifests lie.
    folders = [(name, 0) for name in store.parts() if name != "iterations"]
    unsettled = [(f"iterations/{number}", 1) for number in present - settled]
    folders += unsettled if len(unsettled) <= LISTED_TOGETHER else [("iterations", 2)]

    def find_marks_below(folder: tuple[str, int]) -> dict[str, str]:
        return store.find_marks(folder[0], folder[1], (MANIFEST, FAILURE))

    for marks_below in map_requests(store, find_marks_below, folders):
        marks |= marks_below
    return marks
