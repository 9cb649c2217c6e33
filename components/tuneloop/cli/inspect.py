"""Commands that read runs: they work during a run, after it, and from another machine with ``--store``."""

import json
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuneloop.cli.arguments import CONTEXT, FOLLOW, JSON, RUN, STAGE, STORE
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import Corrupt, Retryable, UserError

if TYPE_CHECKING:
    from tuneloop.local.journal import Node
    from tuneloop.runs.run_record import Run, Score

UNREAD = ("damaged", "unreachable")
"""The phases that the list shows for a run that could not be read."""


def show_status(
    name: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="The run's name; default: list all.")
    ] = None,
    store: STORE = "runs",
    as_json: JSON = False,
) -> None:
    """Show the stages of a run, or all runs. With its iteration and its reward so far."""
    from tuneloop.cli.show import format_store_option, show_stages
    from tuneloop.runs.completeness import describe_missing, list_missing
    from tuneloop.runs.stages import list_stages
    from tuneloop.runs.summary import describe_iterations, describe_reward, format_facts

    if name is None:
        return _list_runs(store, as_json)
    run = open_run(name, store)
    if as_json:
        return print_json(_told(run))
    pipeline = run.record.pipeline if run.record else "pipeline unknown"
    again = f"tuneloop resume {name}{format_store_option(store)}"
    hint = {"interrupted": f"; {again}", "failed": f"; {_why(run)}; {again}"}
    typer.echo(f"{name}  {pipeline}  {run.phase}{hint.get(run.phase, '')}")
    facts = {
        "store": run.url,
        "iterations": describe_iterations(run),
        "mean reward": describe_reward(run),
    }
    if (latest := run.latest_reward()) and latest.entry.manifest.role == "scorer":
        facts["newest batch"] = (
            f"{latest.value:.3f} ({latest.method}, iteration {latest.entry.iteration})"
        )
    missing = list_missing(run)
    if missing:
        facts["missing"] = f"{describe_missing(missing)}; restore it from a copy"
    typer.echo(format_facts(facts))
    show_stages(list_stages(run))


def show_logs(
    name: RUN, stage: STAGE = None, follow: FOLLOW = False, store: STORE = "runs"
) -> None:
    """Print the logs of the stages. Each line begins with its stage and iteration."""
    from tuneloop.runs.stages import get_stage_name

    run = open_run(name, store)
    if run.state is None:
        raise UserError("run", name, "has no logs here: no stage was run on this machine")
    seen: dict[str, int] = {}
    while True:
        running = (
            run.phase == "running"
        )  # checked first: lines that are written meanwhile get another round
        pods = [node for node in run.state.nodes.values() if node.type == "Pod" and node.log]
        chosen = [
            n for n in pods if stage is None or stage in (get_stage_name(n), n.display_name, n.id)
        ]
        if not chosen and stage and not (follow and running):
            known = ", ".join(dict.fromkeys(get_stage_name(node) for node in pods))
            inside = "; the loop's stages run in `iterations` here" if "iterations" in known else ""
            raise UserError(
                "stage", stage, f"has no log of its own; those that have: {known}{inside}"
            )
        for node in chosen:
            _print_log(run, node, seen, prefix=stage is None or len(pods) > 1)
        if not (follow and running):
            return
        time.sleep(0.2)


def report_run(
    name: RUN,
    store: STORE = "runs",
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Default: report.html beside the run's state."),
    ] = None,
) -> None:
    """Write the live page into one file, readable offline. Graph, curves, samples, the origin of every version."""
    from tuneloop.cli.show import write_report

    typer.echo(write_report(open_run(name, store), output))


def track_run(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]", help="Default, with --follow: all of the store, also future ones."
        ),
    ] = None,
    trackers: Annotated[
        list[str] | None, typer.Argument(help="NAME or NAME+ADDRESS; see docs/tracking.md.")
    ] = None,
    store: STORE = "runs",
    follow: FOLLOW = False,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Of runs on Argo.")
    ] = None,
    context: CONTEXT = None,
) -> None:
    """Mirror a run into MLflow, TensorBoard, Trackio or W&B. Default: those in TUNELOOP_TRACKERS; repeat to update."""
    from tuneloop.cluster.run_workflows import get_workflow_phase, list_workflows
    from tuneloop.kube.connection import connect_to_cluster
    from tuneloop.runs.tracking import POLL_S, find_phase, list_trackers, mirror_run, mirror_store
    from tuneloop.trackers import find_tracker
    from tuneloop.ui.report import render_page

    chosen, pause = trackers or list_trackers() or ["mlflow"], threading.Event()
    for each in chosen:
        find_tracker(each)
    cluster = connect_to_cluster(namespace, context) if namespace else None

    def ask(run: str) -> str:
        try:
            found = list_workflows(cluster, run) if cluster else []
        except (
            UserError,
            Retryable,
        ) as error:  # mirror commits even while the cluster is unavailable
            typer.echo(f"{run}: {error}", err=True)
            return ""
        phase = (
            get_workflow_phase(max(found, key=lambda w: w["metadata"]["creationTimestamp"]))
            if found
            else ""
        )
        return {"Pending": "running", "Error": "failed"}.get(phase, phase.lower())

    if name is None:
        if not follow:
            raise UserError("RUN", name, "name one, or let it --follow all runs of the store")
        return mirror_store(store, chosen, lambda: not pause.wait(POLL_S), render_page, ask)
    run = open_run(name, store)
    for each in chosen:
        going_on = lambda: follow and not pause.wait(POLL_S) and find_phase(run, ask) == "running"  # noqa: E731
        typer.echo(mirror_run(run, each, going_on, render_page, ask))


def open_run(name: str, store: str) -> "Run":
    """Open the run that a command names."""
    from tuneloop.runs.run_record import Run

    return Run.open(name, store)


def print_json(told: Mapping[str, Any]) -> None:
    """Print the output of ``status --json``; docs/commands.md has its keys."""
    typer.echo(json.dumps({"format": 1, **told}, indent=1))


def _told(run: "Run") -> dict[str, Any]:
    """Describe a run for programs."""
    from tuneloop.runs.completeness import list_missing
    from tuneloop.runs.stages import list_stages

    state, batches = run.state, run.training_rewards()
    most = state.workflow.parameters.get("iterations") if state else None
    return {
        "run": run.name,
        **_progress(run),
        "store": run.url,
        "forked_from": run.origin,
        "iterations": int(most) if most else None,
        "evaluations": [_score(run, score) for score in run.evaluations()],
        "newest_batch": _score(run, batches[-1]) if batches else None,
        "stages": [asdict(stage) for stage in list_stages(run)],
        "missing": list_missing(run),
    }


def _progress(run: "Run") -> dict[str, Any]:
    """Describe the progress of a run, for one run and in the list of all."""
    return {
        "pipeline": run.record.pipeline if run.record else None,
        "phase": run.phase,
        "message": _why(run),
        "created": run.record.created if run.record else None,
        "iteration": run.iteration,
    }


def _score(run: "Run", score: "Score") -> dict[str, Any]:
    about = {
        "completions": run.count_scored_completions(score.entry),
        "policy_version": score.version,
    }
    return {"mean_reward": score.value, "how": score.method, **about}


def _list_runs(store: str, as_json: bool) -> None:
    rows = _rows_of_runs(store)
    if as_json:
        return print_json({"store": store, "runs": rows})
    for row in rows:
        if row["phase"] in UNREAD:
            typer.echo(f"{row['run']}: {row['message']}", err=True)
    if not rows:
        return typer.echo(f"no runs below {store}; --store names another place")
    lines = []
    for row in rows:
        created = (
            time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created"]))
            if row["created"]
            else ""
        )
        reward = (
            f"{row['mean_reward']:.3f} ({row['how']})" if row["mean_reward"] is not None else ""
        )
        known = (row["run"], row["pipeline"] or "", row["phase"], str(row["iteration"] or ""))
        lines.append((*known, created, reward))
    columns = ("run", "pipeline", "state", "iteration", "created", "mean reward")
    print_table(columns, lines, right=("iteration",), cut="mean reward")


def _rows_of_runs(store: str) -> list[dict[str, Any]]:
    """Collect a row for every run, oldest first; for a run that cannot be read, the reason."""
    from tuneloop.runs.records import list_runs, read_record
    from tuneloop.runs.run_record import Run

    rows = []
    for name in list_runs(store):
        row: dict[str, Any] = {
            "run": name,
            "pipeline": None,
            "phase": "not started here",
            "message": "",
        }
        row |= dict.fromkeys(("created", "iteration", "mean_reward", "how"))
        try:
            if record := read_record(
                name, store
            ):  # reading all of a run that was not started here may take long
                latest = (run := Run(name, store, record)).latest_reward()
                row |= {
                    **_progress(run),
                    **({"mean_reward": latest.value, "how": latest.method} if latest else {}),
                }
        except (UserError, Retryable) as error:  # list the others nevertheless
            row |= {"phase": UNREAD[not isinstance(error, Corrupt)], "message": str(error)}
        rows.append(row)
    return sorted(rows, key=lambda row: (row["phase"] in UNREAD, row["created"] or 0.0, row["run"]))


def _print_log(run: "Run", node: "Node", seen: dict[str, int], prefix: bool) -> None:
    """Print the lines of a log that were not printed yet; a line still being written waits."""
    from tuneloop.runs.stages import find_iteration, get_stage_name

    path = run.directory / node.log
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(seen.get(node.id, 0))
        data = file.read()
    whole = data if node.finished else data[: data.rfind(b"\n") + 1]
    seen[node.id] = seen.get(node.id, 0) + len(whole)
    at = f" {iteration}" if (iteration := find_iteration(node)) else ""
    for line in whole.decode(errors="replace").splitlines():
        typer.echo(f"{get_stage_name(node)}{at} | {line}" if prefix else line)


def _why(run: "Run") -> str:
    return state.workflow.message if (state := run.state) else ""
