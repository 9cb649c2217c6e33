"""Sweeps: a run for each combination of settings. All that is stored of a sweep is in its runs.

Runs are started one by one in the command's process, or submitted to a cluster; their names begin
with the sweep's, by which a second call finds them.
"""

import contextlib
import itertools
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median

from xxhash import xxh32_hexdigest

from tuneloop.cluster.run_workflows import (
    DONE,
    get_workflow_phase,
    list_workflows,
    prepare_workflow,
)
from tuneloop.cluster.submit import check_resubmission, stop_run
from tuneloop.config.loading import Pipeline
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.store import Store
from tuneloop.core.threads import forward_signals, repeat_in_background
from tuneloop.kube.connection import Connection, retry_until_available
from tuneloop.runs.records import check_name
from tuneloop.runs.run_record import Run
from tuneloop.runs.tracking import find_phase
from tuneloop.workflow.manifest import read_parameters

POLL_S = 2.0
"""Seconds between two looks at a run that may be stopped early."""
STOPPED = "stopped"
"""The file below a run's URL that says why it was stopped early. A sweep does not resume a run that
has this file; `tuneloop resume` does not look at it.
"""
ENDED = ("succeeded", STOPPED)
"""The beginnings of the states (`find_state`) of a trial that has ended well."""


@dataclass
class Trial:
    """A run of a sweep.

    Attributes:
        values: key → value, as they are written in ``--over``.
        sets: all assignments of the run, as ``--set`` takes them.
        workflow: as it is rendered.
        judged: the iterations after which the run is compared with the others; empty: never.
        run: what it has committed.
        state: as `find_state` returns it; empty before the sweep has run.
        reward: its newest mean reward, and how that was measured.
    """

    values: dict[str, str]
    sets: list[str]
    workflow: JsonMapping
    judged: range
    run: Run
    state: str = ""
    reward: float = -math.inf
    method: str = ""

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def has_ended_well(self) -> bool:
        """Whether it has succeeded, or was stopped early."""
        return self.state.startswith(ENDED)


@dataclass
class Sweep:
    """The trials of a sweep, in the order of the values in ``--over``."""

    store: str
    trials: list[Trial] = field(default_factory=list)

    @classmethod
    def plan(
        cls,
        pipeline: Pipeline,
        name: str,
        over: Sequence[str],
        *,
        store: str,
        config: Sequence[Path] | None = None,
        sets: Sequence[str] = (),
        judge_from: int | None = None,
    ) -> "Sweep":
        """Plan a run for each combination; nothing is started, and the store is not read.

        Args:
            pipeline: of all runs.
            name: of the sweep, with which the names of its runs begin.
            over: items ``KEY=V1,V2``.
            store: of all runs.
            config: the files with the settings that the runs have in common.
            sets: assignments that the runs have in common.
            judge_from: the first iteration after which a run may be stopped early; None: none is.

        Raises:
            UserError: a setting is wrong, or `judge_from` is given for a pipeline without a loop.
        """
        combinations = list_combinations(name, over)
        # A pipeline that draws its graph itself, with hera, says nothing of loops.
        if judge_from and getattr(pipeline.module.build_argo, "loop", None) is None:
            raise UserError(
                "--stop-below-median",
                judge_from,
                f"{pipeline.name} has no loop; leave it out",
            )
        sweep = cls(store)
        for run_name, values in combinations.items():
            own_sets = [f"{key}={value}" for key, value in values.items()]
            all_sets = list(sets) + own_sets
            workflow = pipeline.build(pipeline.configure(config, all_sets, store))
            # The iteration after the last one needs no decision: the loop is over.
            end = _read_iterations(workflow) if judge_from else 0
            judged = range(judge_from or 0, end)
            trial = Trial(values, all_sets, workflow, judged, Run(run_name, store))
            sweep.trials.append(trial)
        return sweep

    def run(self, start: Callable[[Trial], int], cluster: Connection | None = None) -> None:
        """Run all trials that have not ended well, and read the state and the reward of each.

        On this machine they follow one another; on a cluster all start at once.

        Args:
            start: executes a trial on this machine, or submits it to the cluster; returns the exit
                code.
            cluster: where the runs are executed; None: in this process.

        Raises:
            UserError: a run of the cluster does not fit its trial; none was started then.
            KeyboardInterrupt: somebody stopped a run of this machine.
        """
        runs = [trial.run for trial in self.trials]
        if cluster:
            for trial in self.trials:
                self._check_workflow(trial, cluster)
        for trial in self.trials:
            state = find_state(trial.run, cluster)
            if cluster:
                if not state.startswith(("running", *ENDED)):
                    start(trial)
            elif not state.startswith(STOPPED):
                # A run that has succeeded, too: its name must stand for the same settings.
                execute_run(trial.run, runs, partial(start, trial), trial.judged)
        running = list(self.trials) if cluster else []
        while running:
            running = [
                trial for trial in running if look_at_run(trial.run, runs, trial.judged, cluster)
            ]
            if running:
                time.sleep(POLL_S)
        for trial in self.trials:
            trial.state = find_state(trial.run, cluster)
            latest = trial.run.latest_reward()
            if latest:
                trial.reward = latest.value
                trial.method = latest.method

    def ranking(self) -> list[Trial]:
        """Return the trials: those that succeeded before others, then by their rewards."""

        def get_rank(trial: Trial) -> tuple[bool, float]:
            return trial.state == "succeeded", trial.reward

        return sorted(self.trials, key=get_rank, reverse=True)

    def _check_workflow(self, trial: Trial, cluster: Connection) -> None:
        """Refuse a trial whose name stands for other settings on the cluster."""
        workflow = prepare_workflow(trial.workflow, run=trial.name, store=self.store)
        check_resubmission(workflow, list_workflows(cluster, trial.name), trial.name)


def _read_iterations(workflow: JsonMapping) -> int:
    """Return the number of iterations of a rendered workflow; 0 if it has no such parameter."""
    return int(read_parameters(workflow["spec"]).get("iterations", 0))


def list_combinations(name: str, over: Sequence[str]) -> dict[str, dict[str, str]]:
    """Return run → key → value for each combination of the values in `over`.

    The name of a run ends with a digest of its combination, so a sweep that is given more values
    keeps the runs that it has.

    Args:
        name: the name of the sweep, with which the names of its runs begin.
        over: items ``KEY=V1,V2``.

    Raises:
        UserError: an item is written otherwise, or a key is there twice.
    """
    # The digest has eight digits.
    check_name(f"{name}-{'0' * 8}", "--name")
    values_by_key: dict[str, list[str]] = {}
    for item in over:
        key, _, text = item.partition("=")
        values = text.split(",")
        if not key or not all(values) or key in values_by_key:
            raise UserError(
                "--over",
                f"{key}={text}",
                "write KEY=V1,V2, and each key once",
            )
        values_by_key[key] = values
    combinations: dict[str, dict[str, str]] = {}
    for values_of_run in itertools.product(*values_by_key.values()):
        combination = dict(zip(values_by_key, values_of_run))
        # The order of the keys makes no other run.
        identity = repr(sorted(combination.items()))
        digest = xxh32_hexdigest(identity.encode())
        run_name = f"{name}-{digest}"
        combinations[run_name] = combination
    return combinations


def find_state(run: Run, cluster: Connection | None = None) -> str:
    """Read what a run has committed, and return its phase, in the words of `Run.phase`.

    Of a run that was stopped early it is ``stopped``, and why.
    """
    phase = run.phase
    if cluster:
        phase = _find_cluster_phase(run, cluster)
    run.refresh(all_iterations=False)
    if phase in ("running", "succeeded"):
        return phase
    reason = Store(run.url).get(STOPPED)
    if not reason:
        return phase
    return f"{STOPPED}: {reason.decode()}"


def _find_cluster_phase(run: Run, cluster: Connection) -> str:
    """Return the phase of a run by its newest workflow."""
    workflows = list_workflows(cluster, run.name)
    if workflows:
        phase = get_workflow_phase(workflows[-1])
        return phase.lower() if phase in DONE else "running"
    # Some time after a run has ended, its workflows are deleted.
    return "succeeded" if find_phase(run) == "succeeded" else "created"


def look_at_run(
    run: Run,
    runs: Sequence[Run],
    judged: range,
    cluster: Connection | None = None,
) -> bool:
    """Return whether a run is running; after the iterations in `judged` stop it, if it is worse.

    `judge_run` decides by the other `runs`. Without a cluster this process executes the run.
    """
    state = retry_until_available(partial(find_state, run, cluster))
    is_running = state == "running"
    if is_running and judged and judge_run(run, runs, judged):
        if cluster:
            retry_until_available(partial(stop_run, cluster, run.name))
        else:
            # As a user would stop it: its stages commit what a resume needs.
            os.kill(os.getpid(), signal.SIGTERM)
    return is_running


def execute_run(run: Run, runs: Sequence[Run], execute: Callable[[], int], judged: range) -> None:
    """Call `execute`, which executes a run in this process.

    With `judged`, look at the run every `POLL_S` seconds meanwhile.

    Raises:
        KeyboardInterrupt: somebody stopped it, by Ctrl-C or SIGTERM, so that the sweep ends, too.
    """
    signals: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(forward_signals(signals.append, [signal.SIGTERM]))
        if judged:

            def look() -> None:
                look_at_run(run, runs, judged)

            stack.enter_context(repeat_in_background(look, POLL_S))
        code = execute()
    run.refresh(all_iterations=False)
    # A run that this sweep stopped itself got a SIGTERM, too.
    reason = Store(run.url).get(STOPPED)
    was_stopped_by_user = bool(signals) and reason is None
    if code == 128 + signal.SIGINT or was_stopped_by_user:
        raise KeyboardInterrupt


def judge_run(run: Run, runs: Sequence[Run], judged: range) -> bool:
    """Return whether a run is to be stopped early by its rewards; if so, write and print why.

    This is the median stopping rule of Google Vizier (Golovin et al., KDD 2017, section 3.2): after
    k iterations, k in `judged`, a run is stopped if its best reward is below the median of the
    other runs' average rewards in their first k. As in Ray Tune, this takes three other runs, which
    need not have ended. The answer is False for a run that is stopping.
    """
    rewards = _read_rewards(run)
    k = len(rewards)
    if k not in judged:
        return False
    averages: list[float] = []
    for other in runs:
        if other.name == run.name:
            continue
        other_rewards = _read_rewards(other)
        if len(other_rewards) < k:
            continue
        first_rewards = other_rewards[:k]
        averages.append(mean(first_rewards))
    if len(averages) < 3:
        return False
    best = max(rewards)
    limit = median(averages)
    # One file in the store says it to this sweep, and to every later one.
    store = Store(run.url)
    # The file is there once a run is stopping.
    if best >= limit or store.get(STOPPED) is not None:
        return False
    reason = f"best reward by iteration {k} {best:.4g}, median of others' averages {limit:.4g}"
    text = reason.encode()
    store.put(STOPPED, text)
    print(f"{run.name}: is stopped early: {reason}", flush=True)
    return True


def _read_rewards(run: Run) -> list[float]:
    """Return the training rewards of a run, iteration by iteration."""
    rewards: list[float] = []
    for reward in run.training_rewards():
        if reward.entry.iteration:
            rewards.append(reward.value)
    return rewards
