"""The command that deletes what a run no longer needs.

`runs/retention.py` finds and deletes it. Published weight versions have their own: `weights.py:
delete_unused_weights`.
"""

from collections import Counter
from typing import Annotated

import typer

from tuneloop.cli.arguments import DELETE, RUN, STORE
from tuneloop.cli.inspect import open_run


def collect_garbage(
    name: RUN,
    store: STORE = "runs",
    keep: Annotated[
        int | None, typer.Option(help="Number of newest checkpoints to keep; default: all.")
    ] = None,
    idle: Annotated[
        float, typer.Option(min=0, help="Hours without a write: younger data may be in use.")
    ] = 24.0,
    delete: DELETE = False,
) -> None:
    """Delete data that a run no longer needs. This is data of dead attempts, stale resume points,
    and with --keep old checkpoints.

    A deleted checkpoint keeps its manifest, so that an audit still covers it. Promoted checkpoints
    are never deleted.
    """
    from tuneloop.runs.retention import delete_leftovers, find_leftovers
    from tuneloop.runs.summary import format_size

    run = open_run(name, store)
    leftovers = find_leftovers(run, keep=keep, idle=idle * 3600)
    # Before anything is deleted: if that is interrupted, the list says what may be gone.
    for item in leftovers:
        typer.echo(f"{item.key}  {format_size(item.size)}  {item.reason}")
    if delete:
        delete_leftovers(run, leftovers)
    if not leftovers:
        typer.echo(f"{name}: nothing to delete")
        return
    # `runs/retention.py` writes a reason as a kind, "of", and the rest: "attempt of a stage that did
    # not commit".
    kinds = Counter(item.reason.partition(" of ")[0] for item in leftovers)
    counts = ", ".join(f"{count} × {kind}" for kind, count in kinds.items())
    total = format_size(sum(item.size for item in leftovers))
    outcome = "deleted" if delete else "to delete; --delete does"
    typer.echo(f"{name}: {counts}, {total} {outcome}")
