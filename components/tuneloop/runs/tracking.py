"""Mirror a run into MLflow: one run, found again by tag. Curves of a trainer step by optimizer steps, those of weights
by version, all others by iteration.

Only what is committed is mirrored, so the mirror can be made at any time, in any process, as often as one likes: runs
are looked up by the tag ``tuneloop_key``, and a point of a curve carries the time of its artifact, by which MLflow
knows it from a new one. ``MLFLOW_TRACKING_URI`` and ``MLFLOW_EXPERIMENT_NAME`` are honoured.

A server that does not answer is found out in a moment, where MLflow's client would try again for minutes. A run goes
on without it: no stage fails by it, and what was not mirrored can be at any time.
"""

import importlib.util
import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tuneloop.core.errors import UserError, print_diagnostic
from tuneloop.runs.delivery import find_delivery, get_measurements
from tuneloop.runs.records import list_leaves
from tuneloop.runs.run_record import Run

URI = "sqlite:///mlflow.db"
KEY = "tuneloop_key"
STATUS = {"running": "RUNNING", "succeeded": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
MISSING = "not mirrored: mlflow is not installed; install tuneloop[tracking]"
PATIENCE = 60.0
"""Seconds that a finished run waits for its mirror."""
ANSWERS = 3.0
"""Seconds within which a server answers at all."""
UNAVAILABLE = (502, 503, 504)
"""What a proxy says of a server that is away."""
EVERY = 2.0
"""Seconds between two looks of a mirror that follows a run."""


def mirror_run(run: Run, *, follow: bool = False, going_on: Callable[[], bool] | None = None) -> str:
    """Mirror `run` and say where, in one line.

    Args:
        follow: go on until the run ends.
        going_on: waits a moment and says whether to look again; default: until the run is not running.

    Raises:
        UserError: MLflow does not answer, or refuses (its address, its store, the run).
    """
    if importlib.util.find_spec("mlflow") is None:
        return MISSING
    if trouble := probe_server():
        remedy = f"{trouble}: nothing was mirrored; once it answers, `tuneloop track {run.name}` mirrors all"
        raise UserError("MLFLOW_TRACKING_URI", format_tracking_uri(), remedy)
    from mlflow.exceptions import MlflowException

    try:
        made = Mirror(run)
        made.sync()
        while going_on() if going_on else follow and _running(run):
            made.sync(whole=False)
        made.sync()
        return made.close()
    except MlflowException as error:
        raise UserError("MLFLOW_TRACKING_URI", format_tracking_uri(), " ".join(str(error).split())) from error


def format_tracking_uri() -> str:
    """Format the address of MLflow for people, without user and password."""
    return re.sub(r"(?<=://)[^/]*@", "", os.environ.get("MLFLOW_TRACKING_URI") or URI)


def probe_server() -> str:
    """Return why the MLflow server is unavailable; empty if it answers or none is needed."""
    import httpx2

    at = format_tracking_uri()
    if not at.startswith(("http://", "https://")):
        return ""
    why = ["timed out"]

    def ask() -> None:
        try:  # through a proxy, as MLflow does, which may also have been told to trust any certificate
            status = httpx2.get(f"{at.rstrip('/')}/health", timeout=ANSWERS, verify=False).status_code
            why.append(f"status {status}" if status in UNAVAILABLE else "")  # whatever else it says, it is there
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            why.append(str(error))

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(ANSWERS)  # looking up a name has no timeout of its own
    return why[-1] and f"does not answer ({why[-1]})"


class Mirror:
    """The MLflow side of one run; `sync` brings it up to date."""

    def __init__(self, run: Run) -> None:
        from mlflow import MlflowClient

        self.run = run
        self.client = MlflowClient(tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or URI)
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or (run.record.pipeline if run.record else "tuneloop")
        found = self.client.get_experiment_by_name(name)
        self.experiment = str(found.experiment_id if found else self.client.create_experiment(name))
        self.id = self._find_or_make()
        self.client.update_run(self.id, status="RUNNING")  # a resumed run goes on in the same one
        if run.record:
            self._params(run.record.config)
        self.logged: dict[str, int] = {}
        self.mirrored: set[str] = set()

    def sync(self, *, whole: bool | None = None) -> None:
        """Mirror what was committed since; `whole` is that of `Run.refresh`."""
        from mlflow.entities import Metric

        self.run.refresh(whole=whole)
        fresh = [entry for entry in self.run.entries if entry.key not in self.mirrored]
        for curve in self.run.curves({entry.key for entry in fresh}) if fresh else ():
            name = f"{curve.stage}/{curve.name}"
            first = self.logged.get(name, 0)
            # Several optimizer steps of one iteration share an x: their own count is the step then.
            recorded = curve.role == "trainer"
            points = [
                Metric(name, y, int(at * 1000), first + index + 1 if recorded else int(x))
                for index, (x, y, at) in enumerate(zip(curve.x, curve.y, curve.at))
            ]
            self._log(points)
            self.logged[name] = first + len(points)
        for entry in fresh:
            if entry.iteration is not None:
                stage, at = entry.manifest.stage, int(entry.finished * 1000)
                values = {f"{stage}/{k}": float(v) for k, v in entry.manifest.scalars.items()}
                values = {k: v for k, v in values.items() if k not in self.logged} | {f"seconds/{stage}": entry.seconds}
                points = [Metric(k, v, at, entry.iteration) for k, v in values.items()]
                if entry.manifest.role == "sampler" and (one := find_delivery(self.run, entry)):
                    points += [Metric(f"weights/{k}", v, at, one.version) for k, v in get_measurements(one).items()]
                self._log(points)
            self.mirrored.add(entry.key)

    def close(self) -> str:
        """Write how the run stands, and say where its mirror is."""
        phase = self.run.phase
        notes = (f"- `{curve.stage}/{curve.name}`: {curve.how}" for curve in self.run.curves())
        self.client.set_tag(self.id, "mlflow.note.content", "\n".join(notes))
        self.client.set_tag(self.id, "tuneloop.store", self.run.url)
        if phase != "running":
            ended = max((entry.finished for entry in self.run.entries), default=time.time())
            self.client.set_terminated(self.id, STATUS.get(phase, "FINISHED"), int(ended * 1000))
        experiment = self.client.get_experiment(self.experiment).name
        name = self.client.get_run(self.id).info.run_name
        return f"{format_tracking_uri()}, experiment {experiment}, run {name}" + (
            f", {self.run.iteration} iterations" if self.run.iteration else ""
        )

    def _find_or_make(self) -> str:
        run, key = self.run, self.run.record.id if self.run.record else self.run.url
        if found := self.client.search_runs([self.experiment], f"tags.{KEY} = '{key}'", max_results=1):
            return str(found[0].info.run_id)
        started = run.record.created if run.record else min((e.started for e in run.entries), default=time.time())
        tags = {KEY: key, "tuneloop.run": run.name}
        return str(self.client.create_run(self.experiment, int(started * 1000), tags, run.name).info.run_id)

    def _params(self, config: Mapping[str, Any]) -> None:
        """Log the configuration as parameters; those that are there already stay."""
        from mlflow.entities import Param

        standing = self.client.get_run(self.id).data.params
        flat = [Param(k, str(v)[:6000]) for k, v in list_leaves(config) if k not in standing]
        for start in range(0, len(flat), 100):
            self.client.log_batch(self.id, params=flat[start : start + 100])

    def _log(self, points: list[Any]) -> None:
        for start in range(0, len(points), 1000):
            self.client.log_batch(self.id, metrics=points[start : start + 1000])


@dataclass
class Follower:
    """A mirror in a process of its own; `said` is its closing line."""

    said: str = ""


@contextmanager
def mirror_in_background(run: Run, *, enabled: bool = True) -> Iterator[Follower]:
    """Mirror `run` while the block runs, in another process: no stage waits for the import of MLflow."""
    if not enabled:
        yield Follower()
        return
    if importlib.util.find_spec("mlflow") is None:
        yield Follower(MISSING)
        return
    if trouble := probe_server():
        print_diagnostic(f"MLflow: {format_tracking_uri()} {trouble}: the run goes on without it", 0)
        yield Follower(f"not mirrored: {format_tracking_uri()} {trouble}; `tuneloop track {run.name}` does it later")
        return
    told = Follower()
    log = run.directory / "mlflow.log"
    with log.open("w") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", "tuneloop.runs.tracking", run.name, run.store_url],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is for the run; this process ends when its input does
            text=True,
        )
    try:
        yield told
    finally:
        told.said = _closing(child) or f"not mirrored whole: see {log}; `tuneloop track {run.name}` tries again"


def _closing(child: subprocess.Popen[str]) -> str:
    """Return the last line of the process that mirrors, once it has seen the run's end; empty where it failed."""
    try:
        try:
            out, _ = child.communicate(timeout=ANSWERS)
        except subprocess.TimeoutExpired:
            if trouble := probe_server():
                print_diagnostic(f"MLflow: {format_tracking_uri()} {trouble}", 0)
                raise
            print_diagnostic(f"MLflow: {format_tracking_uri()} takes in the rest, {PATIENCE:g} s at most", 0)
            out, _ = child.communicate(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        return ""
    return "" if child.returncode else out.strip()


def _running(run: Run) -> bool:
    time.sleep(EVERY)
    return run.phase == "running"


if __name__ == "__main__":
    os.nice(10)
    # Until standard input ends, which it does when the run's process ends, however it ends.
    said = mirror_run(Run.open(*sys.argv[1:]), going_on=lambda: not select.select([sys.stdin], [], [], EVERY)[0])
    print(said, flush=True)
