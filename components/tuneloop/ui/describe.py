"""The data of a run that the pages show, as JSON: its current state, its artifacts, and its weights."""

from collections.abc import Callable
from typing import Any

from tuneloop.cluster.watch import read_status
from tuneloop.core.errors import UserError
from tuneloop.core.store import Store
from tuneloop.kube.connection import Connection
from tuneloop.runs.alarms import find_alarms
from tuneloop.runs.completeness import describe_missing, list_missing
from tuneloop.runs.delivery import list_deliveries
from tuneloop.runs.run_record import Entry, Run
from tuneloop.runs.stages import list_cluster_stages, list_stages
from tuneloop.runs.summary import estimate_loop_end, iterations_line, list_devices, reward_line
from tuneloop.weights import live
from tuneloop.weights.inspect import list_versions

Ask = Callable[[Run], dict[str, Any]]
"""Asks another executor than Argo for the state of a run: its ``phase``, ``message`` and ``stages``."""


def describe_state(run: Run, cluster: Connection | None, ask: Ask | None = None) -> dict[str, Any]:
    """Describe the state of a run: its phase, its stages and what each waits for, and its rewards for a sparkline."""
    state, stands = run.state, dict[str, Any](phase=run.phase, message="", stages=list_stages(run))
    asked = state.workflow.parameters.get("iterations") if state else None
    most = int(asked) if asked else None
    if state:
        stands["message"] = "; ".join(filter(None, [state.note, state.workflow.message]))
    else:
        try:
            if cluster:
                seen = read_status(cluster, run.name)
                stages = list_cluster_stages(seen.nodes, seen.waiting)
                stands = {"phase": seen.phase.lower(), "message": seen.message, "stages": stages}
                most = seen.iterations
            elif ask:
                stands = ask(run)
        except UserError as error:  # its workflows are deleted by now, or are on another cluster
            stands["message"] = str(error)
    rewards = [score.value for score in run.training_rewards() or run.evaluations()]
    return {
        **{
            "name": run.name,
            "record": run.record,
            "committed": len(run.entries),
            "iteration": run.iteration,
        },
        **{"iterations": iterations_line(run, most), "reward": reward_line(run)},
        "loop_end": estimate_loop_end(run, most) if stands["phase"] == "running" else None,
        "evaluation": next((e.key for e in reversed(run.with_role("evaluator"))), None),
        **{
            "rewards": rewards[:: max(1, len(rewards) // 60)],
            **stands,
        },  # about 60, for a line a hundred pixels wide
    }


def describe_run(run: Run) -> dict[str, Any]:
    """Describe all artifacts of a run, its curves, its alarms, its settings and its workflow."""
    curves = run.curves()
    workflow: dict[str, Any] = {}
    notes: list[str] = []
    missing = list_missing(run)
    if missing:
        notes.append(f"{describe_missing(missing)} in {run.url} is missing; restore it from a copy")
    if run.record and (run.directory / "workflow.yaml").is_file():
        workflow = run.read_workflow()
    elif run.record:
        notes.append(f"the graph is left out: {run.directory}/workflow.yaml is missing")
    phases, artifacts = (
        run.phase_seconds().items(),
        [_describe_artifact(run, entry) for entry in run.entries],
    )
    return {
        **{
            "name": run.name,
            "record": run.record,
            "url": run.url,
            "devices": list_devices(run.entries),
        },
        **{"curves": curves, "alarms": find_alarms(curves), "failures": run.read_failures()},
        "templates": [each for each in workflow["spec"]["templates"] if "dag" in each]
        if workflow
        else [],
        **{"artifacts": artifacts, "bytes": sum(each["bytes"] for each in artifacts)},
        "phases": [
            {"stage": k, "points": p, "times": len(p), "seconds": sum(s for _, s in p)}
            for k, p in phases
        ],
        "note": "; ".join(notes),
        "medians": run.seconds_an_iteration(),
        "packages": _list_packages(run),
    }


def describe_weights(run: Run) -> dict[str, Any]:
    """Describe the published versions of a run, their delivery times, and which replica serves which version."""
    published = Store(run.weights_url)
    served = live.list_served_versions(published)
    return {
        "published": list_versions(published),
        "deliveries": list_deliveries(run),
        "served": served,
    }


def _list_packages(run: Run) -> list[tuple[str, str]]:
    """List the packages and versions that the stages ran with."""
    own, found = ("tuneloop", "python", "image"), set[tuple[str, str]]()
    for about in (entry.manifest.provenance for entry in run.entries):
        found.update((name, str(about.get(name))) for name in own)
        found.update((name, str(version)) for name, version in about.get("packages", {}).items())
    return sorted(found)


def _describe_artifact(run: Run, entry: Entry) -> dict[str, Any]:
    made = entry.manifest
    return {
        **{
            name: getattr(entry, name)
            for name in ("key", "stage", "iteration", "started", "seconds")
        },
        **{name: getattr(made, name) for name in ("role", "kind", "digest", "results")},
        **{name: made.provenance.get(name) for name in ("device", "world_size", "code", "image")},
        **{
            "efficiency": made.notes.get("efficiency"),
            "tokens_per_s": made.timings.get("tokens_per_s"),
        },
        "inputs": {
            name: maker.key if (maker := run.maker(ref)) else ref
            for name, ref in made.inputs.items()
        },
        "version": made.facts.get("version", run.version_of(entry)),
        "bytes": sum(file.size for file in made.files.values()),
        "model_bytes": sum(
            file.size for name, file in made.files.items() if name.startswith("model/")
        ),
        "params": made.params if entry.iteration is None else {},
    }
