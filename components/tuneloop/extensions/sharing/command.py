"""``tuneloop leases``: the holder and the waiters of the device lease in each group of runs that
share devices.

It prints fields of `sharing/lease_queue.py: LeaseQueue`, and changes nothing.
"""

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from tuneloop.cli.arguments import CONTEXT, NAMESPACE
from tuneloop.core.errors import UserError
from tuneloop.kube.connection import connect_to_cluster

if TYPE_CHECKING:
    from tuneloop.sharing.lease_queue import LeaseQueue, LeaseRequest


def show_device_leases(
    group: Annotated[
        str | None, typer.Argument(help="Only this one; default: all of the namespace.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option(help="Store of runs of `tuneloop run`, to show their leases; requires GROUP."),
    ] = None,
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> None:
    """Show which run holds the device lease of each group. It also shows which runs wait for it,
    and when each was last served.

    A holder that is silent for the group's patience loses its lease once another run waits for it.
    To end one that works too long, stop its run: `tuneloop cluster stop RUN`, or on this machine
    `tuneloop stop RUN`.
    """
    from tuneloop.sharing.lease_storage import STORED_LEASES, open_lease_group, read_groups

    queues: dict[str, LeaseQueue] = {}
    if not store:
        queues = read_groups(connect_to_cluster(namespace, context))
    elif group is None:
        raise UserError("GROUP", None, "is needed beside --store: the runs' cluster.share.group")
    else:
        queue = open_lease_group(f"{store}/{STORED_LEASES}/{group}", who="nobody").read()
        # A group that nobody has used reads as an idle one whose leases begin at number 0.
        if queue.number or not queue.is_idle:
            queues[group] = queue
    names = [name for name in queues if group in (None, name)]
    for name in names:
        typer.echo("\n".join(_describe_queue(name, queues[name])))
    if not names:
        suffix = f" in group {group}" if group else ""
        typer.echo(f"no run holds or waits for a lease{suffix}")


def _describe_queue(group: str, queue: "LeaseQueue") -> Iterator[str]:
    """Yield the lines about a group: its policy, the holder, the waiters and the last leases."""
    yield f"{group}: {queue.policy}, lease {queue.number}, patience {queue.patience:g} s"
    if queue.holder:
        yield f"  holds  {_describe_request(queue.holder)}"
    for request in queue.list_waiters():
        yield f"  waits  {_describe_request(request)}"
    # The numbers of leases only rise, so the newest comes first.
    by_number = sorted(queue.served.items(), key=lambda item: -item[1])
    served = ", ".join(f"{run} ({number})" for run, number in by_number)
    yield f"  last leases  {served or 'none'}"


def _describe_request(request: "LeaseRequest") -> str:
    """Describe a run that holds or wants the lease, and since when."""
    since = time.strftime("%H:%M:%S", time.localtime(request.since))
    # The clock of the machine that wrote the request may be ahead of ours.
    seconds = max(0.0, time.time() - request.since)
    return f"{request.who}  since {since} ({seconds:.0f} s)"
