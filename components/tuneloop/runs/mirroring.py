"""The mirror of a run in a tracker (`tuneloop.trackers`): what is told to the tracker, and when.

A trainer's curves are over optimizer steps, those of weights over versions, all others over
iterations; samples are tables. Only what is committed is mirrored, so it can be done at any time,
by any process, repeatedly.

`runs/tracking.py` decides when a run is looked at. The names of curves and tables here are those
that people's dashboards have.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from xxhash import xxh3_128_hexdigest

from tuneloop.core.artifacts import Manifest, find_manifest, split_ref
from tuneloop.core.errors import Retryable, UserError, find_disk_error, print_diagnostic
from tuneloop.runs.committed import Entry
from tuneloop.runs.delivery import find_delivery, get_measurements
from tuneloop.runs.records import list_leaves
from tuneloop.runs.run_record import Curve, Run
from tuneloop.trackers import Rows, find_tracker

TABLE_ROWS = 16
"""The most samples of an artifact that a table shows: its first rows."""
TABLE_EVERY = 10
"""The scored batch of one in so many iterations has a table (the first, the eleventh), and every
evaluation."""
RowsByPoint = dict[tuple[str, int, float], dict[str, Any]]
"""As `tuneloop.trackers.Rows`, while they are collected."""


class Mirror:
    """The mirror of a run in a tracker.

    Raises:
        UserError: the tracker is unknown, not installed, unreachable or refuses.
    """

    def __init__(self, run: Run, tracker: str) -> None:
        self.run = run
        self.name = tracker.partition("+")[0]
        self.tracker = find_tracker(tracker)
        self._point_counts: dict[str, int] = {}
        self._mirrored: set[str] = set()
        trouble = self.tracker.find_trouble()
        if trouble:
            remedy = (
                f"{trouble}: nothing was mirrored; run `tuneloop track` later to mirror everything"
            )
            raise UserError("tracker", self.name, remedy)
        with self._blame_tracker():
            self._open_run()

    def _open_run(self) -> None:
        """Find or make the run in the tracker."""
        record = self.run.record
        if record:
            key = record.id
            pipeline = record.pipeline
            settings = dict(list_leaves(record.config))
            started = record.created
        else:
            # A run from elsewhere is known by its URL alone.
            key = xxh3_128_hexdigest(self.run.url.encode())
            pipeline = "tuneloop"
            settings = {}
            started = min(
                (entry.started for entry in self.run.entries),
                default=time.time(),
            )
        self.tracker.open_run(
            key,
            self.run.name,
            pipeline,
            settings,
            started,
        )

    def update(self) -> None:
        """Mirror what the run, as it was last read, has committed since."""
        entries = [entry for entry in self.run.entries if entry.key not in self._mirrored]
        # What the store raises is not the tracker's fault.
        rows = collect_rows(self.run, entries, self._point_counts)
        artifacts = self._find_artifacts(entries)
        with self._blame_tracker():
            self.tracker.log_rows(rows)
            for reference, manifest in artifacts.items():
                self.tracker.log_artifact(reference, manifest)
        # After a failure all of them are mirrored again.
        self._mirrored |= {entry.key for entry in entries}
        self._mirrored |= artifacts.keys()

    def _find_artifacts(
        self,
        entries: Sequence[Entry],
    ) -> dict[str, Manifest]:
        """Find the models and prompts among some artifacts, and the prompts that these have from
        elsewhere, which were not mirrored: reference → manifest.
        """
        artifacts: dict[str, Manifest] = {}
        for entry in entries:
            if entry.manifest.kind in ("prompts", "model"):
                artifacts[self.run.reference(entry)] = entry.manifest
            reference = entry.manifest.inputs.get("prompts")
            known = artifacts.keys() | self._mirrored
            if not reference or reference in known or self.run.find_entry(reference):
                continue
            manifest = find_manifest(split_ref(reference)[0])
            # A stage that was run by hand may have read tokens of another run.
            if manifest and manifest.kind == "prompts":
                artifacts[reference] = manifest
        return artifacts

    def close(
        self,
        phase: str,
        render: Callable[[Run], str],
    ) -> str:
        """Attach the report, and write how the run stands.

        Args:
            phase: the run's, as `Run.phase`.
            render: makes the report, an HTML page; an empty one is not attached.

        Returns:
            Where the mirror is, in one line.
        """
        page = ""
        try:
            page = render(self.run)
        except (UserError, Retryable) as error:
            # The curves of a damaged run are mirrored all the same.
            print_diagnostic(f"report: {error}", 0)
        curves = [f"- `{curve.stage}/{curve.name}`: {curve.method}" for curve in self.run.curves()]
        notes = "\n".join(curves) + f"\n\n{self.run.url}"
        with self._blame_tracker():
            if page:
                self.tracker.log_report(page)
            address = self.tracker.close_run(
                phase,
                find_last_commit(self.run),
                notes,
            )
        return address

    @contextmanager
    def _blame_tracker(self) -> Iterator[None]:
        """Raise UserError for what a tracker's library raises, and for a place that it cannot
        write to. Python's own errors, such as KeyError, are bugs of the tracker's module.
        """
        try:
            yield
        except Exception as error:
            package = type(error).__module__.partition(".")[0]
            is_library = package not in ("builtins", "tuneloop")
            # A full disk is reported as such, whoever writes.
            is_place = isinstance(error, OSError) and not find_disk_error(error)
            if not is_library and not is_place:
                raise
            message = " ".join(str(error).split())
            raise UserError(self.name, self.tracker.address, message) from error


def find_last_commit(run: Run) -> float:
    """Return when a run last committed, Unix seconds; now, if it has not yet."""
    return max(
        (entry.finished for entry in run.entries),
        default=time.time(),
    )


def collect_rows(
    run: Run,
    entries: Sequence[Entry],
    point_counts: dict[str, int],
) -> Rows:
    """Collect what some artifacts of a run add to its curves and tables.

    Of artifacts outside the loop there are curves and tables, and neither results nor seconds.

    Args:
        run: the run.
        entries: those that were committed since the last call.
        point_counts: curve → the number of its points so far; it is brought up to date.
    """
    rows: RowsByPoint = defaultdict(dict)
    # Of unchanged artifacts there are no curves, and their metrics are not read.
    if entries:
        for curve in run.curves({entry.key for entry in entries}):
            _add_curve(rows, curve, point_counts)
    for entry in entries:
        point = (
            "iteration",
            entry.iteration or 0,
            entry.finished,
        )
        samples = run.read_samples(entry) if _has_table(entry) else []
        if samples:
            rows[point][f"samples/{entry.stage}"] = samples[:TABLE_ROWS]
        if entry.iteration is None:
            continue
        stage = entry.manifest.stage
        for metric, value in entry.manifest.scalars.items():
            name = f"{stage}/{metric}"
            # A mean reward is a curve already.
            if name not in point_counts:
                rows[point][name] = float(value)
        rows[point][f"seconds/{stage}"] = entry.seconds
        if entry.manifest.role == "sampler":
            _add_delivery(rows, run, entry)
    return rows


def _add_curve(
    rows: RowsByPoint,
    curve: Curve,
    point_counts: dict[str, int],
) -> None:
    """Add the points of a curve, and count them."""
    name = f"{curve.stage}/{curve.name}"
    count = point_counts.get(name, 0)
    for x, y, at in zip(curve.x, curve.y, curve.at):
        count += 1
        # Several optimizer steps of one iteration share an x: their own count is the step then.
        axis = "optimizer_step" if curve.role == "trainer" else "iteration"
        step = count if curve.role == "trainer" else int(x)
        rows[axis, step, at][name] = float(y)
    point_counts[name] = count


def _has_table(entry: Entry) -> bool:
    """Return whether the samples of an artifact are mirrored."""
    if entry.manifest.role == "scorer":
        return (entry.iteration or 0) % TABLE_EVERY == 1
    return entry.manifest.role == "evaluator"


def _add_delivery(rows: RowsByPoint, run: Run, entry: Entry) -> None:
    """Add what is known of the way of the weights that a sampler used."""
    delivery = find_delivery(run, entry)
    if delivery:
        row = rows["version", delivery.version, entry.finished]
        for name, value in get_measurements(delivery).items():
            row[f"weights/{name}"] = value
