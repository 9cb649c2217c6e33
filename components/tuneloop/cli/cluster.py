"""Commands that run a pipeline on a cluster, and look at such runs."""

import functools
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from tuneloop.cli.arguments import (
    CONFIG,
    CONTEXT,
    DRY_RUN,
    FOLLOW,
    IGNORE_LIMITS,
    JSON,
    NAMESPACE,
    PIPELINE,
    PRIORITY,
    REMOTE_STORE,
    RUN,
    SCHEDULE,
    SETS,
    STAGE,
    SUBMITTED,
)
from tuneloop.cli.inspect import open_run, print_json
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import UserError
from tuneloop.kube.connection import Connection, connect_to_cluster, retry_until_available

app = typer.Typer(no_args_is_help=True, help="The runs on a cluster.")


def submit_run(
    pipeline: PIPELINE,
    run: SUBMITTED,
    store: REMOTE_STORE,
    config: CONFIG = None,
    sets: SETS = None,
    priority: PRIORITY = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Follow the logs to the end; exit with the run's code.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Only check: create nothing.")] = False,
    dry_run: DRY_RUN = False,
    server: Annotated[
        str | None,
        typer.Option("--server", help="URL of an Argo server to send it to; needs no kubeconfig."),
    ] = None,
    fleet: Annotated[
        Path | None,
        typer.Option(
            "--fleet", help="Manifest of a Dynamo graph: created first, deleted with the run."
        ),
    ] = None,
    fork: Annotated[
        tuple[str, int] | None, typer.Option(metavar="RUN ITERATION", help="Start from its end.")
    ] = None,
    ignore_limits: IGNORE_LIMITS = False,
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> int:
    """Submit a pipeline to a cluster, after checking that the cluster has everything it needs."""
    from tuneloop.argo.claim_steps import add_graph_end
    from tuneloop.cli.checks import check_limits
    from tuneloop.cli.verdict import print_verdict
    from tuneloop.cluster import run_workflows
    from tuneloop.cluster import submit as argo
    from tuneloop.config.loading import dump_workflow, find_pipeline, read_yaml_documents
    from tuneloop.inference.fleet.graph import bring_up, render_graph
    from tuneloop.planning.limits import find_limits, read_pods
    from tuneloop.runs import forking
    from tuneloop.workflow.settings import RUN_LABEL

    graph = None
    fleet_sets: list[str] = []
    if fleet:  # the graph makes the rollouts
        graph = render_graph(
            read_yaml_documents("manifest", fleet), namespace=namespace, labels={RUN_LABEL: run}
        )
        fleet_sets = [
            "engine.kind=endpoint",
            "engine.weights.kind=refit",
            "engine.weights.fleet=dynamo://{name}.{namespace}".format(**graph["metadata"]),
        ]
    settings: Any = (found := find_pipeline(pipeline)).configure(
        config, [*fleet_sets, *(sets or ())]
    )
    origin = open_run(fork[0], store) if fork else None
    workflow = (
        forking.begin_workflow(found, settings, origin, fork[1])
        if origin and fork
        else found.build(settings)
    )
    if graph:
        add_graph_end(workflow, settings.cluster)
    check_limits(find_limits(settings, workflow, read_pods(settings)), ignore_limits)
    made = run_workflows.prepare_workflow(
        workflow, run=run, store=store, namespace=namespace, priority=priority
    )
    if dry_run:
        typer.echo("---\n".join(dump_workflow(each) for each in (graph, made) if each), nl=False)
        return 0
    if server:
        if graph:
            raise UserError(
                "--fleet",
                str(fleet),
                "needs a kubeconfig; bring the graph up by `tuneloop fleet up`",
            )
        if origin:
            forking.record_fork(run, made, origin, settings)
        return _submit_to(server, made, run, namespace, wait)
    there = _connect_and_check(made, graph, namespace, context)
    if check:
        argo.prepare_resumption(made, run_workflows.list_workflows(there, run), run)
        typer.echo(f"{run}: can be submitted to {there.context}, namespace {namespace}")
        return 0
    if origin:
        forking.record_fork(run, made, origin, settings)
    begun = time.monotonic()
    create = functools.partial(argo.create_workflow, there, made, run)
    name = bring_up(there, graph, create, tell=typer.echo) if graph else create()
    options = f" --namespace {namespace}" if namespace != "tuneloop" else ""
    options += f" --context {context}" if context else ""
    typer.echo(f"{run}: submitted as workflow {name}; see `tuneloop cluster status {run}{options}`")
    argo.delete_forgotten_pods(there)
    if not wait:
        return 0
    said = _print_logs(there, run, None, follow=True, since=name)
    argo.wait_for_run(there, run)
    ended = retry_until_available(lambda: run_workflows.find_workflows(there, run))
    return print_verdict(run, ended, time.monotonic() - begun, said, options)


def _connect_and_check(
    made: dict[str, Any], graph: dict[str, Any] | None, namespace: str, context: str | None
) -> Connection:
    """Connect to a cluster, check that it has all that a workflow and its graph need, and warn of possible waits."""
    from tuneloop.cluster.preflight import check_cluster
    from tuneloop.cluster.queue_problems import find_queue_warnings
    from tuneloop.inference.fleet.graph import find_api_version

    there = connect_to_cluster(namespace, context)
    if graph:
        find_api_version(there)
    check_cluster(there, made)
    for warning in find_queue_warnings(there, made):
        typer.echo(f"note: {warning}", err=True)
    return there


def _submit_to(url: str, made: dict[str, Any], run: str, namespace: str, wait: bool) -> int:
    """Submit through an Argo server, which is used for nothing else: without preflight and without logs."""
    from tuneloop.cli.verdict import print_verdict
    from tuneloop.cluster.argo_server import Server

    there = Server(url, namespace)
    begun = time.monotonic()
    name = there.submit(made, run)
    typer.echo(f"{run}: submitted as workflow {name} to {url}")
    if not wait:
        return 0
    there.wait(run)
    return print_verdict(run, there.workflows(run), time.monotonic() - begun, {})


def schedule_pipeline(
    pipeline: PIPELINE,
    name: Annotated[
        str,
        typer.Option("--name", help="Name of the schedule; each run adds the digest of its data."),
    ],
    store: REMOTE_STORE,
    cron: Annotated[
        str, typer.Option("--cron", help="When to check for new data, as in '0 3 * * *'.")
    ],
    timezone: Annotated[
        str | None, typer.Option("--timezone", help="Zone of --cron, as in Europe/Prague.")
    ] = None,
    config: CONFIG = None,
    sets: SETS = None,
    priority: PRIORITY = None,
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> None:
    """Run a pipeline whenever its data has changed. Checks at given times; the same name again changes the schedule."""
    from tuneloop.cli.checks import check_limits
    from tuneloop.cluster.schedule import apply_schedule
    from tuneloop.config.loading import find_pipeline
    from tuneloop.planning.limits import find_limits, read_pods

    found = find_pipeline(pipeline)
    settings = found.configure(config, sets or ())
    workflow = found.build(settings)
    check_limits(find_limits(settings, workflow, read_pods(settings)), ignore=False)
    there = connect_to_cluster(namespace, context)
    apply_schedule(
        there, workflow, name=name, store=store, cron=cron, timezone=timezone, priority=priority
    )
    typer.echo(
        f"{name}: checks for new data at {cron}; `tuneloop cluster unschedule {name}` ends that"
    )


def diff_pipeline(
    pipeline: PIPELINE,
    run: Annotated[
        str | None, typer.Option("--run", help="Compare the newest workflow of this run.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(
            "--template", help="Compare this WorkflowTemplate; default: the pipeline's own."
        ),
    ] = None,
    config: CONFIG = None,
    sets: SETS = None,
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> int:
    """Compare a cluster with the rendered pipeline. Exits with 0: equal; 1: different; more: no answer."""
    from tuneloop.cluster.drift import run_drift, template_drift
    from tuneloop.cluster.run_workflows import template_name
    from tuneloop.config.loading import find_pipeline

    found = find_pipeline(pipeline)
    workflow = found.build(found.configure(config, sets or ()))
    there = connect_to_cluster(namespace, context)
    wanted = template or template_name(found.name)
    told = run_drift(there, workflow, run) if run else template_drift(there, workflow, wanted)
    typer.echo(told, nl=False)
    return 1 if told else 0


@app.command("unschedule")
def unschedule_pipeline(
    name: SCHEDULE, namespace: NAMESPACE = "tuneloop", context: CONTEXT = None
) -> None:
    """End a schedule; its runs are kept."""
    from tuneloop.cluster.schedule import delete_schedule

    delete_schedule(connect_to_cluster(namespace, context), name)
    typer.echo(f"{name}: no longer scheduled")


@app.command("schedules")
def show_schedules(
    as_json: JSON = False, namespace: NAMESPACE = "tuneloop", context: CONTEXT = None
) -> None:
    """Show the schedules, and for their newest checks which run was started, or why none was."""
    from tuneloop.cluster.schedule import list_schedules

    found = list_schedules(connect_to_cluster(namespace, context))
    if as_json:
        return print_json({"schedules": found})
    columns = ("check", "phase", "result")
    for each in found:
        typer.echo(
            f"{each['name']}  {each['cron']}  last check: {each['last'] or 'never'}  {each['message']}".rstrip()
        )
        print_table(columns, (tuple(look.values()) for look in each["looks"]), cut=columns[-1])
    if not found:
        typer.echo(f"no schedules in namespace {namespace}")


@app.command("status")
def show_status(
    run: RUN, as_json: JSON = False, namespace: NAMESPACE = "tuneloop", context: CONTEXT = None
) -> None:
    """Show the stages of a run, their newest results, and what each waiting pod waits for.

    For its commits, even after its workflows are deleted: `tuneloop status RUN --store URL`.
    """
    from tuneloop.cli.show import show_stages
    from tuneloop.cluster.watch import read_status
    from tuneloop.runs.stages import list_cluster_stages

    seen = read_status(connect_to_cluster(namespace, context), run)
    if as_json:
        fields = {name: value for name, value in asdict(seen).items() if name != "nodes"}
        return print_json(
            {**fields, "stages": [asdict(s) for s in list_cluster_stages(seen.nodes, seen.waiting)]}
        )
    typer.echo(f"{run}  {seen.phase}  {seen.message}".rstrip())
    typer.echo(f"  workflows    {', '.join(seen.workflows)}")
    if seen.accelerator_seconds:
        typer.echo(f"  GPU seconds  {seen.accelerator_seconds:.0f}")
    for claim, told in seen.claims.items():
        typer.echo(f"  claim        {claim}: {told}")
    for node, why in seen.waiting.items():
        typer.echo(f"  waiting      {node}: {why}")
    show_stages(list_cluster_stages(seen.nodes, seen.waiting), places=0)


@app.command("logs")
def show_logs(
    run: RUN,
    stage: STAGE = None,
    follow: FOLLOW = False,
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> None:
    """Print the logs of a run's pods, each line with its stage; the logs of deleted pods are gone."""
    _print_logs(connect_to_cluster(namespace, context), run, stage, follow)


@app.command("stop")
def stop_run(
    run: RUN,
    timeout: Annotated[
        float, typer.Option(min=0, help="Seconds to wait for the pods to end.")
    ] = 120.0,
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> None:
    """Stop a run and release its resources; submitting it again continues where it stopped."""
    from tuneloop.cluster import submit as argo

    ended = argo.stop_run(connect_to_cluster(namespace, context), run, timeout=timeout)
    typer.echo(f"{run}: stopped" if ended else f"{run}: was not under way")


@app.command("claims")
def show_claims(namespace: NAMESPACE = "tuneloop", context: CONTEXT = None) -> None:
    """Show the claims of shared devices, and the runs that reserve them; releases those of ended runs."""
    from tuneloop.cluster.watch import refresh_claims

    found = refresh_claims(connect_to_cluster(namespace, context))
    for name, told in found.items():
        typer.echo(f"{name}  {told}")
    if not found:
        typer.echo(f"no claims in namespace {namespace}")


def _print_logs(
    there: Connection, run: str, stage: str | None, follow: bool, since: str | None = None
) -> dict[str, str]:
    """Print the pods' logs; return stage → its last line."""
    from tuneloop.cluster.watch import read_logs

    said = {}
    for name, line in read_logs(there, run, stage=stage, follow=follow, since=since):
        typer.echo(f"{name} | {line}")
        if line.strip():
            said[name] = line.strip()
    return said
