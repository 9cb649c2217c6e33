"""What a recorded run took, stage by stage: what a plan of other ways to run it rests on.

A stage holds its device as long as its pod lives. So its seconds are its pod's, where the run's state is here (a run
on this machine), else from when it began to work until it committed. What lies between the end of what it waits for and
that is its lead: the median over the iterations, lest the pause of a run that was resumed counts.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import import_module
from itertools import pairwise

from tuneloop.argo.claims import role_of
from tuneloop.argo.state import Node
from tuneloop.component import Component
from tuneloop.errors import UserError
from tuneloop.runs import Entry, Run
from tuneloop.sharing.plans import in_turn, overlapped
from tuneloop.sharing.simulate import LAST, Task


@cache
def role(stage: str) -> str:
    """The device that a stage (``policy_update``) uses: ``trainer``, ``sampler``, or empty."""
    try:
        found = getattr(import_module(f"tuneloop.{stage}"), stage, None)
    except ImportError:
        found = None
    if not isinstance(found, Component):  # a third party's: on CPU, as far as is known here
        return ""
    return role_of(found.image) if found.accelerator else ""


def recorded(run: Run) -> list[Task]:
    """The stages of each whole iteration of `run`, in the order of the loop, as `tuneloop.sharing.plans` takes them.

    Raises:
        UserError: it has fewer than two of them, or its times are not those of a run with devices of its own.
    """
    config = run.record.config if run.record else {}
    if (config.get("loop") or {}).get("iterations_per_pod"):
        raise UserError("--measured", run.name, "ran its stages in one pod: record one with loop.iterations_per_pod=0")
    if (config.get("cluster") or {}).get("share"):
        raise UserError("--measured", run.name, "waited for turns itself: record one without cluster.share")
    found: dict[int, list[Entry]] = {}
    for entry in run.entries:  # by their starts
        if entry.iteration:
            found.setdefault(entry.iteration, []).append(entry)
    whole = [part for _, part in sorted(found.items()) if LAST in (entry.stage for entry in part)]
    if len(whole) < 2:
        raise UserError("--measured", run.name, f"has {len(whole)} whole iterations: two are the least to plan with")
    pods = [node for node in (run.state.nodes.values() if run.state else ()) if node.type == "Pod"]
    tasks, held = [], {}
    for entry in (entry for part in whole for entry in part):
        start, end = held[entry.stage, entry.iteration] = _held(entry, pods)
        tasks.append(Task(entry.stage, entry.iteration or 0, end - start, role(entry.manifest.stage)))
    leads: dict[str, list[float]] = {}
    ordered = _as_it_ran(tasks, held)
    for task in ordered:
        ends = [held[ordered[index].stage, ordered[index].iteration][1] for index in task.after]
        if ends:
            leads.setdefault(task.stage, []).append(max(0.0, held[task.stage, task.iteration][0] - max(ends)))
    return [dataclasses.replace(task, lead=statistics.median(leads.get(task.stage, [0.0]))) for task in tasks]


def _as_it_ran(tasks: list[Task], held: Mapping[tuple[str, int | None], tuple[float, float]]) -> list[Task]:
    """`tasks` with what each waited for: the loop overlapped if a batch was begun before the last update had ended."""
    first = {task.iteration: held[task.stage, task.iteration][0] for task in reversed(tasks)}
    ends = {iteration: held[LAST, iteration][1] for iteration in sorted(first)}
    ahead = any(first[following] < ends[iteration] for iteration, following in pairwise(ends))
    return overlapped(tasks) if ahead else in_turn(tasks)


def _held(entry: Entry, pods: Iterable[Node]) -> tuple[float, float]:
    """From when until when a stage had its device, Unix seconds."""
    for pod in pods:
        if pod.template == entry.stage and pod.started <= entry.started and entry.finished <= pod.finished:
            return pod.started, pod.finished
    return entry.started, entry.finished
