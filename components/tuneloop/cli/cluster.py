"""Commands that run a pipeline on a cluster with Argo, and look at such runs.

What they do is in `cluster/`: `submission.py`, `schedule.py`, `drift.py`, `watch.py`. Those for
Kubeflow Pipelines are in `kfp.py`. Keys of `--json` are fields of dataclasses
(`cluster/run_list.py: ListedRun`, `cluster/watch.py: Status`, `runs/stages.py: StageStatus`):
whoever renames a field renames a key of docs/commands.md.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
from tuneloop.core.errors import Unavailable, UserError
from tuneloop.kube.connection import Connection, connect_to_cluster, retry_until_available

if TYPE_CHECKING:
    from tuneloop.cluster.submission import Submission

app = typer.Typer(no_args_is_help=True, help="The runs on a cluster.")


# `extensions/sweep/command.py` calls it with the first five arguments by position.
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
    """Submit a pipeline to a cluster. First it is checked that the cluster has everything it needs.

    All that it lacks is printed, with the commands that mend it, and nothing is created. The name
    of a run that has ended resumes that run: its committed stages end at once.

    Exit code 0: it was submitted, and with --wait it has succeeded; with --wait the other codes are
    those of `tuneloop run`.
    """
    from tuneloop.cli.checks import check_limits
    from tuneloop.cluster.submission import Submission
    from tuneloop.cluster.submit import delete_forgotten_pods
    from tuneloop.config.loading import dump_workflow, find_pipeline

    # Typer has no default for a pair.
    origin, iteration = fork or (None, 0)
    submission = Submission.plan(
        find_pipeline(pipeline),
        run,
        store,
        config=config,
        sets=sets or (),
        priority=priority,
        namespace=namespace,
        fleet=fleet,
        origin=open_run(origin, store) if origin else None,
        iteration=iteration,
    )
    check_limits(submission.limits, ignore_limits)
    if dry_run:
        typer.echo("---\n".join(map(dump_workflow, submission.list_manifests())), nl=False)
        return 0
    if server:
        if fleet:
            remedy = "needs a kubeconfig; bring the graph up by `tuneloop fleet up`"
            raise UserError("--fleet", str(fleet), remedy)
        return _submit_to_server(submission, server, namespace, wait)
    cluster = connect_to_cluster(namespace, context)
    for warning in submission.check(cluster):
        typer.echo(f"note: {warning}", err=True)
    # After the checks of the cluster, so that --check reports those, too.
    if check:
        submission.check_name(cluster)
        typer.echo(f"{run}: can be submitted to {cluster.context}, namespace {namespace}")
        return 0
    start = time.monotonic()
    name = submission.create(cluster, typer.echo)
    options = f" --namespace {namespace}" if namespace != "tuneloop" else ""
    options += f" --context {context}" if context else ""
    typer.echo(f"{run}: submitted as workflow {name}; see `tuneloop cluster status {run}{options}`")
    delete_forgotten_pods(cluster)
    return _follow_to_end(cluster, run, name, start, options) if wait else 0


def _follow_to_end(
    cluster: Connection,
    run: str,
    workflow_name: str,
    start: float,
    options: str,
) -> int:
    """Print the logs of a run until it ends, and how it has ended; return the run's exit code.

    Args:
        cluster: where the run is.
        run: its name.
        workflow_name: the first workflow whose logs are printed.
        start: when it was submitted, by the monotonic clock.
        options: those that commands about the run need, as in `` --namespace mine``.
    """
    from tuneloop.cli.verdict import print_verdict
    from tuneloop.cluster.run_workflows import find_workflows
    from tuneloop.cluster.submit import wait_for_run

    try:
        last_lines = _print_logs(cluster, run, None, follow=True, since=workflow_name)
        # The logs end with the pods; the phase of the workflow follows a moment later.
        wait_for_run(cluster, run)
        workflows = retry_until_available(lambda: find_workflows(cluster, run))
    except Unavailable as error:
        remedy = f"see `tuneloop cluster status {run}{options}`"
        raise Unavailable(f"{error}; the run itself goes on without it: {remedy}") from error
    return print_verdict(run, workflows, time.monotonic() - start, last_lines, options)


def _submit_to_server(submission: "Submission", url: str, namespace: str, wait: bool) -> int:
    """Submit through an Argo server; return the exit code.

    The server is used for nothing else: neither the cluster's checks nor the logs.
    """
    from tuneloop.cli.verdict import print_verdict
    from tuneloop.cluster.argo_server import Server

    submission.record_origin()
    run = submission.run
    server = Server(url, namespace)
    start = time.monotonic()
    name = server.submit(submission.workflow, run)
    typer.echo(f"{run}: submitted as workflow {name} to {url}")
    if not wait:
        return 0
    server.wait(run)
    return print_verdict(run, server.workflows(run), time.monotonic() - start, {})


def schedule_pipeline(
    pipeline: PIPELINE,
    name: Annotated[
        str,
        typer.Option(
            "--name",
            help="Name of the schedule; each run adds the digest of its data, or its time.",
        ),
    ],
    store: REMOTE_STORE,
    cron: Annotated[
        str,
        typer.Option("--cron", help="When to check for new data, or to run, as in '0 3 * * *'."),
    ],
    timezone: Annotated[
        str | None, typer.Option("--timezone", help="Zone of --cron, as in Europe/Prague.")
    ] = None,
    always: Annotated[
        bool, typer.Option("--always", help="Run at each of these times, also on the same data.")
    ] = False,
    promote: Annotated[
        bool,
        typer.Option(
            "--promote",
            help="Begin each run with the last good result, which is promoted as --name.",
        ),
    ] = False,
    minima: Annotated[
        list[str] | None,
        typer.Option(
            "--min", metavar="METRIC=VALUE", help="With --promote: what a result must reach, too."
        ),
    ] = None,
    config: CONFIG = None,
    sets: SETS = None,
    priority: PRIORITY = None,
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> None:
    """Run a pipeline at given times: always, or on new data.

    The same name again changes the schedule.

    A check makes the prompts again and compares their digest. It starts no run while one of this
    schedule is active. With --promote it first promotes what the last run exports, if its mean
    reward on held-out prompts is at least that of the policy it began with.
    """
    from tuneloop.cli.checks import check_limits, configure_remote
    from tuneloop.cluster.schedule import Trigger, apply_schedule
    from tuneloop.config.loading import find_pipeline
    from tuneloop.planning.limits import find_limits, read_pods
    from tuneloop.planning.pod_paths import list_mounted_paths
    from tuneloop.runs.promotions import parse_minima

    if minima and not promote:
        raise UserError("--min", ", ".join(minima), "is for --promote: give both, or neither")
    trigger = Trigger(
        is_timed=always,
        minima=parse_minima(minima or ()) if promote else None,
    )
    definition = find_pipeline(pipeline)
    settings = configure_remote(definition, config, sets, store, keeps_promoted=True)
    workflow = definition.build(settings)
    # It runs when nobody watches: an estimate that the user would ignore counts, too.
    mounts = list_mounted_paths(workflow)
    limits = find_limits(settings, workflow, read_pods(settings), mounts=mounts)
    check_limits(limits, ignore=False)
    apply_schedule(
        connect_to_cluster(namespace, context),
        workflow,
        name=name,
        store=store,
        cron=cron,
        timezone=timezone,
        priority=priority,
        trigger=trigger,
    )
    action = "starts a run" if always else "checks for new data"
    typer.echo(f"{name}: {action} at {cron}; `tuneloop cluster unschedule {name}` ends that")


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
    priority: PRIORITY = None,
    fleet: Annotated[
        Path | None,
        typer.Option("--fleet", help="With --run: the manifest with which it was submitted."),
    ] = None,
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> int:
    """Compare a cluster with the rendered pipeline. Exits with 0: equal; 1: different; more: no
    answer.

    Prints the lines that differ, as `diff` does; what the controller or the API server adds is left
    out. Settings, the priority class and the fleet are given as they were to `submit` or `schedule`.
    """
    from tuneloop.cli.checks import configure_remote
    from tuneloop.cluster.drift import find_store, run_drift, template_drift
    from tuneloop.cluster.graph_end import add_graph_end
    from tuneloop.cluster.run_workflows import template_name
    from tuneloop.cluster.submission import list_fleet_settings, read_graph
    from tuneloop.config.loading import find_pipeline
    from tuneloop.formats.stored_models import RUN as RUN_SCHEME

    if fleet and not run:
        raise UserError("--fleet", str(fleet), "is for --run: give both, or neither")
    definition = find_pipeline(pipeline)
    assignments = list(sets or ())
    if fleet and run:
        assignments = list_fleet_settings(read_graph(fleet, run, namespace)) + assignments
    settings = definition.configure(config, assignments)
    cluster = connect_to_cluster(namespace, context)
    name = template or template_name(definition.name)
    if str(getattr(settings, "base_model", "")).startswith(RUN_SCHEME):
        # What is live was rendered with the model that its store has under this reference.
        store = find_store(cluster, run, name)
        if store:
            settings = configure_remote(
                definition, config, assignments, store, keeps_promoted=run is None
            )
    workflow = definition.build(settings)
    if fleet:
        add_graph_end(workflow, settings.cluster)  # type: ignore[attr-defined]
    if run:
        differences = run_drift(cluster, workflow, run, priority)
    else:
        differences = template_drift(cluster, workflow, name, priority)
    typer.echo(differences, nl=False)
    return 1 if differences else 0


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

    schedules = list_schedules(connect_to_cluster(namespace, context))
    if as_json:
        print_json({"schedules": schedules})
        return
    for schedule in schedules:
        title = "{name}  {cron}  last check: {last}".format(
            name=schedule["name"],
            cron=schedule["cron"],
            last=schedule["last"] or "never",
        )
        typer.echo(f"{title}  {schedule['message']}".rstrip())
        rows = [(look["time"], look["phase"], look["said"]) for look in schedule["looks"]]
        print_table(("check", "phase", "result"), rows, cut="result")
    if not schedules:
        typer.echo(f"no schedules in namespace {namespace}")


# `show_status` calls it, too, with all arguments by position.
@app.command("list")
def list_runs(
    as_json: JSON = False, namespace: NAMESPACE = "tuneloop", context: CONTEXT = None
) -> None:
    """List the runs of a namespace that still have a workflow, the newest first."""
    from tuneloop.cluster.run_list import list_runs as read_runs
    from tuneloop.runs.summary import format_duration

    runs = read_runs(connect_to_cluster(namespace, context))
    if as_json:
        print_json({"runs": [asdict(run) for run in runs]})
        return
    rows = [
        (
            run.run,
            run.pipeline,
            run.phase,
            str(len(run.workflows)),
            format_duration(time.time() - run.created),
            run.store,
            run.message,
        )
        for run in runs
    ]
    columns = ("run", "pipeline", "phase", "workflows", "age", "store", "message")
    if rows:
        print_table(columns, rows, right=("workflows", "age"), cut="message")
    else:
        typer.echo(f"no runs in namespace {namespace}")


@app.command("status")
def show_status(
    run: Annotated[str | None, typer.Argument(help="The run's name; none: list the runs.")] = None,
    as_json: JSON = False,
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> None:
    """Show the stages of a run, their newest results, and what each waiting pod waits for.

    For its commits, even after its workflows are deleted: `tuneloop status RUN --store URL`.
    """
    from tuneloop.cli.show import show_stages
    from tuneloop.cluster.watch import read_status
    from tuneloop.runs.stages import list_cluster_stages

    if run is None:
        list_runs(as_json, namespace, context)
        return
    status = read_status(connect_to_cluster(namespace, context), run)
    stages = list_cluster_stages(status.nodes, status.waiting)
    if as_json:
        fields = asdict(status)
        # A node a pod: what they say is in the stages, whose number does not grow with the loop.
        del fields["nodes"]
        print_json(fields | {"stages": [asdict(stage) for stage in stages]})
        return
    typer.echo(f"{run}  {status.phase}  {status.message}".rstrip())
    typer.echo(f"  workflows    {', '.join(status.workflows)}")
    if status.accelerator_seconds:
        typer.echo(f"  GPU seconds  {status.accelerator_seconds:.0f}")
    for claim, description in status.claims.items():
        typer.echo(f"  claim        {claim}: {description}")
    for node, reason in status.waiting.items():
        typer.echo(f"  waiting      {node}: {reason}")
    if status.denied_reads:
        typer.echo(f"  not seen     no right to {', '.join(status.denied_reads)}")
    show_stages(stages, places=0)


@app.command("logs")
def show_logs(
    run: RUN,
    stage: STAGE = None,
    follow: FOLLOW = False,
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> None:
    """Print the logs of a run's pods, each line with its stage; the logs of deleted pods are
    gone.
    """
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
    """Stop a run and release its resources; submitting it again continues where it stopped.

    Its stages commit what a resume needs. Exit code 75: its pods have not ended in time.
    """
    from tuneloop.cluster import submit

    count = submit.stop_run(connect_to_cluster(namespace, context), run, timeout=timeout)
    typer.echo(f"{run}: stopped" if count else f"{run}: was not under way")


@app.command("claims")
def show_claims(namespace: NAMESPACE = "tuneloop", context: CONTEXT = None) -> None:
    """Show the claims of shared devices, and the runs that reserve them; releases those of ended
    runs.
    """
    from tuneloop.cluster.watch import refresh_claims

    claims = refresh_claims(connect_to_cluster(namespace, context))
    for name, description in claims.items():
        typer.echo(f"{name}  {description}")
    if not claims:
        typer.echo(f"no claims in namespace {namespace}")


def _print_logs(
    cluster: Connection,
    run: str,
    stage: str | None,
    follow: bool,
    since: str | None = None,
) -> dict[str, str]:
    """Print the pods' logs, and return stage → its last line that is not empty."""
    from tuneloop.cluster.watch import read_logs

    last_lines: dict[str, str] = {}
    for name, line in read_logs(cluster, run, stage=stage, follow=follow, since=since):
        typer.echo(f"{name} | {line}")
        # The last line of a traceback says what went wrong; empty lines may follow it.
        if line.strip():
            last_lines[name] = line.strip()
    return last_lines
