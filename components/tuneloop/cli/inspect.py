"""Commands that read runs: they work during a run, after it, and from another machine with
``--store``.
"""

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuneloop.cli.arguments import CLUSTER_NAMESPACE, CONTEXT, FOLLOW, JSON, RUN, STAGE, STORE
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import Corrupt, Retryable, UserError
from tuneloop.core.json_types import JsonMapping, JsonObject

if TYPE_CHECKING:
    from tuneloop.local.journal import Node
    from tuneloop.runs.run_record import Run, Score

DAMAGED = "damaged"
UNREACHABLE = "unreachable"
UNREAD = (DAMAGED, UNREACHABLE)
"""The phases that the list shows for a run that could not be read. The page has its own copy of the
two words, `ui/static/runs.js`; `runs/run_record.py: Run.phase` has all others."""


def show_status(
    name: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="The run's name; default: list all.")
    ] = None,
    store: STORE = "runs",
    as_json: JSON = False,
) -> None:
    """Show the stages of a run, or all runs. With its iteration and its reward so far.

    Reads the store and what is known on this machine; of a run on a cluster it shows the commits.
    """
    from tuneloop.cli.show import show_stages
    from tuneloop.runs.cautions import describe_caution
    from tuneloop.runs.completeness import describe_missing, list_missing
    from tuneloop.runs.prepared_data import describe_data
    from tuneloop.runs.stages import list_stages
    from tuneloop.runs.summary import (
        describe_iterations,
        describe_reward,
        find_held_out,
        format_facts,
    )

    if name is None:
        _list_runs(store, as_json)
        return
    run = open_run(name, store)
    if as_json:
        print_json(_describe_run(run))
        return
    pipeline = run.record.pipeline if run.record else "pipeline unknown"
    typer.echo(f"{name}  {pipeline}  {run.phase}{_suggest_resume(run, store)}")
    facts = {"store": run.url}
    facts |= describe_data(run)
    facts |= {
        "iterations": describe_iterations(run),
        "mean reward": describe_reward(run),
        "held-out loss": str(find_held_out(run) or ""),
        "caution": describe_caution(run),
    }
    # "mean reward" is that of an evaluation, if there is one. A batch that was scored after it gets a
    # line of its own.
    latest = run.latest_reward()
    if latest and latest.entry.manifest.role == "scorer":
        facts["newest batch"] = (
            f"{latest.value:.3f} ({latest.method}, iteration {latest.entry.iteration})"
        )
    missing = list_missing(run)
    if missing:
        facts["missing"] = f"{describe_missing(missing)}; restore it from a copy"
    typer.echo(format_facts(facts))
    show_stages(list_stages(run))


def _suggest_resume(run: "Run", store: str) -> str:
    """Suggest how to continue a run that ended early, with the reason; empty for other runs."""
    from tuneloop.cli.show import format_store_option
    from tuneloop.core.ends import cut_error

    command = f"; tuneloop resume {run.name}{format_store_option(store)}"
    if run.phase == "failed":
        # The error itself follows below the table of the stages.
        return f"; {cut_error(_get_message(run))}{command}"
    return command if run.phase == "interrupted" else ""


def show_logs(
    name: RUN, stage: STAGE = None, follow: FOLLOW = False, store: STORE = "runs"
) -> None:
    """Print the logs of the stages. Each line begins with its stage and iteration.

    Only of stages that were run on this machine; for those of a cluster: `tuneloop cluster logs`.
    """
    from tuneloop.runs.stages import get_stage_name

    run = open_run(name, store)
    if run.state is None:
        raise UserError("run", name, "has no logs here: no stage was run on this machine")
    # Node → the bytes of its log that were printed.
    offsets: dict[str, int] = {}
    while True:
        # Checked before the logs are read: lines that are written meanwhile get another round.
        may_grow = follow and run.phase == "running"
        pods = [node for node in run.state.nodes.values() if node.type == "Pod" and node.log]
        chosen = [
            node
            for node in pods
            if stage is None or stage in (get_stage_name(node), node.display_name, node.id)
        ]
        if stage and not chosen and not may_grow:
            # A pod that runs iterations (`argo/run_plan.py: POD`) has one log for all their stages.
            names = ", ".join(dict.fromkeys(get_stage_name(node) for node in pods))
            hint = "; the loop's stages run in `iterations` here" if "iterations" in names else ""
            raise UserError(
                "stage", stage, f"has no log of its own; those that have: {names}{hint}"
            )
        for node in chosen:
            _print_log(run, node, offsets, prefix=stage is None or len(pods) > 1)
        if not may_grow:
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
    """Write the live page into one file, readable offline. Graph, curves, samples, the origin of
    every version.
    """
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
    namespace: CLUSTER_NAMESPACE = None,
    context: CONTEXT = None,
) -> None:
    """Mirror a run into MLflow, TensorBoard, Trackio or W&B. Default: those in TUNELOOP_TRACKERS;
    repeat to update.

    With --follow it is mirrored until it ends, and without a name every run of the store until you
    stop this command. --namespace says where runs are executed, so that their ends are known.
    """
    from tuneloop.cluster.run_workflows import find_executor_phase
    from tuneloop.kube.connection import connect_to_cluster
    from tuneloop.runs.tracking import POLL_S, find_phase, list_trackers, mirror_run, mirror_store
    from tuneloop.trackers import find_tracker
    from tuneloop.ui.report import render_page

    names = trackers or list_trackers() or ["mlflow"]
    # Before the first is opened: a mistake in the second must not leave a mirror in the first.
    for tracker in names:
        find_tracker(tracker)
    cluster = connect_to_cluster(namespace, context) if namespace else None
    pause = threading.Event()

    def ask_phase(run_name: str) -> str:
        try:
            return find_executor_phase(cluster, run_name) if cluster else ""
        except (UserError, Retryable) as error:
            # Commits are mirrored even while the cluster is unavailable.
            typer.echo(f"{run_name}: {error}", err=True)
            return ""

    if name is None:
        if not follow:
            raise UserError("RUN", name, "name one, or let it --follow all runs of the store")
        mirror_store(store, names, lambda: not pause.wait(POLL_S), render_page, ask_phase)
        return
    run = open_run(name, store)

    def should_continue() -> bool:
        return follow and not pause.wait(POLL_S) and find_phase(run, ask_phase) == "running"

    for tracker in names:
        typer.echo(mirror_run(run, tracker, should_continue, render_page, ask_phase))


def open_run(name: str, store: str) -> "Run":
    """Open the run that a command names. Raises UserError if the store has none of this name."""
    from tuneloop.runs.run_record import Run

    return Run.open(name, store)


def print_json(fields: JsonMapping) -> None:
    """Print the output of ``--json`` with the number of its format; docs/commands.md has its keys.

    `tests/unit/cli/test_cli.py: test_status_for_programs` compares the keys of `status` with the
    document; no test compares those of the other commands.
    """
    typer.echo(json.dumps({"format": 1, **fields}, indent=1))


def _describe_run(run: "Run") -> JsonObject:
    """Describe a run for programs, with the keys of docs/commands.md.

    What people read of the same run is `show_status`; the page has its own, `ui/describe.py`.
    """
    from tuneloop.runs.completeness import list_missing
    from tuneloop.runs.prepared_data import find_prepared_data
    from tuneloop.runs.stages import list_stages
    from tuneloop.runs.summary import find_held_out

    state = run.state
    limit = state.workflow.parameters.get("iterations") if state else None
    batches = run.training_rewards()
    losses = find_held_out(run)
    data = find_prepared_data(run)
    # In the order in which docs/commands.md has them: scripts read these keys.
    description: JsonObject = {"run": run.name}
    description |= _describe_progress(run)
    description |= {
        "store": run.url,
        "forked_from": run.origin,
        "data": {"recognised": data.recognised, "rows": data.rows} if data else None,
        "iterations": int(limit) if limit else None,
        "held_out": asdict(losses) if losses else None,
        "evaluations": [_describe_score(run, score) for score in run.evaluations()],
        "newest_batch": _describe_score(run, batches[-1]) if batches else None,
        "stages": [asdict(stage) for stage in list_stages(run)],
        "missing": list_missing(run),
    }
    return description


def _describe_progress(run: "Run") -> JsonObject:
    """Describe the progress of a run, for one run and in the list of all."""
    record = run.record
    return {
        "pipeline": record.pipeline if record else None,
        "phase": run.phase,
        "message": _get_message(run),
        "created": record.created if record else None,
        "iteration": run.iteration,
    }


def _describe_score(run: "Run", score: "Score") -> JsonObject:
    """Describe a mean reward for programs: its value, how it was obtained, and of what."""
    return {
        "mean_reward": score.value,
        "how": score.method,
        "completions": run.count_scored_completions(score.entry),
        "policy_version": score.version,
    }


def _list_runs(store: str, as_json: bool) -> None:
    """Print the runs below a store; those that cannot be read on standard error, too."""
    from tuneloop.runs.records import ROOT
    from tuneloop.runs.run_record import check_store_exists

    rows = _collect_runs(store)
    # The default store is made by the first run.
    if not rows and store != ROOT:
        check_store_exists(store)
    if as_json:
        print_json({"store": store, "runs": rows})
        return
    for row in rows:
        if row["phase"] in UNREAD:
            typer.echo(f"{row['run']}: {row['message']}", err=True)
    if not rows:
        typer.echo(f"no runs below {store}; --store names another place")
        return
    lines = []
    for row in rows:
        created = ""
        if row["created"]:
            created = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["created"]))
        result = ""
        if row["mean_reward"] is not None:
            result = f"{row['mean_reward']:.3f} mean reward ({row['how']})"
        elif row["held_out"] is not None:
            losses = row["held_out"]
            # The numbers come first, as a narrow terminal cuts the end off.
            result = f"{losses['loss_before']:.3f} → {losses['loss_after']:.3f} held-out loss"
        iteration = str(row["iteration"] or "")
        pipeline = row["pipeline"] or ""
        lines.append((row["run"], pipeline, row["phase"], iteration, created, result))
    columns = ("run", "pipeline", "state", "iteration", "created", "newest result")
    print_table(columns, lines, right=("iteration",), cut="newest result")


def _collect_runs(store: str) -> list[JsonObject]:
    """Describe every run below a store, oldest first; for a run that cannot be read, the reason."""
    from tuneloop.runs.records import list_runs, read_record
    from tuneloop.runs.run_record import Run
    from tuneloop.runs.summary import find_held_out

    rows: list[JsonObject] = []
    for name in list_runs(store):
        row: JsonObject = {
            "run": name,
            "pipeline": None,
            "phase": "not started here",
            "message": "",
            "created": None,
            "iteration": None,
            "mean_reward": None,
            "how": None,
            "held_out": None,
        }
        try:
            record = read_record(name, store)
            # To read all of a run that was not started here may take long.
            if record:
                run = Run(name, store, record)
                row |= _describe_progress(run)
                latest = run.latest_reward()
                if latest:
                    row["mean_reward"] = latest.value
                    row["how"] = latest.method
                losses = find_held_out(run)
                row["held_out"] = asdict(losses) if losses else None
        except (UserError, Retryable) as error:
            # The others are listed nevertheless.
            row["phase"] = DAMAGED if isinstance(error, Corrupt) else UNREACHABLE
            row["message"] = str(error)
        rows.append(row)
    return sorted(rows, key=lambda row: (row["phase"] in UNREAD, row["created"] or 0.0, row["run"]))


def _print_log(run: "Run", node: "Node", offsets: dict[str, int], prefix: bool) -> None:
    """Print the lines of a log that were not printed yet; a line still being written waits.

    Args:
        run: the run.
        node: whose log it is.
        offsets: node → the bytes of its log that were printed; it is updated.
        prefix: whether a line begins with its stage and iteration.
    """
    from tuneloop.runs.stages import find_iteration, get_stage_name

    path = run.directory / node.log
    if not path.is_file():
        return
    offset = offsets.get(node.id, 0)
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read()
    # The last line of a stage that has ended may lack its end.
    if not node.finished:
        data = data[: data.rfind(b"\n") + 1]
    offsets[node.id] = offset + len(data)
    iteration = find_iteration(node)
    source = f"{get_stage_name(node)} {iteration}" if iteration else get_stage_name(node)
    for line in data.decode(errors="replace").splitlines():
        typer.echo(f"{source} | {line}" if prefix else line)


def _get_message(run: "Run") -> str:
    """Return why a run stands as it does; empty if this machine does not know."""
    return run.state.workflow.message if run.state else ""
