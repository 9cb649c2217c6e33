"""The data of a run that the pages show, as JSON: its current state, its artifacts, and its
weights.

Whoever reads it knows its keys by their names alone: `ui/static/*.js`, `ui/report.py`,
`cli/watch.py` and `cli/live.py`. A key that is added is shown by none of them until they name it,
and no type checker sees the scripts. `kfp/progress.py` makes a `Progress`, too. ``tuneloop status
--json`` has other keys (`cli/inspect.py: _describe_run`).
"""

import math
from collections.abc import Callable
from typing import Any, NotRequired, TypedDict

from tuneloop.cluster.watch import read_status
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonObject
from tuneloop.core.store import Store
from tuneloop.kube.connection import Connection
from tuneloop.runs.alarms import find_alarms
from tuneloop.runs.committed import Entry
from tuneloop.runs.completeness import describe_missing, list_missing
from tuneloop.runs.delivery import list_deliveries
from tuneloop.runs.prepared_data import describe_data
from tuneloop.runs.records import WORKFLOW_FILE, Record
from tuneloop.runs.run_record import Curve, Run
from tuneloop.runs.stages import StageStatus, list_cluster_stages, list_stages
from tuneloop.runs.summary import (
    describe_iterations,
    describe_reward,
    estimate_loop_end,
    find_held_out,
    list_devices,
)
from tuneloop.weights import live
from tuneloop.weights.inspect import list_versions

SPARKLINE_POINTS = 60
"""About so many rewards are drawn as a line that is a hundred pixels wide."""
PROGRAM = ("tuneloop", "python", "image")
"""The entries of a manifest's provenance (`core/provenance.py`) that are listed beside its
packages."""


class Progress(TypedDict):
    """What an executor knows of a run.

    Attributes:
        phase: as `runs/run_record.py: Run.phase`, or a phase of Argo in lower case. One that is new
            needs an entry in `cli/watch.py: CODES` if the run is over, and a colour in
            `ui/static/style.css`.
        message: why, in words; may be empty.
        stages: in the order in which they began.
    """

    phase: str
    message: str
    stages: list[StageStatus]


Ask = Callable[[Run], Progress]
"""Asks another executor than Argo for the progress of a run."""


class RunState(Progress):
    """What `describe_state` returns.

    Attributes:
        data, rows: of the prepared data, its layouts and how many rows, in words.
        committed: how many artifacts there are.
        iteration: the newest; `iterations` has it in words, with the maximum.
        reward, held_out_loss: in words.
        loop_end: when the loop will have ended, Unix seconds; None where it is not known.
        evaluation: the key of the newest one.
        rewards: of iterations, or of evaluations where there are none; thinned out.
    """

    name: str
    record: Record | None
    data: str
    rows: str
    committed: int
    iteration: int
    iterations: str
    reward: str
    held_out_loss: str
    loop_end: float | None
    evaluation: str | None
    rewards: list[float]


class RunDescription(TypedDict):
    """What `describe_run` returns, and the report adds to.

    Attributes:
        failures: task → why it failed.
        templates: the graphs of the workflow, as Argo has them.
        artifacts: each as `_describe_artifact` has it.
        bytes: of all artifacts.
        phases: stage by stage, as `_list_phases` has it.
        note: what is missing, in words.
        medians: stage of the loop → seconds that it takes.
        packages: name and version.
        verdict: of the report alone, whether the run improved.
        left_out: of the report alone, artifacts for which it has no room.
    """

    name: str
    record: Record | None
    url: str
    devices: list[str]
    curves: list[Curve]
    alarms: list[str]
    failures: dict[str, str]
    templates: list[JsonObject]
    artifacts: list[JsonObject]
    bytes: int
    phases: list[JsonObject]
    note: str
    medians: dict[str, float]
    packages: list[tuple[str, str]]
    verdict: NotRequired[str]
    left_out: NotRequired[int]


def describe_state(
    run: Run,
    cluster: Connection | None,
    ask: Ask | None = None,
) -> RunState:
    """Describe the state of a run: its phase, its stages and what each waits for, and its rewards
    for a sparkline.

    The limits of its loop are the parameters ``iterations`` and ``target-reward`` of the workflow,
    which `argo/pipeline.py` names. `cli/live.py`, `cli/inspect.py`, `runs/summary.py` and
    `cluster/watch.py` read the first one by its name, too.

    Args:
        run: the run.
        cluster: the cluster that executes it, if it is not executed here.
        ask: asks another executor, if there is no cluster.
    """
    status: Progress = {
        "phase": run.phase,
        "message": "",
        "stages": list_stages(run),
    }
    limit: int | None = None
    target_reward = math.inf
    state = run.state
    try:
        if state:
            notes = [state.note, state.workflow.message]
            status["message"] = "; ".join(note for note in notes if note)
            parameters = state.workflow.parameters
            limit = int(parameters.get("iterations") or 0) or None
            target_reward = float(parameters.get("target-reward") or math.inf)
        elif cluster:
            report = read_status(cluster, run.name)
            limit = report.iterations
            status = {
                "phase": report.phase.lower(),
                "message": report.message,
                "stages": list_cluster_stages(report.nodes, report.waiting),
            }
        elif ask:
            status = ask(run)
    except UserError as error:
        # Its workflows were deleted, or are on another cluster: what it has committed is shown.
        status["message"] = str(error)
    rewards = [score.value for score in run.training_rewards() or run.evaluations()]
    evaluations = run.with_role("evaluator")
    loop_end: float | None = None
    if status["phase"] == "running":
        loop_end = estimate_loop_end(run, limit, target_reward)
    data = describe_data(run)
    return RunState(
        phase=status["phase"],
        message=status["message"],
        stages=status["stages"],
        data=data["data"],
        rows=data["rows"],
        name=run.name,
        record=run.record,
        committed=len(run.entries),
        iteration=run.iteration,
        iterations=describe_iterations(run, limit),
        reward=describe_reward(run),
        held_out_loss=str(find_held_out(run) or ""),
        loop_end=loop_end,
        evaluation=evaluations[-1].key if evaluations else None,
        rewards=thin_out(rewards),
    )


def thin_out(rewards: list[float]) -> list[float]:
    """Return every so many rewards, about `SPARKLINE_POINTS` of them. The last one stays:
    `cli/watch.py` shows it as the current one.
    """
    step = max(1, len(rewards) // SPARKLINE_POINTS)
    return rewards[(len(rewards) - 1) % step :: step]


def describe_run(run: Run) -> RunDescription:
    """Describe all artifacts of a run, its curves, its alarms, its settings and its workflow."""
    curves = run.curves()
    artifacts = [_describe_artifact(run, entry) for entry in run.entries]
    # A report of what is left is better than none.
    notes: list[str] = []
    missing = list_missing(run)
    if missing:
        notes.append(f"{describe_missing(missing)} in {run.url} is missing; restore it from a copy")
    templates: list[JsonObject] = []
    has_workflow = run.record and (run.directory / WORKFLOW_FILE).is_file()
    workflow = run.read_workflow() if has_workflow else {}
    if workflow:
        templates = [template for template in workflow["spec"]["templates"] if "dag" in template]
    elif run.record:
        notes.append(f"the graph is left out: {run.directory}/{WORKFLOW_FILE} is missing")
    return {
        "name": run.name,
        "record": run.record,
        "url": run.url,
        "devices": list_devices(run.entries),
        "curves": curves,
        "alarms": find_alarms(curves),
        "failures": run.read_failures(),
        "templates": templates,
        "artifacts": artifacts,
        "bytes": sum(artifact["bytes"] for artifact in artifacts),
        "phases": _list_phases(run),
        "note": "; ".join(notes),
        "medians": run.seconds_an_iteration(),
        "packages": _list_packages(run),
    }


def describe_weights(run: Run) -> dict[str, Any]:
    """Describe the published versions of a run, their delivery times, and which replica serves
    which version.
    """
    published = Store(run.weights_url)
    # Who serves is read first: a version that appears meanwhile is then also among the published.
    served = live.list_served_versions(published)
    return {
        "published": list_versions(published),
        "deliveries": list_deliveries(run),
        "served": served,
    }


def _list_phases(run: Run) -> list[JsonObject]:
    """List the stages of a run with the seconds that each worked: in an iteration, and in all."""
    return [
        {
            "stage": stage,
            "points": points,
            "times": len(points),
            "seconds": sum(seconds for _, seconds in points),
        }
        for stage, points in run.phase_seconds().items()
    ]


def _list_packages(run: Run) -> list[tuple[str, str]]:
    """List the packages and versions that the stages ran with, sorted by name."""
    packages: set[tuple[str, str]] = set()
    for entry in run.entries:
        provenance = entry.manifest.provenance
        for name in PROGRAM:
            if name in provenance:
                packages.add((name, str(provenance[name])))
        # A run that was resumed after an update has two versions of a package.
        for name, version in provenance.get("packages", {}).items():
            packages.add((name, str(version)))
    return sorted(packages)


def _describe_artifact(run: Run, entry: Entry) -> JsonObject:
    """Describe an artifact by what its manifest states, measured and notes: the rows of the page
    (`ui/static/run.js`, `ui/static/weights.js`) and of its lineage.

    Of notes and timings only those are shown that are named here. `training/epochs.py` and
    `stages/policy_update.py` write them.
    """
    manifest = entry.manifest
    provenance = manifest.provenance
    inputs: dict[str, str] = {}
    for name, reference in manifest.inputs.items():
        # What lies in another run has no place on this page: its reference is shown.
        source = run.find_entry(reference)
        inputs[name] = source.key if source else reference
    return {
        "key": entry.key,
        "stage": entry.stage,
        "iteration": entry.iteration,
        "started": entry.started,
        "seconds": entry.seconds,
        "role": manifest.role,
        "kind": manifest.kind,
        "digest": manifest.digest,
        "results": manifest.results,
        "device": provenance.get("device"),
        "world_size": provenance.get("world_size"),
        "code": provenance.get("code"),
        "image": provenance.get("image"),
        "efficiency": manifest.notes.get("efficiency"),
        "tokens_per_s": manifest.timings.get("tokens_per_s"),
        "inputs": inputs,
        "version": manifest.facts.get("version", run.find_version(entry)),
        "bytes": sum(file.size for file in manifest.files.values()),
        "model_bytes": entry.model_bytes,
        # In the loop they are the same each time, but for the iteration.
        "params": manifest.params if entry.iteration is None else {},
    }
