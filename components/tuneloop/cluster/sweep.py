"""Sweeps: a run for each combination of settings. All that is stored of a sweep is in its runs."""

import contextlib
import itertools
import os
import signal
from collections.abc import Callable, Sequence
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

    With `judged`, look at the run every two seconds meanwhile.

    Raises:
        KeyboardInterrupt: somebody stopped it, by Ctrl-C or SIGTERM, so that the sweep ends, too.
    """
    signals: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(forward_signals(signals.append, [signal.SIGTERM]))
        if judged:

            def look() -> None:
                look_at_run(run, runs, judged)

            stack.enter_context(repeat_in_background(look, 2.0))
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
