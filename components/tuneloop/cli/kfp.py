"""Commands for Kubeflow Pipelines: render, submit, schedule, and look at runs there.

What they do is in `kfp/client.py` and `kfp/schedule.py`. ``tuneloop kfp doctor`` is in `doctor.py`,
and `watch.py` and `ui.py` reach runs there by `connect_to_executor`.
"""

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuneloop.cli.arguments import (
    CONFIG,
    JSON,
    OUTPUT,
    PIPELINE,
    REMOTE_STORE,
    RUN,
    SCHEDULE,
    SETS,
    SUBMITTED,
)
from tuneloop.cli.author import print_or_write_text
from tuneloop.cli.inspect import print_json
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import UserError
from tuneloop.kfp import client
from tuneloop.kube.connection import Connection, connect_to_cluster

if TYPE_CHECKING:
    from tuneloop.ui.describe import Ask

ENDPOINT = Annotated[
    str | None,
    typer.Option(envvar="KF_PIPELINES_ENDPOINT", help="URL of the KFP API, or of its UI."),
]
ROOT = Annotated[
    str | None,
    typer.Option(
        "--pipeline-root", help="Where KFP keeps handles and previews; default: the backend's."
    ),
]
EXPERIMENT = Annotated[str, typer.Option("--experiment", help="Experiment that lists the run.")]

app = typer.Typer(no_args_is_help=True, help="Runs on Kubeflow Pipelines.")


@app.command("render")
def render_pipeline(
    pipeline: PIPELINE,
    config: CONFIG = None,
    sets: SETS = None,
    output: OUTPUT = None,
    manifest: Annotated[
        bool,
        typer.Option(
            "--manifest", help="Kubernetes objects (Pipeline, PipelineVersion), as for GitOps."
        ),
    ] = False,
) -> None:
    """Print the compiled pipeline as YAML. It can be uploaded in the UI; equal settings give equal
    bytes.
    """
    # kfp compiles into a file, which ends with the block.
    compiled, _ = build_kfp_pipeline(pipeline, config, sets)
    with client.compiled_package(compiled, manifest=manifest) as package:
        print_or_write_text(Path(package).read_text(), output)


@app.command("submit")
def submit_run(
    pipeline: PIPELINE,
    run: SUBMITTED,
    store: REMOTE_STORE,
    endpoint: ENDPOINT = None,
    config: CONFIG = None,
    sets: SETS = None,
    root: ROOT = None,
    experiment: EXPERIMENT = "tuneloop",
    cache: Annotated[
        bool, typer.Option("--cache/--no-cache", help="Let KFP skip tasks that have run before.")
    ] = True,
) -> None:
    """Start a run, or resume the one of that name.

    A run that is resumed has the same store, so that its committed stages end at once. It is not
    followed: `tuneloop kfp status` shows its tasks, and `tuneloop watch --kfp URL` its progress.
    """
    from tuneloop.runs.records import check_name

    # KFP would take any name, but the folder of the run in the store has it, too.
    check_name(run, "--run")
    compiled, _ = build_kfp_pipeline(pipeline, config, sets, store)
    run_id = client.submit_run(
        client.connect_to_kfp(endpoint),
        compiled,
        run=run,
        store=store,
        root=root,
        cache=cache,
        experiment=experiment,
    )
    typer.echo(f"{run}: submitted as {run_id}; see `tuneloop kfp status {run}`")


@app.command("schedule")
def schedule_pipeline(
    pipeline: PIPELINE,
    name: Annotated[
        str,
        typer.Option("--name", help="Of the schedule; each run adds digits of its data's digest."),
    ],
    store: REMOTE_STORE,
    cron: Annotated[
        str, typer.Option("--cron", help="Five fields, as in '0 3 * * *'; KFP's seconds are 0.")
    ],
    config: CONFIG = None,
    sets: SETS = None,
    endpoint: ENDPOINT = None,
    root: ROOT = None,
    experiment: EXPERIMENT = "tuneloop",
) -> None:
    """Check for new data at given times, and run a pipeline when there is some.

    A check makes the prompts again and compares their digest; no run starts while one of this
    schedule is active.
    """
    from tuneloop.kfp.schedule import create_schedule

    compiled, settings = build_kfp_pipeline(pipeline, config, sets, store, keeps_promoted=True)
    create_schedule(
        client.connect_to_kfp(endpoint),
        compiled,
        settings,
        name=name,
        cron=cron,
        store=store,
        root=root,
        experiment=experiment,
    )
    typer.echo(f"{name}: checks for new data at {cron}; `tuneloop kfp unschedule {name}` ends that")


@app.command("unschedule")
def unschedule_pipeline(name: SCHEDULE, endpoint: ENDPOINT = None) -> None:
    """End a schedule; its runs are kept."""
    from tuneloop.kfp.schedule import delete_schedule

    delete_schedule(client.connect_to_kfp(endpoint), name)
    typer.echo(f"{name}: no longer scheduled")


@app.command("status")
def show_status(run: RUN, as_json: JSON = False, endpoint: ENDPOINT = None) -> int:
    """Show the tasks of a run. Ends with 1 if the run has failed.

    For what it has committed: `tuneloop status RUN --store URL`.
    """
    record = client.find_run(client.connect_to_kfp(endpoint), run)
    tasks = client.list_tasks(record)
    if as_json:
        descriptions = [asdict(task) for task in tasks]
        print_json({"run": run, "phase": record.state, "id": record.run_id, "tasks": descriptions})
    else:
        typer.echo(f"{run}  {record.state}  {record.run_id}")
        rows = [(task.task, task.phase, f"{task.seconds:.0f}", task.message) for task in tasks]
        columns = ("task", "state", "seconds", "message")
        print_table(columns, rows, right=("seconds",), cut="message")
    return 1 if record.state == "FAILED" else 0


@app.command("logs")
def show_logs(
    run: RUN,
    task: Annotated[str | None, typer.Argument(help="A task's name in the graph.")] = None,
    endpoint: ENDPOINT = None,
) -> None:
    """Print the logs of a run's tasks, each line with its task; the logs of deleted pods are
    gone.
    """
    for name, line in client.read_logs(client.connect_to_kfp(endpoint), run, task):
        typer.echo(f"{name} | {line}")


@app.command("stop")
def stop_run(run: RUN, endpoint: ENDPOINT = None) -> None:
    """Stop a run; submitting it again continues where it stopped."""
    ended = client.stop_run(client.connect_to_kfp(endpoint), run)
    typer.echo(f"{run}: stopped" if ended else f"{run}: was not under way")


def build_kfp_pipeline(
    pipeline: str,
    config: list[Path] | None,
    sets: list[str] | None,
    store: str | None = None,
    *,
    keeps_promoted: bool = False,
) -> tuple[Any, Any]:
    """Build a pipeline by name, and return it in the form that kfp compiles, and its settings.

    With a store it is about to be sent: settings that name paths of this machine are refused, and a
    base model ``run://…`` is looked up there, as `Pipeline.configure` does with `keeps_promoted`.

    Raises:
        UserError: the pipeline has no form for KFP, kfp is not installed, a setting is wrong, or
            the run would not fit its pods.
    """
    from tuneloop.cli.checks import check_limits, configure_remote
    from tuneloop.config.loading import find_pipeline
    from tuneloop.planning.limits import find_limits, read_pods
    from tuneloop.planning.pod_paths import list_mounted_paths

    definition = find_pipeline(pipeline)
    if not hasattr(definition.module, "build_kfp"):
        raise UserError(
            "pipeline", pipeline, "has no build_kfp(config): it cannot run on Kubeflow Pipelines"
        )
    client.check_kfp_is_installed()
    settings: Any
    if store:
        settings = configure_remote(definition, config, sets, store, keeps_promoted=keeps_promoted)
    else:
        settings = definition.configure(config, sets or ())
    compiled = definition.module.build_kfp(settings)
    # What the pods need is read from the Argo form: both are made from the same stages.
    workflow = definition.build(settings)
    mounts = list_mounted_paths(workflow) if store else None
    limits = find_limits(settings, workflow, read_pods(settings), mounts=mounts)
    check_limits(limits, ignore=False)
    return compiled, settings


def connect_to_executor(
    namespace: str | None, context: str | None, kfp: str | None
) -> "tuple[Connection | None, Ask | None]":
    """Connect to the executor of runs elsewhere.

    Args:
        namespace: of the runs, if a cluster with Argo executes them.
        context: of the kubeconfig.
        kfp: the URL of Kubeflow Pipelines' API, if that executes them.

    Returns:
        The cluster, and a function that asks Kubeflow Pipelines; at least one of them is None.

    Raises:
        UserError: both are given, the URL is empty, or the executor does not answer.
    """
    if kfp is not None and (namespace or not kfp):
        raise UserError(
            "--kfp",
            kfp,
            "is the URL for runs on KFP, and --namespace is for runs on Argo: give only one",
        )
    if kfp:
        # Only here: it needs kfp, which most users of `watch` and `ui` do not have.
        from tuneloop.kfp.progress import describe_progress

        backend = client.connect_to_kfp(kfp, "--kfp", "give the API's address")
        return None, partial(describe_progress, backend)
    return (connect_to_cluster(namespace, context) if namespace else None), None
