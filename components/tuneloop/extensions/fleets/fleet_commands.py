"""``tuneloop fleet``: rollout workers to which tuneloop sends each version of the weights (others
fetch it from the store themselves), and the graphs of workers of Dynamo's operator.

The kinds of fleets are in `inference/fleet/`, one file each, and graphs in
`inference/fleet/graph.py`. `autoscale` knows only `service://` (`extensions/fleets/autoscaler.py`).
"""

import functools
import os
import time
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.cli.arguments import CONTEXT, DRY_RUN, NAMESPACE, STORE
from tuneloop.cli.inspect import open_run
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.wording import format_count
from tuneloop.kube.connection import connect_to_cluster, retry_until_available

app = typer.Typer(
    no_args_is_help=True, help="Fleets of rollout workers that are given each version."
)
FLEET = Annotated[
    str,
    typer.Argument(
        metavar="FLEET",
        help="http://host:port,…, dns://name:port, service://name.namespace or dynamo://name.namespace.",
    ),
]
SETS = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="path=value below the graph, as in spec.services.Worker.replicas=2; repeatable.",
    ),
]
IMAGE = Annotated[str | None, typer.Option(help="Image of components that name none.")]
READY = Annotated[float, typer.Option(help="Seconds until the graph is ready.")]
TIMEOUT = Annotated[
    float, typer.Option(help="Seconds without an answer after which a worker counts as gone.")
]


@app.command("status")
def show_status(fleet: FLEET, timeout: TIMEOUT = 10.0, context: CONTEXT = None) -> int:
    """List the workers of a fleet and the version of each. Exit code 1 if they differ, or one does
    not answer.

    Outside of its cluster, a Dynamo graph is shown by the three conditions of its readiness. Exit
    code 1 then: one of these is not met.
    """
    from tuneloop.inference.fleet import open_fleet

    # The workers of a Dynamo graph have addresses that only its cluster reaches.
    if fleet.startswith("dynamo:") and "KUBERNETES_SERVICE_HOST" not in os.environ:
        return _show_gates(fleet, context)
    rows: list[tuple[str, str, str]] = []
    for worker in open_fleet(fleet).discover():
        try:
            version = worker.version(timeout) or "nothing"
        except Retryable as error:
            version = str(error)
        rows.append((worker.id, worker.url, version))
    if not rows:
        raise Retryable(f"fleet {fleet}: no worker answers")
    print_table(("worker", "url", "serves"), rows, cut="serves")
    versions = {version for _, _, version in rows}
    # A version is a reference, REF@DIGEST; an error's text and "nothing" have no digest.
    return 0 if len(versions) == 1 and "@" in versions.pop() else 1


def _show_gates(fleet: str, context: str | None) -> int:
    """Show what the readiness of a Dynamo graph depends on; return 1 unless it is ready."""
    from tuneloop.inference.fleet import parse_service_url
    from tuneloop.inference.fleet.dynamo import FRONTEND_PORT
    from tuneloop.inference.fleet.graph import read_gates

    name, namespace, port = parse_service_url(fleet)
    gates = read_gates(connect_to_cluster(namespace, context), name, port or FRONTEND_PORT)
    rows = [(gate.name, "open" if gate.open else "shut", gate.reason) for gate in gates]
    print_table(("gate", "state", "why"), rows, cut="why")
    return 0 if all(gate.open for gate in gates) else 1


@app.command("refit")
def refit_fleet(
    fleet: FLEET,
    policy: Annotated[
        str, typer.Argument(metavar="CHECKPOINT", help="Its reference or path, for the workers.")
    ],
    force: Annotated[bool, typer.Option(help="Update workers that say they have it, too.")] = False,
    timeout: TIMEOUT = 600.0,
) -> None:
    """Bring every worker of a fleet to a checkpoint: pause, update, flush, resume, until no new
    worker appears.

    A worker that appears meanwhile is brought to it as well.
    """
    from tuneloop.core.artifacts import Artifact
    from tuneloop.inference.fleet import open_fleet
    from tuneloop.inference.fleet.refit import make_target, refit_fleet

    target = make_target(Artifact(policy))
    refit = refit_fleet(open_fleet(fleet), target, timeout_s=timeout, force=force)
    # A worker that had it already was not paused: its seconds are 0.
    pauses = [seconds for seconds in refit.workers.values() if seconds]
    longest = f", paused for {max(pauses):.2f} s at most" if pauses else ""
    counts = f"served by {format_count(len(refit.workers), 'worker')}, {len(pauses)} got it now"
    typer.echo(f"{target.label}: {counts}{longest}")


@app.command("up")
def create_graph(
    manifest: Annotated[
        Path, typer.Argument(help="YAML with a DynamoGraphDeployment, among others.")
    ],
    name: Annotated[str | None, typer.Option(help="Name, in place of the manifest's.")] = None,
    sets: SETS = None,
    image: IMAGE = None,
    recreate: Annotated[
        bool, typer.Option(help="Replace a graph that differs; else it is used as it is.")
    ] = False,
    dry_run: DRY_RUN = False,
    timeout: READY = 1800.0,
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> None:
    """Create a graph of Dynamo and wait until it is ready; it is deleted again if it does not
    become ready.

    It exists until `tuneloop fleet down`. `tuneloop submit --fleet MANIFEST` makes one that is
    deleted with its run.
    """
    from tuneloop.config.loading import dump_workflow, read_yaml_documents
    from tuneloop.inference.fleet.graph import bring_up, render_graph

    documents = read_yaml_documents("manifest", manifest)
    graph = render_graph(
        documents,
        name=name,
        namespace=namespace,
        image=image,
        sets=sets or (),
    )
    # As `kubectl apply` takes it.
    if dry_run:
        typer.echo(dump_workflow(graph), nl=False)
        return
    bring_up(
        connect_to_cluster(namespace, context),
        graph,
        recreate=recreate,
        timeout=timeout,
        tell=typer.echo,
    )
    url = f"dynamo://{graph['metadata']['name']}.{namespace}"
    typer.echo(
        "use it with --set engine=endpoint --set engine.weights=refit "
        f"--set engine.weights.fleet={url}"
    )


@app.command("down")
def delete_graph(
    name: Annotated[str, typer.Argument(help="Name of the graph.")],
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> int:
    """Delete a graph of Dynamo, and with it its pods. Exit code 1 if there was none."""
    from tuneloop.inference.fleet import graph

    existed = graph.delete_graph(connect_to_cluster(namespace, context), name)
    typer.echo(f"{name}: {'deleted' if existed else 'there was none'}")
    return 0 if existed else 1


@app.command("autoscale")
def autoscale_fleet(
    fleet: Annotated[
        str, typer.Argument(metavar="service://NAME.NAMESPACE", help="The Deployment of that name.")
    ],
    maximum: Annotated[int, typer.Option("--max", min=1, help="Maximum replicas.")],
    minimum: Annotated[int, typer.Option("--min", min=0, help="Replicas without requests.")] = 0,
    target: Annotated[
        float, typer.Option(min=1, help="Running and waiting completions for each replica.")
    ] = 64,
    window: Annotated[
        float, typer.Option(min=0, help="Seconds before surplus replicas are removed.")
    ] = 300,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two checks.")] = 15,
    run: Annotated[
        str | None, typer.Option(help="Bound replicas by the idle time in this run's iterations.")
    ] = None,
    store: STORE = "runs",
    weight: Annotated[
        float, typer.Option(min=0.01, help="Devices of the trainer for each device of a replica.")
    ] = 1,
    context: CONTEXT = None,
) -> None:
    """Keep a Deployment of rollout servers at the replicas that its requests need, until you stop
    this command.

    With --run replicas are also bounded by what the run's iterations can use: servers that would
    stand idle while the trainer works are not started. A failure of the first check ends the
    command; later ones are printed, and tried again.
    """
    from tuneloop.extensions.fleets.autoscaler import scale_fleet
    from tuneloop.extensions.fleets.autoscaling_rule import AutoscalingRule
    from tuneloop.inference.fleet import open_fleet
    from tuneloop.inference.fleet.service import Service

    if minimum > maximum:
        raise UserError("--min", minimum, f"must be at most --max ({maximum})")
    service = open_fleet(fleet)
    if not isinstance(service, Service):
        raise UserError(
            "fleet", fleet, "must be service://name.namespace, of a Deployment of that name"
        )
    service.context = context
    rule = AutoscalingRule(minimum, maximum, target, window, weight)
    measured_run = open_run(run, store) if run else None
    check = functools.partial(scale_fleet, service, rule, measured_run)
    # The first failure is reported at once, without waiting: it is mostly a mistake.
    change = check()
    while True:
        if change:
            typer.echo(change)
        time.sleep(interval)
        change = retry_until_available(check)
