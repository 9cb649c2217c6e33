"""A run as it is read: its record, committed artifacts and executor's state, and the curves and samples in them.

Artifacts lie below ``<store>/<run>``, at ``<stage>`` and ``iterations/<i>/<stage>``; what readers open of all artifacts
is read from the run's index (`tuneloop.core.index`) as far as that has it. A run started on this machine also has state
in ``<root>/<run>``, where root is the store if that is a directory, else ``./runs``::

    run.json        the record: pipeline, configuration, store; written once, before anything runs
    config.yaml     the configuration, whole
    workflow.yaml   the very workflow that is executed
    nodes.jsonl …   the executor's state (`tuneloop.local.journal`)
    report.html
"""

import functools
import io
import json
import re
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
import yaml

from tuneloop.core.artifacts import (
    MANIFEST,
    Manifest,
    Role,
    load_checked_json,
    parse_manifest,
    split_ref,
)
from tuneloop.core.attempts import FAILED, FAILURE
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.index import DIGEST, Index, map_requests
from tuneloop.core.store import Store, local_path, normalize_url
from tuneloop.local import journal
from tuneloop.runs import records
from tuneloop.runs.records import ROOT, Record, get_run_directory, list_runs, read_record

PLACE = re.compile(
    r"^(?:iterations/(?P<iteration>\d+)/)?(?P<stage>[a-z0-9][a-z0-9_-]*)/manifest\.json$"
)
METRICS = "metrics.jsonl"
FORK = "fork.json"
SETTLED = 2
"""An iteration is complete once this many later ones exist: each starts from the policy of the previous one."""
MANY = 64
"""If more iterations than this are new, they are listed together instead of one by one."""
SAMPLED = ("id", "prompt", "completion", "answer", "score", "outcome")
RECORDING: tuple[Role, ...] = ("trainer", "sampler", "scorer", "evaluator")
SAID = ("step", "mean", "mean_reward", "scored")
"""Columns of ``metrics.jsonl`` that are not curves, or are in the results already."""


@dataclass(frozen=True)
class Entry:
    """A committed artifact of a run, at `key` below the run's URL: ``sft``, ``iterations/3/reward``. `stage` is the
    last part of the key, the task's name in the graph; `iteration` is None outside the loop."""

    key: str
    stage: str
    iteration: int | None
    manifest: Manifest

    @property
    def started(self) -> float:
        """When the stage began to work, Unix seconds; 0.0 if the manifest does not say."""
        return (
            float(told)
            if isinstance(told := self.manifest.provenance.get("started"), int | float)
            else 0.0
        )

    @property
    def seconds(self) -> float:
        """How long the stage worked."""
        return self.manifest.timings.get("total", 0.0)

    @property
    def finished(self) -> float:
        """Unix seconds."""
        return self.started + self.seconds


@dataclass(frozen=True)
class Curve:
    """One quantity over the run, such as ``loss``; `how` says how it was obtained. `x` is in units of `axis`,
    ``iteration`` or ``step``: optimizer steps are fractions of their iteration. `at`: Unix seconds of each point."""

    name: str
    stage: str
    role: Role | None
    how: str
    axis: str
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    at: list[float] = field(default_factory=list)

    def add(self, x: float, y: float, at: float) -> None:
        """Append a point."""
        self.x.append(x)
        self.y.append(y)
        self.at.append(at)


@dataclass(frozen=True)
class Score:
    """A mean reward and how it was obtained."""

    value: float
    how: str
    version: int | None
    entry: Entry


class Run:
    """A run, as its store and local state hold it; `refresh` reads both again. A run from elsewhere has no `record`."""

    def __init__(self, name: str, store: str, record: Record | None = None) -> None:
        if (
            record and local_path(record.store) is None
        ):  # a record in a folder may have been copied or moved with it
            store = record.store
        self.name, self.store_url, self.record = name, normalize_url(store), record
        self.url = f"{self.store_url}/{name}"
        self.directory = get_run_directory(name, store)
        self._index = Index(Store(self.url), self._prove_manifest)
        self._known: dict[str, tuple[str, Entry]] = {}
        self.entries: list[Entry] = []
        self._by_digest: dict[str | None, Entry] = {}
        self.refresh()

    @classmethod
    def open(cls, name: str, store: str | None = None) -> "Run":
        """Open the run `name` by its record below `store`, or by its artifacts; raise UserError if it has neither."""
        at = store or ROOT
        record = read_record(name, at)
        found = cls(name, at, record)
        if record is None and not found.entries:
            known = ", ".join(list_runs(at)) or "none"
            raise UserError(
                "run",
                name,
                f"not found below {at}; known there: {known}; --store names another place",
            )
        return found

    @classmethod
    def create(cls, record: Record, workflow: str, replaced: Record | None = None) -> "Run":
        """Write the record of a new run, and return the run; see `tuneloop.runs.records.write_record`."""
        record = record.model_copy(
            update={"workflow": xxhash.xxh3_128_hexdigest(workflow.encode())}
        )
        records.write_record(record, workflow, replaced)
        return cls(record.run, record.store, record)

    @property
    def weights_url(self) -> str:
        """Where the run publishes its weight versions, if it does."""
        engine = self.record.config.get("engine") if self.record else None
        own = engine.get("weights") if isinstance(engine, dict) else None
        return str(own or f"{self.url}/weights")

    @functools.cached_property
    def origin(self) -> dict[str, Any] | None:
        """Where a fork came from (`tuneloop.runs.forking`): ``run``, ``iteration`` and the references ``values``."""
        return (
            load_checked_json(Store(self.url).get(FORK), FORK, self.url, "restore it from a copy")
            or None
        )

    def read_workflow(self) -> dict[str, Any]:
        """Read the workflow that the run was started with. Raises Corrupt where it is another now."""
        data = Store(str(self.directory)).get("workflow.yaml") or b""
        if not self.record or xxhash.xxh3_128_hexdigest(data) != self.record.workflow:
            raise Corrupt(
                "run",
                f"{self.directory}/workflow.yaml",
                "is missing or was changed; restore it from a copy",
            )
        return dict(yaml.load(data, yaml.CSafeLoader) or {})

    def refresh(self, *, whole: bool | None = None) -> None:
        """Read manifests that were committed since the last call. With `whole` every iteration is listed, else only
        those that the index lacks or that are not settled. The default is `whole` for a store with directories."""
        store = self._index.store
        indexed = {key: mark for key, (mark, _) in self._index.held.items() if PLACE.match(key)}
        every = store.root is not None if whole is None else whole
        found = self._find_marks(store, {} if every else indexed)
        self._failures = [
            f"iterations/{FAILURE}",
            *(key for key in found if key.endswith(f"/{FAILURE}")),
        ]
        present = {key: mark for key, mark in found.items() if PLACE.match(key)}
        gone = indexed.keys() - found.keys()
        if gone or present != {key: mark for key, (mark, _) in self._known.items()}:
            data = self._index.read(present, gone, save=every)
            self._known = {
                key: (present[key], self._parse(key, present[key], data[key])) for key in data
            }
            self.entries = sorted(
                (entry for _, entry in self._known.values()), key=lambda e: (e.started, e.key)
            )
            self._by_digest = {e.manifest.digest: e for e in reversed(self.entries)}

    @staticmethod
    def _find_marks(store: Store, indexed: Mapping[str, str]) -> dict[str, str]:
        """Find the manifests and failures of a run, with their marks; those of settled iterations are in the index."""
        held: dict[int, list[str]] = {}
        for key in indexed:
            held.setdefault(
                int(key.split("/")[1]) if key.startswith("iterations/") else 0, []
            ).append(key)
        there = {int(name) for name in store.parts("iterations") if name.isdigit()}
        newest = max(there & held.keys(), default=0)
        settled = {number for number in there & held.keys() if number + SETTLED <= newest}
        found = {key: indexed[key] for number in settled for key in held[number]}
        folders = [(name, 0) for name in store.parts() if name != "iterations"]
        fresh = [(f"iterations/{number}", 1) for number in there - settled]
        folders += fresh if len(fresh) <= MANY else [("iterations", 2)]
        for marks in map_requests(
            store, lambda at: store.find_marks(at[0], at[1], (MANIFEST, FAILURE)), folders
        ):
            found |= marks
        return found

    def _prove_manifest(self, key: str, data: bytes) -> None:
        url = f"{self.url}/{key.removesuffix(f'/{MANIFEST}')}"
        if PLACE.match(key) and not url.endswith(stated := parse_manifest(url, data).place):
            raise Corrupt(
                "artifact", f"{self.url}/{key}", f"is the manifest of {stated}; put it back there"
            )

    def _parse(self, key: str, mark: str, data: bytes) -> Entry:
        """Parse a manifest into an entry; return the known entry if it was read under the same mark."""
        if key in self._known and self._known[key][0] == mark:
            return self._known[key][1]
        place, match = key.removesuffix(f"/{MANIFEST}"), PLACE.match(key)
        assert match
        iteration = int(match["iteration"]) if match["iteration"] else None
        return Entry(
            place,
            match["stage"],
            iteration,
            parse_manifest(f"{self.url}/{place}", data, proved=True),
        )

    def read_failures(self) -> dict[str, str]:
        """Return task → why it failed, for tasks without a later commit; only runs on KFP record this."""
        found = {}
        for key in self._failures:
            place, data = key.removesuffix(f"/{FAILURE}"), self._index.store.get(key)
            failure = load_checked_json(data, FAILURE, f"{self.url}/{place}", "delete it", FAILED)
            later = (entry.key for entry in self.entries if entry.started > failure["time"])
            if failure and not any(f"{each}/".startswith(f"{place}/") for each in later):
                found[place] = failure["message"]
        return found

    def with_role(self, *roles: Role) -> list[Entry]:
        """List the artifacts of the stages that have one of these roles, oldest first."""
        return [entry for entry in self.entries if entry.manifest.role in roles]

    @property
    def iteration(self) -> int:
        """The newest iteration that committed anything; 0 before the first."""
        return max((entry.iteration or 0 for entry in self.entries), default=0)

    @property
    def state(self) -> journal.State | None:
        """The current state of the local executor."""
        return journal.read_state(self.directory) if self.directory.is_dir() else None

    @property
    def phase(self) -> str:
        """``created``, ``running``, ``interrupted``, ``succeeded``, ``failed``; ``elsewhere`` without local state."""
        if (found := self.state) is None:
            return "created" if self.record else "elsewhere"
        if (
            found.workflow.phase == "Running" or "next" in found.workflow.outputs
        ):  # not the last of several workflows
            return "running" if found.alive else "interrupted"
        return {"Succeeded": "succeeded"}.get(found.workflow.phase, "failed")

    def read(self, entry: Entry, name: str) -> bytes | None:
        """Read the file `name` of an artifact, checked against its manifest; None if it has none of that name."""
        if name not in entry.manifest.files:
            return None
        key = f"{entry.key}/{entry.manifest.root}/{name}"
        data = self._index.store.get(key)
        if data is None:
            remedy = "is missing; restore it from a copy"
            raise Corrupt("artifact", f"{self.url}/{key}", remedy)
        if xxhash.xxh3_128_hexdigest(data) != entry.manifest.files[name].digest:
            raise Corrupt(
                "artifact",
                f"{self.url}/{key}",
                "differs from its manifest; see `tuneloop weights verify`",
            )
        return data

    def read_rows(self, entries: Sequence[Entry]) -> Iterator[list[dict[str, float]]]:
        """Yield the rows of each artifact's ``metrics.jsonl``, all read at once; none where it has no such file."""
        keys = {
            e.key: f"{e.key}/{e.manifest.root}/{METRICS}"
            for e in entries
            if METRICS in e.manifest.files
        }
        wanted = {
            keys[e.key]: f"{DIGEST}{e.manifest.files[METRICS].digest}"
            for e in entries
            if e.key in keys
        }
        found = self._index.read(wanted)
        for entry in entries:
            data = found.get(keys.get(entry.key, "")) or self.read(entry, METRICS) or b""
            yield [json.loads(line) for line in data.splitlines()]

    @property
    def checkpoints(self) -> list[Entry]:
        """The artifacts that hold a policy version and its weights, by version."""
        made = (e for e in self.entries if e.manifest.facts.get("version") is not None)
        held = [e for e in made if any(name.startswith("model/") for name in e.manifest.files)]
        return sorted(held, key=lambda e: (e.manifest.facts["version"], e.started))

    def maker(self, ref: str) -> Entry | None:
        """Return the artifact of this run that a reference names: at its URL, else any of the same bytes."""
        url, digest = split_ref(ref)
        _, there = self._known.get(f"{url.removeprefix(f'{self.url}/')}/{MANIFEST}", ("", None))
        return there if there and there.manifest.digest == digest else self._by_digest.get(digest)

    def policy_of(self, entry: Entry) -> Entry | None:
        """Return the checkpoint that an artifact was made with."""
        ref = entry.manifest.inputs.get("policy")
        return self.maker(ref) if ref else None

    def version_of(self, entry: Entry) -> int | None:
        """Return the policy version that an artifact was made with: its checkpoint's, or as its facts say."""
        return (self.policy_of(entry) or entry).manifest.facts.get("version")

    def evaluations(self) -> list[Score]:
        """List the mean rewards on held-out prompts, oldest first."""
        scores = []
        for entry in self.with_role("evaluator"):
            if (value := entry.manifest.scalars.get("mean_reward")) is not None:
                scores.append(
                    Score(
                        value,
                        f"{_sampling(entry)}, held-out prompts",
                        self.version_of(entry),
                        entry,
                    )
                )
        return scores

    def training_rewards(self) -> list[Score]:
        """List the mean rewards of the batches that were trained on, by iteration."""
        sampled = {entry.iteration: entry for entry in self.with_role("sampler")}
        scored = {
            entry.iteration: entry for entry in self.with_role("scorer")
        }  # a later one adds to an earlier one
        scores = []
        for entry in sorted(scored.values(), key=lambda e: e.iteration or 0):
            value, rollout = entry.manifest.scalars.get("mean_reward"), sampled.get(entry.iteration)
            how = f"{_sampling(rollout)}, training prompts" if rollout else "training prompts"
            if value is not None:
                scores.append(
                    Score(value, how, self.version_of(rollout) if rollout else None, entry)
                )
        return scores

    def latest_reward(self) -> Score | None:
        """Return the newest mean reward of any kind."""
        return max(
            [*self.evaluations(), *self.training_rewards()],
            key=lambda s: s.entry.finished,
            default=None,
        )

    def curves(self, of: Collection[str] | None = None) -> list[Curve]:
        """Return a curve of each quantity that stages recorded; with `of`, only what artifacts of these keys add."""
        found = []
        for known in (self.training_rewards(), self.evaluations()):
            if scores := [score for score in known if of is None or score.entry.key in of]:
                made = scores[-1].entry.manifest
                found.append(
                    curve := Curve("mean_reward", made.stage, made.role, scores[0].how, "iteration")
                )
            for score in scores:
                curve.add(self._find_iteration(score.entry), score.value, score.entry.finished)
        return [*found, *(curve for role in RECORDING for curve in self._recorded(role, of))]

    def _find_iteration(self, entry: Entry) -> float:
        """Find the iteration that an artifact is about; for an evaluation, that of the policy it evaluated."""
        return float(
            ((entry.manifest.role == "evaluator" and self.policy_of(entry)) or entry).iteration or 0
        )

    def phase_seconds(self) -> dict[str, list[tuple[float, float]]]:
        """Return stage → (iteration, seconds it worked); iteration 0 is everything outside the loop."""
        found: dict[str, list[tuple[float, float]]] = {}
        for entry in self.entries:
            found.setdefault(entry.stage, []).append((float(entry.iteration or 0), entry.seconds))
        return found

    def seconds_an_iteration(self) -> dict[str, float]:
        """Return stage of the loop → the median of the seconds that it worked."""
        found = {
            stage: [s for i, s in points if i] for stage, points in self.phase_seconds().items()
        }
        return {stage: statistics.median(values) for stage, values in found.items() if values}

    def samples(self, entry: Entry, columns: Collection[str] = SAMPLED) -> list[dict[str, Any]]:
        """Return the rows of an evaluation or of a batch of rollouts, as stored, with those columns that it has."""
        import pyarrow.parquet

        for name in entry.manifest.files:
            if name.endswith(".parquet") and (data := self.read(entry, name)):
                file = pyarrow.parquet.ParquetFile(
                    io.BytesIO(data)
                )  # read_table would import pandas
                return file.read([c for c in file.schema_arrow.names if c in columns]).to_pylist()
        return []

    def count_scored_completions(self, entry: Entry) -> int:
        """Count the completions over which an artifact's mean reward was taken; 0 if its manifest does not say."""
        facts = entry.manifest.facts
        outcomes = facts.get("outcomes") or facts.get("reward", {}).get("outcomes") or {}
        punished = entry.manifest.params.get("escape_score") is not None
        return int(outcomes.get("score", 0)) + (int(outcomes.get("escape", 0)) if punished else 0)

    def _recorded(self, role: Role, of: Collection[str] | None) -> Iterator[Curve]:
        """Yield the columns of ``metrics.jsonl`` over iterations, or over the steps of training outside the loop."""
        entries = [entry for entry in self.with_role(role) if of is None or entry.key in of]
        for stage in dict.fromkeys(entry.manifest.stage for entry in entries):
            curves: dict[str, Curve] = {}
            of_it = sorted(
                (e for e in entries if e.manifest.stage == stage), key=self._find_iteration
            )
            for entry, rows in zip(of_it, self.read_rows(of_it)):
                axis = "step" if entry.iteration is None and role != "evaluator" else "iteration"
                for i, row in enumerate(rows):
                    x = (
                        row.get("step", i)
                        if axis == "step"
                        else self._find_iteration(entry) - 1 + (i + 1) / len(rows)
                    )
                    for name, value in row.items():
                        if name not in SAID and isinstance(value, int | float):
                            curve = curves.setdefault(
                                name, Curve(name, stage, role, f"as {stage} recorded it", axis)
                            )
                            curve.add(x, value, entry.finished)
            yield from curves.values()


def _sampling(entry: Entry) -> str:
    """Return how completions were sampled: ``greedy``, or the temperature."""
    stated = entry.manifest.facts.get("sampling")
    temperature = {**entry.manifest.params, **(stated if isinstance(stated, dict) else {})}.get(
        "temperature"
    )
    if temperature is None:
        return "sampling not stated"
    return "greedy" if float(temperature) == 0 else f"temperature {temperature:g}"
