"""A run as it is read: its record, committed artifacts and executor's state, and the curves and
samples in them.

Artifacts lie below ``<store>/<run>`` (`tuneloop.runs.committed`). A run started on this machine
also has state in ``<root>/<run>``, where root is the store if that is a directory, else
``./runs``::

    run.json        the record: pipeline, configuration, store; written once, before anything runs
    config.yaml     the configuration, whole
    workflow.yaml   the very workflow that is executed
    nodes.jsonl …   the executor's state (`tuneloop.local.journal`)
    report.html

Commands, the page, the report and trackers all read a run by `Run`. The curves' names and axes are
part of what they show: `ui/static/dom.js` has titles for names, `ui/static/run.js` lists those that
are drawn first, `runs/alarms.py` looks for some, and people's dashboards have the names in
trackers.
"""

import functools
import io
import statistics
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

import xxhash
import yaml

from tuneloop.core.artifacts import Role, load_checked_json
from tuneloop.core.errors import Corrupt, UserError
from tuneloop.core.store import Store, local_path, normalize_url
from tuneloop.formats.facts import ScoreFacts
from tuneloop.local import journal
from tuneloop.runs import records
from tuneloop.runs.committed import CommittedArtifacts, Entry
from tuneloop.runs.records import (
    ROOT,
    WORKFLOW_FILE,
    Record,
    get_run_directory,
    list_runs,
    read_record,
)

FORK = "fork.json"
SAMPLE_COLUMNS = ("id", "prompt", "completion", "answer", "score", "outcome")
"""The columns of samples in trackers' tables. The page reads others: `ui/samples.py`."""
RECORDING_ROLES: tuple[Role, ...] = (
    "trainer",
    "sampler",
    "scorer",
    "evaluator",
)
"""The roles of `core/artifacts.py: Role` in the order in which their curves are listed. The metrics
of a stage without a role are no curves."""
NO_CURVES = ("step", "mean", "mean_reward", "scored")
"""Columns of ``metrics.jsonl`` that are not drawn, whatever stage records them: they are an axis,
or are in the results already.
"""


@dataclass(frozen=True)
class Curve:
    """One quantity over the run, such as ``loss``.

    Attributes:
        method: how it was obtained, in words.
        axis: the unit of `x`, ``iteration`` or ``step``; optimizer steps are fractions of their
            iteration.
        at: when each point was committed, Unix seconds.
    """

    name: str
    stage: str
    role: Role | None
    method: str
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
    """A mean reward, by which `method` it was obtained (in words), and of which policy version."""

    value: float
    method: str
    version: int | None
    entry: Entry


LISTED_RUNS = 6
"""Runs that are named where there is none of the name that was asked for."""


def check_store_exists(store: str) -> None:
    """Check that a store on this machine is there. Raises UserError."""
    folder = local_path(store)
    if folder is not None and not folder.is_dir():
        remedy = "is not there; --store names the folder or URL in which runs were started"
        raise UserError("store", store, remedy)


class Run(CommittedArtifacts):
    """A run, as its store and local state hold it. A run from elsewhere has no `record`."""

    def __init__(
        self,
        name: str,
        store: str,
        record: Record | None = None,
    ) -> None:
        # A record in a folder may have been copied or moved with it: there, the folder says where
        # the run lies.
        if record and local_path(record.store) is None:
            store = record.store
        self.name = name
        self.store_url = normalize_url(store)
        self.record = record
        self.directory = get_run_directory(name, store)
        self._variances: dict[str | None, float] = {}
        super().__init__(f"{self.store_url}/{name}")

    @classmethod
    def open(cls, name: str, store: str | None = None) -> "Run":
        """Open the run `name` by its record below `store`, or by its artifacts; raise UserError
        if it has neither.
        """
        root = store or ROOT
        record = read_record(name, root)
        run = cls(name, root, record)
        if record is None and not run.entries:
            # The default store is made by the first run.
            if root != ROOT:
                check_store_exists(root)
            known = list_runs(root)
            names = ", ".join(known[:LISTED_RUNS]) or "none"
            if len(known) > LISTED_RUNS:
                names += f", and {len(known) - LISTED_RUNS} more (`tuneloop status`)"
            remedy = f"not found below {root}; known there: {names}; --store names another place"
            raise UserError("run", name, remedy)
        return run

    @classmethod
    def create(
        cls,
        record: Record,
        workflow: str,
        replaced: Record | None = None,
    ) -> "Run":
        """Write the record of a new run, and return the run; see
        `tuneloop.runs.records.write_record`.
        """
        digest = xxhash.xxh3_128_hexdigest(workflow.encode())
        record = record.model_copy(update={"workflow": digest})
        records.write_record(record, workflow, replaced)
        return cls(record.run, record.store, record)

    @property
    def weights_url(self) -> str:
        """Where the run publishes its weight versions, if it does: the setting, or else the same
        default as `config/loop.py: LoopPipelineConfig.published` has.
        """
        engine = self.record.config.get("engine") if self.record else None
        weights = engine.get("weights") if isinstance(engine, dict) else None
        url = weights.get("url") if isinstance(weights, dict) else None
        return str(url or f"{self.url}/weights")

    @functools.cached_property
    def origin(self) -> dict[str, Any] | None:
        """Where a fork came from (`tuneloop.runs.forking`): ``run``, ``iteration`` and the
        references ``values``.
        """
        data = Store(self.url).get(FORK)
        return (
            load_checked_json(
                data,
                FORK,
                self.url,
                "restore it from a copy",
            )
            or None
        )

    def read_workflow(self) -> dict[str, Any]:
        """Read the workflow that the run was started with. Raises Corrupt if it is missing or was
        changed.
        """
        # A run is resumed by this workflow: any change of it would change the run.
        data = Store(str(self.directory)).get(WORKFLOW_FILE) or b""
        if not self.record or xxhash.xxh3_128_hexdigest(data) != self.record.workflow:
            remedy = "is missing or was changed; restore it from a copy"
            raise Corrupt("run", f"{self.directory}/{WORKFLOW_FILE}", remedy)
        return dict(yaml.load(data, yaml.CSafeLoader) or {})

    @property
    def state(self) -> journal.State | None:
        """The current state of the local executor."""
        return journal.read_state(self.directory) if self.directory.is_dir() else None

    @property
    def phase(self) -> str:
        """``created``, ``running``, ``interrupted``, ``succeeded``, ``failed``; ``elsewhere``
        without local state.

        These words are known to `runs/summary.py: judge_run`, `runs/tracking.py: find_phase`,
        `runs/stages.py`, `cli/execute.py`, `cli/inspect.py: _suggest_resume`, `cli/watch.py: CODES`,
        `cluster/run_workflows.py: find_executor_phase`, `extensions/sweep/runs.py`, trackers, the
        page (`ui/static`) and docs/commands.md.
        """
        state = self.state
        if state is None:
            return "created" if self.record else "elsewhere"
        # A run of several workflows goes on after each that has the output `next`.
        if state.workflow.phase == "Running" or "next" in state.workflow.outputs:
            return "running" if state.alive else "interrupted"
        # Whoever stopped it, by Ctrl-C as well, knows that nothing has failed.
        if state.workflow.message.startswith(journal.STOPPED):
            return "interrupted"
        return "succeeded" if state.workflow.phase == "Succeeded" else "failed"

    def evaluations(self) -> list[Score]:
        """List the mean rewards on held-out prompts, oldest first."""
        scores: list[Score] = []
        for entry in self.with_role("evaluator"):
            value = entry.manifest.scalars.get("mean_reward")
            if value is not None:
                method = f"{_describe_sampling(entry)}, held-out prompts"
                scores.append(
                    Score(
                        value,
                        method,
                        self.find_version(entry),
                        entry,
                    )
                )
        return scores

    def training_rewards(self) -> list[Score]:
        """List the mean rewards of the batches that were trained on, by iteration."""
        rollouts = {entry.iteration: entry for entry in self.with_role("sampler")}
        # Where an iteration has two scorers, the later one adds to the scores of the earlier.
        scored = {entry.iteration: entry for entry in self.with_role("scorer")}
        scores: list[Score] = []
        for entry in sorted(
            scored.values(),
            key=lambda entry: entry.iteration or 0,
        ):
            value = entry.manifest.scalars.get("mean_reward")
            if value is None:
                continue
            rollout = rollouts.get(entry.iteration)
            if rollout:
                method = f"{_describe_sampling(rollout)}, training prompts"
                scores.append(
                    Score(
                        value,
                        method,
                        self.find_version(rollout),
                        entry,
                    )
                )
            else:
                scores.append(Score(value, "training prompts", None, entry))
        return scores

    def estimate_variance(self, score: Score) -> float:
        """Estimate the variance of a mean reward, by the scores that it is the mean of; 0 if there
        are fewer than two.
        """
        digest = score.entry.manifest.digest
        # A verdict and the caution about it both ask for it, and the rows do not change.
        if digest not in self._variances:
            rows = self.read_samples(score.entry, ("score",))
            values = [row["score"] for row in rows if row.get("score") is not None]
            count = len(values)
            self._variances[digest] = statistics.variance(values) / count if count > 1 else 0.0
        return self._variances[digest]

    def latest_reward(self) -> Score | None:
        """Return the newest mean reward of any kind."""
        scores = self.evaluations() + self.training_rewards()
        return max(
            scores,
            key=lambda score: score.entry.finished,
            default=None,
        )

    def curves(
        self,
        keys: Collection[str] | None = None,
    ) -> list[Curve]:
        """Return a curve of each quantity that stages recorded.

        Args:
            keys: only the points that the artifacts of these keys add; None: all.
        """
        # Mean rewards come from results, which every artifact has, and all else from metrics.
        curves: list[Curve] = []
        for all_scores in (self.training_rewards(), self.evaluations()):
            scores = [score for score in all_scores if keys is None or score.entry.key in keys]
            if scores:
                newest = scores[-1].entry.manifest
                method = scores[0].method
                curve = Curve(
                    "mean_reward",
                    newest.stage,
                    newest.role,
                    method,
                    "iteration",
                )
                curves.append(curve)
            for score in scores:
                curve.add(
                    self._find_iteration(score.entry),
                    score.value,
                    score.entry.finished,
                )
        for role in RECORDING_ROLES:
            curves += self._read_curves(role, keys)
        return curves

    def _read_curves(
        self,
        role: Role,
        keys: Collection[str] | None,
    ) -> Iterator[Curve]:
        """Yield the columns of ``metrics.jsonl`` over iterations, or over the steps of training
        outside the loop.
        """
        entries_by_stage: dict[str, list[Entry]] = {}
        for entry in self.with_role(role):
            if keys is None or entry.key in keys:
                entries_by_stage.setdefault(entry.manifest.stage, []).append(entry)
        for stage, entries in entries_by_stage.items():
            curves: dict[str, Curve] = {}
            entries.sort(key=self._find_iteration)
            for entry, rows in zip(entries, self.read_metrics(entries)):
                axis = "step" if entry.iteration is None and role != "evaluator" else "iteration"
                for index, row in enumerate(rows):
                    # An iteration's rows are its optimizer steps: the last one ends the iteration.
                    if axis == "step":
                        x = row.get("step", index)
                    else:
                        x = self._find_iteration(entry) - 1 + (index + 1) / len(rows)
                    for name, value in row.items():
                        if name in NO_CURVES or not isinstance(value, int | float):
                            continue
                        if name not in curves:
                            curves[name] = Curve(
                                name,
                                stage,
                                role,
                                f"as {stage} recorded it",
                                axis,
                            )
                        curves[name].add(x, value, entry.finished)
            yield from curves.values()

    def _find_iteration(self, entry: Entry) -> float:
        """Find the iteration that an artifact is about; for an evaluation, that of the policy it
        evaluated.
        """
        # An evaluation lies outside the loop, also where it was made of an iteration's policy.
        subject = entry
        if entry.manifest.role == "evaluator":
            subject = self.find_policy(entry) or entry
        return float(subject.iteration or 0)

    def iteration_ends(self) -> dict[int, float]:
        """Return iteration → when its trainer committed, Unix seconds."""
        ends: dict[int, float] = {}
        for entry in self.with_role("trainer"):
            if entry.iteration:
                ends[entry.iteration] = entry.finished
        return ends

    def phase_seconds(self) -> dict[str, list[tuple[float, float]]]:
        """Return stage → (iteration, seconds it worked); iteration 0 is everything outside the
        loop.
        """
        points: dict[str, list[tuple[float, float]]] = {}
        for entry in self.entries:
            curve = points.setdefault(entry.stage, [])
            iteration = float(entry.iteration or 0)
            curve.append((iteration, entry.seconds))
        return points

    def seconds_an_iteration(self) -> dict[str, float]:
        """Return stage of the loop → the median of the seconds that it worked."""
        medians: dict[str, float] = {}
        for stage, points in self.phase_seconds().items():
            looped = [seconds for iteration, seconds in points if iteration]
            if looped:
                medians[stage] = statistics.median(looped)
        return medians

    def read_samples(
        self, entry: Entry, columns: Collection[str] = SAMPLE_COLUMNS
    ) -> list[dict[str, Any]]:
        """Read the rows of an evaluation or of a batch of rollouts, as stored, with those columns
        that it has.
        """
        import pyarrow.parquet

        for name in entry.manifest.files:
            if not name.endswith(".parquet"):
                continue
            data = self.read(entry, name)
            if data:
                # `pyarrow.parquet.read_table` would import pandas.
                file = pyarrow.parquet.ParquetFile(io.BytesIO(data))
                present = [column for column in file.schema_arrow.names if column in columns]
                return file.read(present).to_pylist()
        return []

    def count_scored_completions(self, entry: Entry) -> int:
        """Count the completions over which an artifact's mean reward was taken; 0 if its manifest
        does not say.
        """
        facts = ScoreFacts.read(entry.manifest)
        outcomes = facts.outcomes or {}
        if not outcomes and facts.reward:
            outcomes = facts.reward.outcomes
        count = int(outcomes.get("score", 0))
        # An escape from the sandbox has a score only where the run gives it one.
        if entry.manifest.params.get("escape_score") is not None:
            count += int(outcomes.get("escape", 0))
        return count


def _describe_sampling(entry: Entry) -> str:
    """Return how completions were sampled: ``greedy``, or the temperature."""
    temperature = entry.manifest.params.get("temperature")
    # An engine states how it sampled; without that, the stage's own parameter decided.
    sampling = entry.manifest.facts.get("sampling")
    if isinstance(sampling, dict):
        temperature = sampling.get("temperature", temperature)
    if temperature is None:
        return "sampling not stated"
    return "greedy" if float(temperature) == 0 else f"temperature {temperature:g}"
