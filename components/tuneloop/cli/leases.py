"""``tuneloop leases``: the holder and the waiters of the device lease in each group of runs that share devices."""

import time
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
    """Show which run holds each group's device lease, which runs wait for it, and when each was last served.

    A holder that is silent for the group's patience loses its lease once another run waits for it. To end one that
    works too long, stop its run: `tuneloop cluster stop RUN`, or on this machine `tuneloop stop RUN`.
    """
    from tuneloop.sharing.lease_storage import STORED_LEASES, open_lease_group, read_groups

    if not store:
        found = read_groups(connect_to_cluster(namespace, context))
    elif group is None:
        raise UserError("GROUP", None, "is needed beside --store: the runs' cluster.share.group")
    else:
        document = open_lease_group(f"{store}/{STORED_LEASES}/{group}", who="nobody").read()
        found = {group: document} if document.number or not document.is_idle else {}
    chosen = {name: document for name, document in found.items() if group in (None, name)}
    for name, document in chosen.items():
        typer.echo("\n".join(_told(name, document)))
    if not chosen:
        typer.echo(f"no run holds or waits for a lease{f' in group {group}' if group else ''}")


def _told(group: str, document: "LeaseQueue") -> list[str]:
    about = f"{group}: {document.policy}, lease {document.number}, patience {document.patience:g} s"
    held = [f"  holds  {_about(document.holder)}"] if document.holder else []
    served = ", ".join(
        f"{who} ({number})" for who, number in sorted(document.served.items(), key=lambda i: -i[1])
    )
    waiting = [f"  waits  {_about(seat)}" for seat in document.list_waiters()]
    return [about, *held, *waiting, f"  last leases  {served or 'none'}"]


def _about(seat: "LeaseRequest") -> str:
    since = time.strftime("%H:%M:%S", time.localtime(seat.since))
    return f"{seat.who}  since {since} ({max(0.0, time.time() - seat.since):.0f} s)"
