"""Sweeps: a run for each combination of settings. All that is stored of a sweep is in its runs."""

import itertools
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from statistics import mean, median

from xxhash import xxh32_hexdigest

from tuneloop.cluster.run_workflows import DONE, get_workflow_phase, list_workflows
from tuneloop.cluster.submit import stop_run
from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.core.threads import forward_signals, repeat_in_background
from tuneloop.kube.connection import Connection, retry_until_available
from tuneloop.runs.records import check_name
from tuneloop.runs.run_record import Run
from tuneloop.runs.tracking import find_phase

STOPPED = "stopped"
"""The file below a run's URL that says why it was stopped early. A sweep does not resume a run that has this file."""
ENDED = ("succeeded", STOPPED)


def list_combinations(name: str, over: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return run → key → value for each combination of the values in `over`, which are written ``KEY=V1,V2``. The name
    of a run ends with a digest of its combination, so a sweep that is given more values keeps the runs that it has."""
    check_name(f"{name}-{'0' * 8}", "--name")
    values = dict[str, list[str]]()
    for key, _, text in (item.partition("=") for item in over):
        if not key or not all(text.split(",")) or key in values:
            raise UserError("--over", f"{key}={text}", "write KEY=V1,V2, and each key once")
        values[key] = text.split(",")
    combinations = [dict(zip(values, each)) for each in itertools.product(*values.values())]
    return {
        f"{name}-{xxh32_hexdigest(repr(sorted(each.items())).encode())}": each
        for each in combinations
    }


def find_state(run: Run, cluster: Connection | None = None) -> str:
    """Read what a run has committed, and return its phase, in the words of `Run.phase`, or ``stopped`` and why."""
    phase = run.phase
    if cluster and (found := list_workflows(cluster, run.name)):
        phase = newest.lower() if (newest := get_workflow_phase(found[-1])) in DONE else "running"
    elif cluster:  # some time after a run has ended, its workflows are deleted
        phase = "succeeded" if find_phase(run) == "succeeded" else "created"
    run.refresh(all_iterations=False)
    why = Store(run.url).get(STOPPED) if phase not in ("running", "succeeded") else None
    return f"{STOPPED}: {why.decode()}" if why else phase


def look_at_run(
    run: Run, runs: Sequence[Run], judged: range, cluster: Connection | None = None
) -> bool:
    """Return whether a run is running. After the iterations in `judged`, stop it if `judge_run` says so; where it is
    not on a cluster, it is this process that executes it."""
    running = retry_until_available(partial(find_state, run, cluster)) == "running"
    if running and judged and judge_run(run, runs, judged):
        stop = (
            partial(stop_run, cluster, run.name)
            if cluster
            else partial(os.kill, os.getpid(), signal.SIGTERM)
        )
        retry_until_available(stop)
    return running


def execute_run(run: Run, runs: Sequence[Run], execute: Callable[[], int], judged: range) -> None:
    """Call `execute`, which executes a run in this process. With `judged`, look at the run every two seconds meanwhile.
    Raises KeyboardInterrupt if somebody stopped it, by Ctrl-C or SIGTERM, so that the sweep ends as well."""
    signals = list[int]()
    with forward_signals(signals.append, [signal.SIGTERM]):
        with (
            repeat_in_background(lambda: look_at_run(run, runs, judged), 2.0)
            if judged
            else nullcontext()
        ):
            code = execute()
    run.refresh(all_iterations=False)
    if code == 128 + signal.SIGINT or (signals and Store(run.url).get(STOPPED) is None):
        raise KeyboardInterrupt


def judge_run(run: Run, runs: Sequence[Run], judged: range) -> bool:
    """Return whether a run is to be stopped early because of its rewards, and if so, write and print why. This is the
    median stopping rule of Google Vizier (Golovin et al., KDD 2017, section 3.2): after k iterations, k in `judged`, a
    run is stopped if its best reward is below the median of the other runs' average rewards in their first k. As in
    Ray Tune, this takes three other runs, which need not have ended. Returns False for a run that is stopping."""
    rewards = {
        each.name: [s.value for s in each.training_rewards() if s.entry.iteration] for each in runs
    }
    k = len(own := rewards.pop(run.name))
    averages = [mean(each[:k]) for each in rewards.values() if k in judged and len(each) >= k]
    below = len(averages) >= 3 and max(own) < median(averages)
    if stop := below and Store(run.url).get(STOPPED) is None:
        why = f"best reward by iteration {k} {max(own):.4g}, median of others' averages {median(averages):.4g}"
        Store(run.url).put(STOPPED, why.encode())
        print(f"{run.name}: is stopped early: {why}", flush=True)
    return stop
