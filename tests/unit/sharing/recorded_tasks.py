"""Read what a recorded run took, stage by stage, to plan other ways to run it.

A stage holds its device as long as its pod lives. So its seconds are its pod's where the run was on this machine, else
those from the beginning of its work to its commit. Its lead is the time from the end of what it waits for to its own
beginning: the median over the iterations, so that the pause before a resume does not count."""

import dataclasses
import statistics
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

from tests.unit.sharing.lease_plans import in_turn, overlap_tasks
from tests.unit.sharing.lease_simulation import Task
from tuneloop.core.component import Component, find_component
from tuneloop.core.errors import UserError
from tuneloop.extensions.sharing.claims import role_of
from tuneloop.local.journal import Node
from tuneloop.runs.committed import Entry
from tuneloop.runs.run_record import Run
from tuneloop.workflow.plan import read_plan


def find_device(stage: Component | None) -> str:
    """Return the device that a stage uses: ``trainer``, ``sampler``, or empty."""
    return role_of(stage.image) if stage and stage.accelerator else ""


def read_recorded_tasks(run: Run) -> list[Task]:
    """Read the stages of each whole iteration of `run`, in loop order, as `lease_plans` takes them. Raises
    UserError where it has fewer than two of them, or its times are not those of a run with devices of its own."""
    pods = _pods(run)
    tasks, held = [], {}
    for entry in _of_whole_iterations(run):
        start, end = held[entry.stage, entry.iteration] = _held(entry, pods.get(entry.stage, []))
        made = entry.manifest
        device = find_device(
            find_component(f"tuneloop.stages.{made.stage}")
        )  # of a third party's, none is known here
        tasks.append(Task(entry.stage, entry.iteration or 0, end - start, device, role=made.role))
    leads: dict[str, list[float]] = {}
    first = {task.iteration: held[task.stage, task.iteration][0] for task in reversed(tasks)}
    updated = {
        task.iteration: held[task.stage, task.iteration][1]
        for task in tasks
        if task.role == "trainer"
    }
    # The loop overlapped if a batch began before the last update ended.
    ahead = any(first[following] < updated[iteration] for iteration, following in pairwise(updated))
    ordered = overlap_tasks(tasks) if ahead else in_turn(tasks)
    for task in ordered:
        ends = [held[ordered[index].stage, ordered[index].iteration][1] for index in task.after]
        if ends:
            leads.setdefault(task.stage, []).append(
                max(0.0, held[task.stage, task.iteration][0] - max(ends))
            )
    return [
        dataclasses.replace(task, lead=statistics.median(leads.get(task.stage, [0.0])))
        for task in tasks
    ]


def _of_whole_iterations(run: Run) -> list[Entry]:
    """List what the loop committed, by iteration and start."""
    config = run.record.config if run.record else {}
    loop = read_plan(run.read_workflow()).loop if run.record else None
    if loop and loop.pod:
        raise UserError(
            "--measured",
            run.name,
            "ran its stages in one pod: record one with loop.iterations_per_pod=0",
        )
    if (config.get("cluster") or {}).get("share"):
        raise UserError(
            "--measured", run.name, "waited for turns itself: record one without cluster.share"
        )
    whole = {entry.iteration for entry in run.with_role("trainer") if entry.iteration}
    if len(whole) < 2:
        raise UserError(
            "--measured",
            run.name,
            f"has {len(whole)} whole iterations: two are the least to plan with",
        )
    return sorted(
        (e for e in run.entries if e.iteration in whole),
        key=lambda e: (e.iteration or 0, e.started),
    )


def _pods(run: Run) -> dict[str, list[Node]]:
    """Return template → its pods, by their starts; empty where the run's state is elsewhere."""
    found: dict[str, list[Node]] = {}
    for node in sorted(
        run.state.nodes.values() if run.state else (), key=lambda node: node.started
    ):
        if node.type == "Pod":
            found.setdefault(node.template, []).append(node)
    return found


def _held(entry: Entry, pods: Sequence[Node]) -> tuple[float, float]:
    """Return from when until when a stage had its device, Unix seconds; `pods` are its template's, by their starts."""
    at = bisect_right(pods, entry.started, key=lambda pod: pod.started) - 1
    if at >= 0 and entry.finished <= pods[at].finished:
        return pods[at].started, pods[at].finished
    return entry.started, entry.finished
