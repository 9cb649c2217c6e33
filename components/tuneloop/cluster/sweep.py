"""Sweeps: a run for each point of a grid of settings. All that is stored of a sweep is in its runs."""

import itertools
import math
import subprocess
import time
from collections.abc import Callable, Sequence
from statistics import mean, median

from tuneloop.cluster.run_workflows import get_workflow_phase, list_workflows
from tuneloop.core.errors import UserError
from tuneloop.core.seeds import derive_seed, permute_index
from tuneloop.core.store import Store
from tuneloop.kube.connection import Connection, retry_until_available
from tuneloop.runs.records import check_name
from tuneloop.runs.run_record import Run
from tuneloop.runs.tracking import find_phase

MOST, OTHERS = 10_000, 3
"""Points of a grid; other runs, at least, whose median stops one, as by default in Ray Tune."""
STOPPED = "stopped"
"""State of a run that was stopped early, and the key below its URL that says why: without it the run is resumed."""
Child = subprocess.Popen[bytes] | None


def list_points(name: str, over: Sequence[str], runs: int | None, seed: int) -> dict[str, dict[str, str]]:
    """Return run → key → value of the grid that `over` (``KEY=V1,V2``) spans, or of `runs` random points of it, the
    first of which are those of fewer. A run has its point's number. Raises UserError for a bad name or grid."""
    grid = dict[str, list[str]]()
    for key, _, text in (item.partition("=") for item in over):
        values = text.split(",")
        if not key or not all(values) or key in grid or len({*values}) < len(values):
            raise UserError("--over", f"{key}={text}", "write KEY=V1,V2, each key and each of its values once")
        grid[key] = values
    if (count := math.prod(map(len, grid.values()))) > MOST:
        raise UserError("--over", count, f"are too many combinations; give fewer values, {MOST} at most")
    check_name(f"{name}-{count}", "--name")
    points, order = [*itertools.product(*grid.values())], derive_seed(seed, "sweep")
    places = [permute_index(at, count, order) for at in range(min(runs, count))] if runs else range(count)
    return {f"{name}-{at + 1}": dict(zip(grid, points[at])) for at in places}


def judge_rewards(own: Sequence[float], others: Sequence[Sequence[float]], start: int) -> str:
    """Say why a run is to be stopped, by the rewards of its iterations and of other runs'; empty if it is not.

    This is the median stopping rule of Google Vizier (Golovin et al., KDD 2017, section 3.2), with runs that go on
    among the others, as in Ray Tune: the best reward by iteration k is strictly below the median of the others'
    averages over iterations 1 to k. k is the newest, from `start` on, that the run and `OTHERS` others have reached."""
    furthest = sorted(map(len, others))[-OTHERS:]
    if len(furthest) < OTHERS or (k := min(len(own), *furthest)) < start:
        return ""
    averages = [mean(each[:k]) for each in others if len(each) >= k]
    best, bound = max(own[:k]), median(averages)
    told = f"best reward by iteration {k} {best:.4g}, median of the averages of {len(averages)} others {bound:.4g}"
    return told if best < bound else ""


def read_reason(run: Run) -> str:
    """Read why a run was stopped early; empty where it was not."""
    return (Store(run.url).get(STOPPED) or b"").decode(errors="replace")


def follow_runs(
    runs: Sequence[Run],
    begin: Callable[[str], Child],
    stop: Callable[[str], object],
    cluster: Connection | None,
    parallel: int,
    start: int | None,
) -> dict[str, str]:
    """Begin each run once that has not ended well, `parallel` at a time, and return how each stands when all have
    ended. From iteration `start` on, stop those that do badly; why is recorded before, so that nothing resumes them."""
    states, waiting, children = dict[str, str](), [run.name for run in runs], dict[str, Child]()
    try:
        while not states or waiting or "running" in states.values():
            looked, before = time.monotonic(), states
            states = retry_until_available(lambda: {r.name: find_state(r, cluster, children.get(r.name)) for r in runs})
            pause = max(1.0, 10 * (time.monotonic() - looked))
            for name in (name for name, state in states.items() if before.get(name, state) != state):
                print(f"{name}: {states[name]}", flush=True)
            rewards = {run.name: [s.value for s in run.training_rewards() if s.entry.iteration] for run in runs}
            for run in (run for run in runs if start and states[run.name] == "running"):
                others = [values for name, values in rewards.items() if name != run.name]
                if why := read_reason(run) or judge_rewards(rewards[run.name], others, start or 1):
                    Store(run.url).put(STOPPED, why.encode())
                    print(f"{run.name}: is stopped: {why}", flush=True)
                    stop(run.name)
            waiting = [name for name in waiting if states[name] not in ("running", "succeeded", STOPPED)]
            for name in waiting[: max(0, parallel - [*states.values()].count("running"))]:
                print(f"{name}: begins", flush=True)
                children[name] = begin(name)
                waiting.remove(name)
                states[name] = "running"
            time.sleep(pause)
    finally:
        for child in filter(None, children.values()):  # which Ctrl-C has ended
            child.wait()
    return states


def find_state(run: Run, cluster: Connection | None, child: Child) -> str:
    """Find how a run stands, in the words of `Run.phase`, or ``stopped``; then read what it has committed."""
    if child and child.poll() is None:
        phase = "running"
    elif not cluster:
        phase = run.phase
    else:
        unseen = "succeeded" if find_phase(run) == "succeeded" else "created"  # its workflows are deleted after a while
        phase = get_workflow_phase(found[-1]).lower() if (found := list_workflows(cluster, run.name)) else unseen
        phase = {"pending": "running", "error": "failed"}.get(phase, phase)
    run.refresh(whole=False)
    return STOPPED if phase not in ("running", "succeeded") and read_reason(run) else phase
