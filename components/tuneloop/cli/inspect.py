"""Commands that read runs: they work while a run goes on, after it, and from another machine with ``--store``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuneloop.cli.execute import RUN, STORE

if TYPE_CHECKING:
    from tuneloop.argo.state import Node
    from tuneloop.runs import Run


def status(
    name: Annotated[str | None, typer.Argument(metavar="[RUN]", help="The run's name; default: list all.")] = None,
    store: STORE = "runs",
) -> None:
    """Show the stages of a run, or all runs. With its iteration and its reward so far."""
    from tuneloop.cli.show import show, stages, there
    from tuneloop.runs import Run
    from tuneloop.summary import iterations_line, reward_line

    if name is None:
        table = _table_of_runs(store)
        if table.row_count:
            show(table)
        else:
            typer.echo(f"no runs below {store}; --store names another place")
        return
    run = Run.open(name, store)
    pipeline = run.record.pipeline if run.record else "pipeline unknown"
    again = f"tuneloop resume {name}{there(store)}"
    hint = {"interrupted": f"; {again}", "failed": f"; {_why(run)}; {again}"}
    typer.echo(f"{name}  {pipeline}  {run.phase}{hint.get(run.phase, '')}")
    for label, text in (("store", run.url), ("iterations", iterations_line(run)), ("mean reward", reward_line(run))):
        if text:
            typer.echo(f"  {label:<12} {text}")
    if (latest := run.latest_reward()) and latest.entry.manifest.stage == "reward":
        typer.echo(f"  {'newest batch':<12} {latest.value:.3f} ({latest.how}, iteration {latest.entry.iteration})")
    show(stages(run))


def logs(
    name: RUN,
    stage: Annotated[str | None, typer.Argument(help="A stage's name in the graph, as `status` shows it.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
    store: STORE = "runs",
) -> None:
    """Print what the stages wrote. Each line behind the stage and iteration that wrote it."""
    from tuneloop.cli.live import label
    from tuneloop.errors import UserError
    from tuneloop.runs import Run

    run = Run.open(name, store)
    if run.state is None:
        raise UserError("run", name, "has no logs here: no stage was run on this machine")
    seen: dict[str, int] = {}
    while True:
        running = run.phase == "running"  # before reading: what is written until the end is then read once more
        pods = [node for node in run.state.nodes.values() if node.type == "Pod" and node.log]
        if stage and not (follow and running) and not any(stage in (label(n), n.display_name, n.id) for n in pods):
            known = ", ".join(dict.fromkeys(label(node) for node in pods))
            raise UserError("stage", stage, f"has not run; those that have: {known}")
        for node in pods:
            if stage is None or stage in (label(node), node.display_name, node.id):
                _print_log(run, node, seen, prefix=stage is None or len(pods) > 1)
        if not (follow and running):
            return
        time.sleep(0.2)


def report(
    name: RUN,
    store: STORE = "runs",
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Default: report.html beside the run's state.")
    ] = None,
) -> None:
    """Write one HTML page, readable offline. Curves, samples before and after, the origin of every version."""
    from tuneloop.cli.show import report as write
    from tuneloop.runs import Run

    typer.echo(write(Run.open(name, store), output))


def track(
    name: RUN,
    store: STORE = "runs",
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run ends.")] = False,
) -> None:
    """Mirror a run into MLflow. To MLFLOW_TRACKING_URI, default sqlite:///mlflow.db; again brings it up to date."""
    from tuneloop.runs import Run
    from tuneloop.tracking import mirror

    typer.echo(mirror(Run.open(name, store), follow=follow))


def _table_of_runs(store: str) -> Any:
    from rich import box
    from rich.table import Table

    from tuneloop.errors import Corrupt, Retryable, UserError
    from tuneloop.runs import names

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("run", "pipeline", "state", "iterations", "mean reward", "created"):
        table.add_column(column, no_wrap=True)
    rows = []
    for name in names(store):
        try:
            rows.append(_row(name, store))
        except (UserError, Retryable) as error:  # the others are there all the same
            rows.append((float("inf"), (name, "", "damaged" if isinstance(error, Corrupt) else "unreachable")))
            typer.echo(f"{name}: {error}", err=True)
    for _, row in sorted(rows):
        table.add_row(*row)
    return table


def _row(name: str, store: str) -> tuple[float, tuple[str, ...]]:
    """When a run was created, Unix seconds, and what the table says of it."""
    from tuneloop.runs import Run, read_record

    record = read_record(name, store)
    if record is None:  # reading all of it may take long
        return 0.0, (name, "", "not started here")
    run = Run(name, record.store, record)
    latest = run.latest_reward()
    created = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.created))
    reward = f"{latest.value:.3f} ({latest.how})" if latest else ""
    return record.created, (name, record.pipeline, run.phase, str(run.iteration or ""), reward, created)


def _print_log(run: Run, node: Node, seen: dict[str, int], prefix: bool) -> None:
    """The lines of a log that were not printed yet; a line still being written waits."""
    from tuneloop.cli.live import iteration_of, label

    path = run.directory / node.log
    if not path.is_file():
        return
    with path.open("rb") as file:
        file.seek(seen.get(node.id, 0))
        data = file.read()
    whole = data if node.finished else data[: data.rfind(b"\n") + 1]
    seen[node.id] = seen.get(node.id, 0) + len(whole)
    at = f" {iteration}" if (iteration := iteration_of(node)) else ""
    for line in whole.decode(errors="replace").splitlines():
        typer.echo(f"{label(node)}{at} | {line}" if prefix else line)


def _why(run: Run) -> str:
    state = run.state
    return state.workflow.message if state else ""
