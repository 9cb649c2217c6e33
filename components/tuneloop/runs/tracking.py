"""Mirror a run into a tracker (`tuneloop.trackers`): a trainer's curves by optimizer step, those of weights by version,
all others by iteration, samples as tables. Only what is committed is mirrored, so it can be done at any time, by any
process, repeatedly; a tracker that is slow or away holds no stage up, and makes none fail."""

import itertools
import os
import select
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from xxhash import xxh3_128_hexdigest

from tuneloop.core.artifacts import Manifest, find_manifest, split_ref
from tuneloop.core.errors import Retryable, UserError, find_disk_error, print_diagnostic
from tuneloop.core.store import Store
from tuneloop.runs.delivery import find_delivery, get_measurements
from tuneloop.runs.records import NAME, list_leaves, read_record
from tuneloop.runs.run_record import Entry, Run
from tuneloop.trackers import Rows, Tracker, find_tracker

ANSWERS, PATIENCE, EVERY = 3.0, 60.0, 2.0
"""Seconds that a finished run waits for a mirror silently, and then at most; seconds between two looks at a run."""
AWAY, DAY = 60.0, 86400.0
"""Seconds after which a failed run is mirrored again, and after which a run without commits counts as ended."""
TABLE, BETWEEN = 16, 10
"""The samples in a table; one batch in so many iterations has a table, and every evaluation."""


def read_report(run: Run) -> str:
    """Read the report that was last written beside the run's state; empty where there is none."""
    path = run.directory / "report.html"
    return path.read_text("utf-8") if path.is_file() else ""


class Mirror:
    """The mirror of a run in a tracker. Raises UserError if that is unknown, not installed, unreachable or refuses."""

    def __init__(self, run: Run, chosen: str) -> None:
        self.run, self.name, self.tracker = run, chosen.partition("+")[0], find_tracker(chosen)
        self._logged, self._mirrored, record = dict[str, int](), set[str](), run.record
        if why := self.tracker.find_trouble():
            told = f"{why}: nothing was mirrored; run `tuneloop track` later to mirror everything"
            raise UserError("tracker", self.name, told)
        started = (
            record.created if record else min((e.started for e in run.entries), default=time.time())
        )
        key, pipeline = (
            (record.id, record.pipeline)
            if record
            else (xxh3_128_hexdigest(run.url.encode()), "tuneloop")
        )
        settings = dict(list_leaves(record.config if record else {}))
        with self._name_errors():
            self.tracker.open_run(key, run.name, pipeline, settings, started)

    def update(self) -> None:
        """Mirror what the run, as it was last read, has committed since."""
        fresh = [entry for entry in self.run.entries if entry.key not in self._mirrored]
        with self._name_errors():
            self.tracker.log_rows(collect_rows(self.run, fresh, self._logged))
            for ref, made in find_referred(self.run, fresh, self._mirrored):
                self.tracker.log_artifact(ref, made)
        self._mirrored |= {entry.key for entry in fresh}

    def close(self, phase: str, render: Callable[[Run], str]) -> str:
        """Attach the report, write that the run stands at `phase`, and say where the mirror is, in one line."""
        run, page = self.run, ""
        try:
            page = render(run)
        except (
            UserError,
            Retryable,
        ) as error:  # the curves of a damaged run are there all the same
            print_diagnostic(f"report: {error}", 0)
        notes = "\n".join(f"- `{curve.stage}/{curve.name}`: {curve.how}" for curve in run.curves())
        with self._name_errors():
            if page:
                self.tracker.log_report(page)
            at = self.tracker.close_run(phase, find_newest(run), f"{notes}\n\n{run.url}")
        return at + (f", {run.iteration} iterations" if run.iteration else "")

    @contextmanager
    def _name_errors(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            own = type(error).__module__.startswith((self.name, "sqlite3"))
            if own or (isinstance(error, OSError) and not find_disk_error(error)):
                raise UserError(
                    self.name, self.tracker.address, " ".join(str(error).split())
                ) from error
            raise


def mirror_run(
    run: Run,
    chosen: str = "mlflow",
    going_on: Callable[[], bool] = lambda: False,
    render: Callable[[Run], str] = read_report,
    ask: Callable[[str], str] = lambda name: "",
) -> str:
    """Mirror `run` into the tracker that `chosen` names, and return where, in one line. Raises what a `Mirror` does.
    `going_on` waits a moment and says whether to look again (default: no); `render` makes the report to attach."""
    mirror, more = Mirror(run, chosen), True
    while more:
        more = going_on()
        run.refresh(whole=False if more else None)
        mirror.update()
    return mirror.close(find_phase(run, ask), render)


def mirror_store(
    store: str,
    chosen: Sequence[str],
    going_on: Callable[[], bool],
    render: Callable[[Run], str] = read_report,
    ask: Callable[[str], str] = lambda name: "",
) -> None:
    """Mirror the runs below `store`, new ones too, until `going_on` says no; the arguments are `mirror_run`'s. A folder
    is read again after a tenth of the time since its last commit, or since it was first seen if it has none. A run
    without a commit for a day is ignored; one that fails is tried again in a minute, and the failure is printed."""
    mirrors, done, due = (
        dict[tuple[str, str], Mirror](),
        dict[tuple[str, str], float](),
        dict[tuple[str, str], float](),
    )
    seen, away = dict[str, float](), ""
    while going_on():
        names, before, away = list[str](), away, ""
        try:
            names = sorted(Store(store).parts())
        except Retryable as error:
            away = str(error)
        for at in itertools.product(filter(NAME.match, names), chosen):
            if time.time() < due.get(at, 0.0):
                continue
            try:
                mirror = mirrors.pop(at, None)
                run = mirror.run if mirror else Run(at[0], store, read_record(at[0], store))
                run.refresh(whole=False)
                newest = find_newest(run) if run.entries else seen.setdefault(at[0], time.time())
                age = time.time() - newest
                if mirror or (run.entries and age < DAY and done.get(at) != newest):
                    mirror = mirror or Mirror(run, at[1])
                    mirror.update()
                    if (phase := find_phase(run, ask)) == "running":
                        mirrors[at] = mirror
                    else:
                        done[at] = newest
                        print_diagnostic(f"{run.name}: {phase}: {mirror.close(phase, render)}", 0)
                wait = max(EVERY, age / 10)
            except UserError as error:
                print_diagnostic(f"{at[0]}: {error}", 0)
                wait = AWAY
            except Retryable as error:
                away, wait = f"{at[0]}: {error}", AWAY
            due[at] = time.time() + wait
        if bool(away) != bool(before):
            print_diagnostic(away or f"{store}: answers again", 0)


def find_phase(run: Run, ask: Callable[[str], str] = lambda name: "") -> str:
    """Return `Run.phase`; of a run elsewhere, what `ask` says of its name, else by its artifacts: ``failed`` if a stage
    says so (as on KFP), ``succeeded`` once its export is evaluated, ``running`` if it committed within a day."""
    if run.phase != "elsewhere":
        return run.phase
    if asked := ask(run.name):
        return asked
    if run.read_failures():
        return "failed"
    judged = {entry.manifest.inputs.get("policy") for entry in run.with_role("evaluator")}
    if any(
        e.manifest.kind == "model" and e.manifest.inputs.get("policy", "") in judged
        for e in run.entries
    ):
        return "succeeded"
    return "running" if time.time() - find_newest(run) < DAY else run.phase


def find_newest(run: Run) -> float:
    """Return when a run last committed, Unix seconds; now, where it has not yet."""
    return max((entry.finished for entry in run.entries), default=time.time())


def collect_rows(run: Run, fresh: Sequence[Entry], logged: dict[str, int]) -> Rows:
    """Collect what `fresh` artifacts tell; `logged` counts the points of each curve, and is brought up to date."""
    rows: dict[tuple[str, int, float], dict[str, Any]] = defaultdict(dict)
    for curve in run.curves({entry.key for entry in fresh}) if fresh else ():
        name = f"{curve.stage}/{curve.name}"
        first = logged.get(name, 0)
        logged[name] = first + len(curve.x)
        for index, (x, y, at) in enumerate(zip(curve.x, curve.y, curve.at)):
            # Several optimizer steps of one iteration share an x: their own count is the step then.
            place = (
                ("optimizer_step", first + index + 1)
                if curve.role == "trainer"
                else ("iteration", int(x))
            )
            rows[*place, at][name] = float(y)
    for entry in fresh:
        stage, role, step, at = (
            entry.manifest.stage,
            entry.manifest.role,
            entry.iteration or 0,
            entry.finished,
        )
        due = role == "evaluator" or (role == "scorer" and step % BETWEEN == 1)
        if due and (samples := run.samples(entry)[:TABLE]):
            rows["iteration", step, at][f"samples/{entry.stage}"] = samples
        if entry.iteration is not None:
            stated = {f"{stage}/{k}": float(v) for k, v in entry.manifest.scalars.items()}
            rows["iteration", step, at] |= {k: v for k, v in stated.items() if k not in logged}
            rows["iteration", step, at][f"seconds/{stage}"] = entry.seconds
            if role == "sampler" and (one := find_delivery(run, entry)):
                rows["version", one.version, at] |= {
                    f"weights/{k}": v for k, v in get_measurements(one).items()
                }
    return rows


def find_referred(
    run: Run, fresh: Sequence[Entry], seen: set[str]
) -> Iterator[tuple[str, Manifest]]:
    """Yield models among `fresh` artifacts, and prompts; `seen` remembers those that lie in another run."""
    for entry in fresh:
        if entry.manifest.kind in ("prompts", "model"):
            yield f"{run.url}/{entry.key}@{entry.manifest.digest}", entry.manifest
        ref = entry.manifest.inputs.get("prompts")
        if ref and ref not in seen and not run.maker(ref):
            seen.add(ref)
            if made := find_manifest(split_ref(ref)[0]):
                yield ref, made


def list_trackers() -> list[str]:
    """List what ``TUNELOOP_TRACKERS`` names, by default MLflow if installed. Raises UserError if one is named twice."""
    listed = os.environ.get("TUNELOOP_TRACKERS", "mlflow" if find_spec("mlflow") else "").split()
    names = [each.partition("+")[0] for each in listed]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            "TUNELOOP_TRACKERS", " ".join(listed), f"names {twice} twice; name each tracker once"
        )
    return listed


@contextmanager
def mirror_in_background(run: Run, *, enabled: bool = True) -> Iterator[dict[str, str]]:
    """Mirror `run` while the block runs, each tracker in another process: no stage waits for it, or for its imports.
    Yields a mapping that is filled at the end of the block: tracker → where the mirror is, or why there is none."""
    told, children = dict[str, str](), dict[str, tuple[Tracker, subprocess.Popen[str]]]()
    for each in list_trackers() if enabled else ():
        name, tracker = each.partition("+")[0], find_tracker(each)
        if trouble := tracker.find_trouble():
            print_diagnostic(f"{name}: {trouble}: the run goes on without it", 0)
            told[name] = f"not mirrored: {trouble}; `tuneloop track {run.name}` does it later"
            continue
        command, pipe = (
            [sys.executable, "-m", "tuneloop.runs.tracking", run.name, run.store_url, each],
            subprocess.PIPE,
        )
        with (run.directory / f"{name}.log").open(
            "w"
        ) as log:  # in a new session: Ctrl-C is meant for the run
            child = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=log, start_new_session=True, text=True
            )
        children[name] = tracker, child
    try:
        yield told
    finally:
        for _, child in children.values():
            child.stdin = child.stdin and child.stdin.close()  # the children run until it closes
        for name, (tracker, child) in children.items():
            later = f"see {run.directory}/{name}.log; `tuneloop track {run.name}` tries again"
            told[name] = _wait_for_mirror(name, tracker, child) or f"not mirrored whole: {later}"


def _wait_for_mirror(name: str, tracker: Tracker, child: subprocess.Popen[str]) -> str:
    """Return the last line of the process that mirrors, once it has seen the run's end; empty where it failed."""
    for patience, then in (
        (ANSWERS, f"takes in the rest, {PATIENCE:g} s at most"),
        (PATIENCE, "is given up"),
    ):
        try:
            out, _ = child.communicate(timeout=patience)
            return "" if child.returncode else out.strip().rpartition("\n")[2]
        except subprocess.TimeoutExpired:
            trouble = tracker.find_trouble()
            print_diagnostic(f"{name}: {trouble or then}", 0)
            if trouble:
                break
    child.kill()
    child.wait()
    return ""


if __name__ == "__main__":
    os.nice(10)
    name, store, chosen = sys.argv[1:]
    # Mirror until standard input closes, as it does whenever and however the run's process ends.
    said = mirror_run(
        Run.open(name, store), chosen, lambda: not select.select([sys.stdin], [], [], EVERY)[0]
    )
    print(said, flush=True)
