"""``tuneloop fleet``: rollout workers that pull nothing, and the graphs of workers that Dynamo's operator runs."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Fleets of rollout workers that are brought to each version.")
FLEET = Annotated[
    str,
    typer.Argument(
        metavar="FLEET",
        help="http://host:port,…, dns://name:port, service://name.namespace or dynamo://name.namespace.",
    ),
]
TIMEOUT = Annotated[float, typer.Option(help="Seconds without an answer after which a worker counts as gone.")]


@app.callback()
def fleet() -> None:
    """Fleets of rollout workers that are brought to each version."""


@app.command("status")
def status(fleet: FLEET, timeout: TIMEOUT = 10.0) -> int:
    """List the workers of a fleet and what each serves. Exit code 1 where they differ, or one does not answer."""
    from rich.table import Table

    from tuneloop.cli.show import show
    from tuneloop.errors import Retryable
    from tuneloop.fleet import open_fleet

    table = Table(box=None, pad_edge=False)
    for column in ("worker", "url", "serves"):
        table.add_column(column, no_wrap=True)
    served: list[str | None] = []
    for worker in open_fleet(fleet).discover():
        try:
            served.append(worker.version(timeout))
            told = served[-1] or "nothing"
        except Retryable as error:
            served.append(None)
            told = f"[red]{error}[/red]"
        table.add_row(worker.id, worker.url, told)
    show(table)
    typer.echo(f"{len(served)} workers, {len(set(served) - {None, ''})} versions")
    return 0 if len(set(served)) == 1 and served[0] else 1


@app.command("refit")
def refit(
    fleet: FLEET,
    policy: Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Where it lies, as the workers reach it.")],
    force: Annotated[bool, typer.Option(help="Update workers that say they have it, too.")] = False,
    timeout: TIMEOUT = 600.0,
) -> None:
    """Bring every worker of a fleet to a checkpoint: pause, update, flush, resume, until nobody is new."""
    from tuneloop.artifacts import Artifact
    from tuneloop.fleet import open_fleet
    from tuneloop.fleet.refit import refit, target

    wanted = target(Artifact(policy))
    done = refit(open_fleet(fleet), wanted, timeout_s=timeout, force=force)
    changed = [paused for paused in done.workers.values() if paused]
    longest = f", paused for {max(changed):.2f} s at most" if changed else ""
    typer.echo(f"{wanted.label}: {len(done.workers)} workers have it, {len(changed)} got it now{longest}")
