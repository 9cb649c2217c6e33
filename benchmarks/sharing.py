"""Sharing devices by leases: what the simulation predicts beside what is measured, in the same run.

    python benchmarks/sharing.py [--iterations 8] [--runs 2] [--seconds 3] [--unit 0.5]

First three runs whose stages only wait take real leases, by each policy: does the simulation have the rules right? Then
real runs. One of the demo's loop is recorded, alone; from it the simulation predicts; then each plan is
carried out as `tuneloop run` does it: the same again, overlapped, several at once by leases. One thread a process: one
core samples, one trains. The engine is `transformers`. The reward takes `--seconds` an iteration and no core: it
sleeps, as one does that asks a judge elsewhere; a device that waits for it is what sharing puts to use. A step is the
median from the end of one update to that of the next, while all runs were in their loops; gain is in steps an hour,
against the runs one after another.

Other work on the machine shows: the row `alone` says how far a run agrees with itself.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from algorithms import run

sys.path.insert(0, str(Path(__file__).parents[1]))

if TYPE_CHECKING:
    from tests.unit.sharing.lease_simulation import Schedule, Task
    from tuneloop.core.artifacts import Role

COMPLETIONS = 16 * 8
PAUSE = "SHARING_PAUSE"
PATIENCE = 30.0
WAITING = {"a": (1, 1, 3), "b": (1, 5, 1), "c": (1, 2, 2)}
"""Run → units of its rollout, reward and update: three that least recently served suits."""


def score(completion: str, answer: str, metadata: dict[str, Any]) -> float:
    """The reward: it takes its time."""
    time.sleep(float(os.environ[PAUSE]))
    return float(completion.strip() == answer)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=8)
    parser.add_argument("--runs", type=int, default=2, help="that take turns")
    parser.add_argument("--seconds", type=float, default=3.0, help="of the reward, each iteration")
    parser.add_argument(
        "--unit",
        type=float,
        default=0.5,
        help="seconds of stages that only wait; 0: leave them out",
    )
    flags = parser.parse_args()
    os.environ |= {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        PAUSE: str(flags.seconds / COMPLETIONS),
    }
    os.environ["PYTHONPATH"] = os.pathsep.join(
        (str(Path(__file__).parent), os.environ.get("PYTHONPATH", ""))
    )
    with tempfile.TemporaryDirectory() as work:
        if flags.unit:
            stages_that_wait(Path(work), flags.unit)
        if flags.iterations:
            real_runs(Path(work), flags.iterations, flags.runs)


def stages_that_wait(store: Path, unit: float) -> None:
    """Seconds until three runs of three iterations have ended, by each policy."""
    from tests.unit.sharing.lease_plans import GROUP, in_turn
    from tests.unit.sharing.lease_simulation import Rules, Task, simulate_runs
    from tuneloop.sharing.lease_queue import POLICIES
    from tuneloop.sharing.lease_storage import open_lease_group
    from tuneloop.sharing.leases import compute_poll_interval

    loop: tuple[tuple[str, str, Role], ...] = (
        ("rollout", "sampler", "sampler"),
        ("reward", "", "scorer"),
        ("policy-update", "trainer", "trainer"),
    )
    runs = {}
    for late, (name, units) in enumerate(
        WAITING.items()
    ):  # they do not come all at once: who is first is known
        tasks = [
            Task(stage, i, x * unit, on, role=role)
            for i in (1, 2, 3)
            for x, (stage, on, role) in zip(units, loop)
        ]
        runs[name] = in_turn([replace(tasks[0], lead=late * unit / 4), *tasks[1:]])
    print(f"{'stages that wait':<16} {'predicted':>9} {'measured':>9} {'error':>6}")
    for policy in POLICIES:
        predicted = simulate_runs(
            runs, Rules(GROUP, policy, handover=compute_poll_interval(1.0) / 2)
        ).total
        began = time.monotonic()
        with ThreadPoolExecutor(len(runs)) as pool:
            for done in [
                pool.submit(
                    wait_through,
                    tasks,
                    open_lease_group(f"{store}/{policy}", who=name, policy=policy, patience=1.0),
                )
                for name, tasks in runs.items()
            ]:
                done.result()
        measured = time.monotonic() - began
        print(
            f"{policy:<16} {predicted:>9.2f} {measured:>9.2f} {predicted / measured - 1:>6.0%}",
            flush=True,
        )


def wait_through(tasks: Sequence[Task], turns: Any) -> None:
    """A run whose stages do nothing but hold their turns."""
    for task in tasks:
        time.sleep(task.lead)
        if task.device:
            with turns.acquire():
                time.sleep(task.seconds)
        else:
            time.sleep(task.seconds)


def real_runs(store: Path, iterations: int, runs: int) -> None:
    """Seconds a step of each plan."""
    from tests.unit.sharing.lease_plans import ALONE, GROUP, OVERLAPPED, SHARED, compare_plans
    from tests.unit.sharing.lease_simulation import Rules
    from tests.unit.sharing.recorded_tasks import read_recorded_tasks
    from tuneloop.runs.run_record import Run
    from tuneloop.sharing.lease_queue import POLICIES
    from tuneloop.sharing.leases import compute_poll_interval

    settings: dict[str, object] = {
        **{"engine.kind": "transformers", "loop.iterations": iterations, "loop.target_reward": 2},
        **{
            "rollout.prompts_per_iteration": 16,
            "rollout.n": 8,
            "rollout.max_tokens": 24,
            "evaluate.limit": 16,
        },
        **{"reward.reward_weights": "{'sharing:score': 1.0}", "reward.timeout_s": 60},
        **{"data.train": 512, "data.eval": 32, "data.sft": 32},
    }
    group: dict[str, object] = {"cluster.share.group": "bench", "cluster.share.patience": PATIENCE}
    plans: dict[str, list[dict[str, object]]] = {
        ALONE: [{}],
        OVERLAPPED: [{"loop.asynchronous": True}],
    }
    plans |= {
        name: [{**group, "cluster.share.policy": policy}] * runs
        for name, policy in zip(SHARED, POLICIES)
    }
    one = functools.partial(run, store, "grpo")
    one("recorded", settings)
    recorded = read_recorded_tasks(Run.open("recorded", str(store)))
    tasks = {f"recorded {number}": recorded for number in range(runs)}
    predicted = compare_plans(
        tasks,
        {"trainer": 1, "sampler": 1},
        False,
        Rules(GROUP, handover=compute_poll_interval(PATIENCE) / 2),
    )
    alone = None
    print(
        f"\n{'plan':<16} {'predicted':>9} {'measured':>9} {'error':>6}  {'gain predicted':>14} {'measured':>9}"
    )
    for plan, each in plans.items():
        names = [f"{plan}-{number}" for number in range(len(each))]
        with ThreadPoolExecutor(len(each)) as pool:
            list(pool.map(lambda name, more: one(name, settings | more), names, each))
        step = (
            median_step(simulated(predicted[plan].schedules[0])),
            median_step(measured(store, names)),
        )
        alone = alone or step
        gain = [len(each) * before / after for before, after in zip(alone, step)]
        row = f"{plan:<16} {step[0]:>9.2f} {step[1]:>9.2f} {step[0] / step[1] - 1:>6.0%}"
        print(f"{row}  {gain[0]:>14.2f} {gain[1]:>9.2f}", flush=True)


def simulated(schedule: Schedule) -> list[tuple[float, list[float]]]:
    """Of each run of a schedule: when its loop begins, and when its updates end."""
    names = dict.fromkeys(span.run for span in schedule.spans)
    ends = {
        name: [s.ended for s in schedule.spans if (s.run, s.task.role) == (name, "trainer")]
        for name in names
    }
    return [(0.0, each) for each in ends.values()]


def measured(store: Path, names: Sequence[str]) -> list[tuple[float, list[float]]]:
    """As `simulated`, of runs that were carried out."""
    from tuneloop.runs.run_record import Run

    found = [Run.open(name, str(store)) for name in names]
    return [
        (
            run.with_role("sampler")[0].started,
            [entry.finished for entry in run.with_role("trainer") if entry.iteration],
        )
        for run in found
    ]


def median_step(runs: Sequence[tuple[float, list[float]]]) -> float:
    """Seconds from the end of one update to that of the next, while all were in their loops."""
    since, until = max(begun for begun, _ in runs), min(ends[-1] for _, ends in runs)
    inside = [b - a for _, ends in runs for a, b in pairwise(ends) if since <= a and b <= until]
    return statistics.median(inside)


if __name__ == "__main__":
    main()
