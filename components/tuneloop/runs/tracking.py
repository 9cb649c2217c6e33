"""Mirror runs into trackers while they go on. A tracker that is slow or away holds no stage up,
and makes none fail.

Two callers: `tuneloop run`, whose children run this module (`mirror_in_background`); and `tuneloop
track`, for one run or for all runs of a store (`mirror_store`).
"""

import itertools
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec

from tuneloop.core.errors import Retryable, UserError, print_diagnostic
from tuneloop.core.store import Store
from tuneloop.runs.mirroring import Mirror, find_last_commit
from tuneloop.runs.records import NAME, REPORT_FILE, read_record
from tuneloop.runs.run_record import Run
from tuneloop.trackers import Tracker, find_tracker

SILENT_WAIT_S = 3.0
"""Seconds that a finished run waits for a mirror without a word."""
LONGEST_WAIT_S = 60.0
"""Seconds that it waits after that, at most."""
POLL_S = 2.0
"""Seconds between two looks at a run."""
RETRY_S = 60.0
"""Seconds after which a run that could not be mirrored is tried again."""
IDLE_S = 86400.0
"""Seconds after which a run without commits counts as ended. `cli/watch.py` says it as "a day"."""


def read_report(run: Run) -> str:
    """Read the report that was last written beside the run's state; empty if there is none."""
    path = run.directory / REPORT_FILE
    return path.read_text("utf-8") if path.is_file() else ""


def mirror_run(
    run: Run,
    tracker: str = "mlflow",
    should_continue: Callable[[], bool] = lambda: False,
    render: Callable[[Run], str] = read_report,
    ask_phase: Callable[[str], str] = lambda name: "",
) -> str:
    """Mirror a run into a tracker.

    Args:
        run: the run.
        tracker: ``NAME`` or ``NAME+ADDRESS``.
        should_continue: waits a moment and says whether to look again.
        render: makes the report to attach, an HTML page.
        ask_phase: says how a run that is executed elsewhere stands, by its name; empty if it does
            not know.

    Returns:
        Where the mirror is, in one line.

    Raises:
        UserError: the tracker is unknown, not installed, unreachable or refuses.
    """
    mirror = Mirror(run, tracker)
    is_followed = True
    while is_followed:
        is_followed = should_continue()
        # The last look lists all iterations, as late commits may be among them.
        run.refresh(all_iterations=False if is_followed else None)
        mirror.update()
    return mirror.close(find_phase(run, ask_phase), render)


@dataclass
class FollowedRun:
    """A run below a store that is mirrored into one tracker, look by look.

    Attributes:
        name: the run's.
        store: its URL.
        tracker: ``NAME`` or ``NAME+ADDRESS``.
        first_seen: when there first was a folder of this name, Unix seconds.
        mirror: what the run is mirrored by while it goes on.
        closed_at: when the run had last committed as its mirror was closed, Unix seconds.
        next_look: when it is looked at again, Unix seconds.
    """

    name: str
    store: str
    tracker: str
    first_seen: float
    mirror: Mirror | None = None
    closed_at: float | None = None
    next_look: float = 0.0

    def _open_run(self) -> Run:
        """Open the run, also one that has committed nothing yet."""
        return Run(self.name, self.store, read_record(self.name, self.store))

    def look(
        self,
        render: Callable[[Run], str],
        ask_phase: Callable[[str], str],
    ) -> None:
        """Mirror what was committed since the last look, and close the mirror if the run has
        ended.
        """
        mirror = self.mirror
        # After an error the run is mirrored anew: the tracker may have taken a part.
        self.mirror = None
        run = mirror.run if mirror else self._open_run()
        run.refresh(all_iterations=False)
        last_commit = find_last_commit(run) if run.entries else self.first_seen
        age = time.time() - last_commit
        is_live = bool(run.entries) and age < IDLE_S and last_commit != self.closed_at
        if mirror or is_live:
            mirror = mirror or Mirror(run, self.tracker)
            mirror.update()
            phase = find_phase(run, ask_phase)
            if phase == "running":
                self.mirror = mirror
            else:
                self.closed_at = last_commit
                result = mirror.close(phase, render)
                print_diagnostic(f"{run.name}: {phase}: {result}", 0)
        self.next_look = time.time() + max(POLL_S, age / 10)


@dataclass
class Outage:
    """Whether a store answers: it is said once when it no longer does, and once when it does
    again.
    """

    store: str
    message: str = ""

    def report(self, message: str) -> None:
        """Report a change; an empty message says that the store answers."""
        if bool(message) != bool(self.message):
            print_diagnostic(message or f"{self.store}: answers again", 0)
        self.message = message


def mirror_store(
    store: str,
    trackers: Sequence[str],
    should_continue: Callable[[], bool],
    render: Callable[[Run], str] = read_report,
    ask_phase: Callable[[str], str] = lambda name: "",
) -> None:
    """Mirror the runs below a store, new ones too, until `should_continue` says no.

    A folder is read again after a tenth of the time since its last commit, or since it was first
    seen if it has none. A run without a commit for a day is ignored; one that fails is tried again
    in a minute, and the failure is printed. The other arguments are `mirror_run`'s.
    """
    followed: dict[tuple[str, str], FollowedRun] = {}
    outage = Outage(store)
    while should_continue():
        message = ""
        names: list[str] = []
        try:
            names = sorted(Store(store).parts())
        except Retryable as error:
            message = str(error)
        for name, tracker in itertools.product(filter(NAME.match, names), trackers):
            if (name, tracker) not in followed:
                followed[name, tracker] = FollowedRun(name, store, tracker, time.time())
            run = followed[name, tracker]
            if time.time() < run.next_look:
                continue
            try:
                run.look(render, ask_phase)
            except UserError as error:
                print_diagnostic(f"{name}: {error}", 0)
                run.next_look = time.time() + RETRY_S
            except Retryable as error:
                message = f"{name}: {error}"
                run.next_look = time.time() + RETRY_S
        outage.report(message)


def find_phase(run: Run, ask_phase: Callable[[str], str] = lambda name: "") -> str:
    """Return the phase of a run, also of one that is executed elsewhere. `watch`, `track` and
    sweeps end by it.

    Of such a run it is what `ask_phase` says of its name. Otherwise its artifacts tell: it has
    ``failed`` if a stage says so (as on KFP), has ``succeeded`` once its export is evaluated, and
    is ``running`` if it committed within a day.
    """
    if run.phase != "elsewhere":
        return run.phase
    phase = ask_phase(run.name)
    if phase:
        return phase
    if run.read_failures():
        return "failed"
    # A model is exported from the last policy, which the last evaluation measures.
    evaluated = {entry.manifest.inputs.get("policy") for entry in run.with_role("evaluator")}
    for entry in run.entries:
        if entry.manifest.kind == "model" and entry.manifest.inputs.get("policy", "") in evaluated:
            return "succeeded"
    return "running" if time.time() - find_last_commit(run) < IDLE_S else run.phase


def list_trackers() -> list[str]:
    """List what ``TUNELOOP_TRACKERS`` names, by default MLflow if installed.

    Raises:
        UserError: a tracker is named twice.
    """
    default = "mlflow" if find_spec("mlflow") else ""
    trackers = os.environ.get("TUNELOOP_TRACKERS", default).split()
    names = [tracker.partition("+")[0] for tracker in trackers]
    for name in names:
        # Results are by name: the second would hide the first.
        if names.count(name) > 1:
            remedy = f"names {name} twice; name each tracker once"
            raise UserError("TUNELOOP_TRACKERS", " ".join(trackers), remedy)
    return trackers


@dataclass(frozen=True)
class Child:
    """A process that mirrors a run into a tracker, until its standard input closes."""

    name: str
    tracker: Tracker
    process: subprocess.Popen[str]

    def end_input(self) -> None:
        """Tell the process that the run has ended."""
        if self.process.stdin:
            self.process.stdin.close()
            # `communicate` would close it a second time.
            self.process.stdin = None

    def wait(self) -> str:
        """Wait for the process, but not long; return its last line, empty if it failed or was
        given up.
        """
        waits = {
            SILENT_WAIT_S: f"takes in the rest, {LONGEST_WAIT_S:g} s at most",
            LONGEST_WAIT_S: "is given up",
        }
        for timeout, outcome in waits.items():
            try:
                output, _ = self.process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                trouble = self.tracker.find_trouble()
                print_diagnostic(f"{self.name}: {trouble or outcome}", 0)
                # A tracker that is away is not waited for.
                if trouble:
                    break
                continue
            if self.process.returncode:
                return ""
            return output.strip().rpartition("\n")[2]
        self.process.kill()
        self.process.wait()
        return ""


@contextmanager
def mirror_in_background(run: Run, *, enabled: bool = True) -> Iterator[dict[str, str]]:
    """Mirror a run while the block runs, each tracker in another process: no stage waits for it,
    or for its imports.

    Yields:
        A mapping that is filled at the end of the block: tracker → where the mirror is, or why
        there is none.
    """
    mirrors: dict[str, str] = {}
    children: list[Child] = []
    for choice in list_trackers() if enabled else ():
        name = choice.partition("+")[0]
        tracker = find_tracker(choice)
        trouble = tracker.find_trouble()
        if trouble:
            print_diagnostic(f"{name}: {trouble}: the run goes on without it", 0)
            mirrors[name] = f"not mirrored: {trouble}; `tuneloop track {run.name}` does it later"
        else:
            children.append(Child(name, tracker, _start_process(run, name, choice)))
    try:
        yield mirrors
    finally:
        # All of them take in the rest at the same time.
        for child in children:
            child.end_input()
        for child in children:
            remedy = (
                f"see {run.directory}/{child.name}.log; `tuneloop track {run.name}` tries again"
            )
            mirrors[child.name] = child.wait() or f"not mirrored whole: {remedy}"


def _start_process(run: Run, name: str, choice: str) -> subprocess.Popen[str]:
    """Start a process that runs this module, with its log beside the run's state."""
    command = [sys.executable, "-m", "tuneloop.runs.tracking", run.name, run.store_url, choice]
    with (run.directory / f"{name}.log").open("w") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            # Ctrl-C is meant for the run, and not for its mirrors.
            start_new_session=True,
        )


def wait_for_input() -> bool:
    """Wait a moment; return whether standard input is still open, as it is while the run's
    process lives.
    """
    readable, _, _ = select.select([sys.stdin], [], [], POLL_S)
    return not readable


def main() -> None:
    """Mirror a run until standard input closes, however the run's process ends. Arguments: run,
    store, tracker, as `_start_process` gives them; the last line of its output is `Child.wait`'s.
    """
    # The run's own processes come first.
    os.nice(10)
    name, store, tracker = sys.argv[1:]
    print(mirror_run(Run.open(name, store), tracker, wait_for_input), flush=True)


if __name__ == "__main__":
    main()
