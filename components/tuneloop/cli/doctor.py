"""The command that checks a cluster before anything is submitted: for Argo, and for Kubeflow
Pipelines.

The checks are in `cluster/doctor.py` and `kfp/doctor.py`. What `submit` refuses is checked by
`cluster/preflight.py`, whose checks `cluster/doctor.py` shows, too.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuneloop.cli import kfp
from tuneloop.cli.arguments import CONFIG, CONTEXT, JSON, NAMESPACE, PRIORITY, SETS
from tuneloop.cli.inspect import print_json
from tuneloop.core.errors import UserError
from tuneloop.kfp.client import check_kfp_is_installed
from tuneloop.kube.connection import Connection, connect_to_cluster

if TYPE_CHECKING:
    from tuneloop.cluster.doctor import Check
    from tuneloop.workflow.credentials import StoreCredentials

PIPELINE = Annotated[
    str | None,
    typer.Argument(help="A pipeline's name or file; without it: what all pipelines need."),
]


def diagnose_argo(
    pipeline: PIPELINE = None,
    store: Annotated[
        str | None, typer.Option(help="Store of the run; tested if this machine has credentials.")
    ] = None,
    config: CONFIG = None,
    sets: SETS = None,
    priority: PRIORITY = None,
    as_json: JSON = False,
    namespace: NAMESPACE = "tuneloop",
    context: CONTEXT = None,
) -> int:
    """Say what a cluster lacks for a pipeline. Each comes with the command that fixes it. Nothing is
    changed there.

    Exits with 0: nothing is refused; 2: something is. What this account may not read is said as not
    checked.
    """
    from tuneloop.cluster.doctor import check_argo, describe_queued_stage
    from tuneloop.cluster.run_workflows import prepare_workflow
    from tuneloop.config.loading import find_pipeline
    from tuneloop.config.pipeline import check_store

    _check_settings(pipeline, config, sets)
    workflow = describe_queued_stage()
    credentials: StoreCredentials | None = None
    if pipeline:
        definition = find_pipeline(pipeline)
        settings: Any = definition.configure(config, sets or ())
        workflow = definition.build(settings)
        credentials = settings.cluster.store_credentials
        check_store(settings, store or "")
    cluster = connect_to_cluster(namespace, context)
    prepared = prepare_workflow(
        workflow,
        run="doctor",
        # A workflow has a store; nothing is looked up there unless the user names one.
        store=store or "s3://bucket/runs",
        namespace=namespace,
        priority=priority,
    )
    checks = check_argo(cluster, prepared, store, credentials)
    return _print_checks("argo", cluster, checks, as_json)


@kfp.app.command("doctor")
def diagnose_kfp(
    pipeline: PIPELINE = None,
    config: CONFIG = None,
    sets: SETS = None,
    endpoint: kfp.ENDPOINT = None,
    as_json: JSON = False,
    namespace: NAMESPACE = "kubeflow",
    context: CONTEXT = None,
) -> int:
    """Say what a backend lacks for a pipeline, each with the command that fixes it. Changes nothing
    there.

    Asks the Kubernetes API of the kubeconfig. Exits with 0: nothing is refused; 2: something is.
    """
    check_kfp_is_installed()
    # It needs kfp, so that this is said first where that is missing.
    from tuneloop.kfp.doctor import check_kfp

    _check_settings(pipeline, config, sets)
    compiled = settings = None
    if pipeline:
        compiled, settings = kfp.build_kfp_pipeline(pipeline, config, sets)
    cluster = connect_to_cluster(namespace, context)
    checks = check_kfp(cluster, compiled, settings, endpoint=endpoint)
    return _print_checks("kfp", cluster, checks, as_json)


def _check_settings(
    pipeline: str | None, config: list[Path] | None, sets: list[str] | None
) -> None:
    """Raise UserError for settings without a pipeline that has them."""
    if pipeline:
        return
    if sets:
        raise UserError("--set", sets, "needs a pipeline: name one")
    if config:
        raise UserError("--config", str(config[0]), "needs a pipeline: name one")


def _print_checks(target: str, cluster: Connection, checks: "list[Check]", as_json: bool) -> int:
    """Print the checks, a line each, with the remedy on the next; return the exit code.

    Args:
        target: ``argo`` or ``kfp``.
        cluster: that was checked.
        checks: in the order in which they are printed.
        as_json: print an object for programs, with the keys of docs/commands.md.
    """
    from tuneloop.cluster.doctor import NOT_CHECKED, REFUSED, WARNING

    outcomes = [check.outcome for check in checks]
    if as_json:
        description = {
            "target": target,
            "context": cluster.context,
            "namespace": cluster.namespace,
            "checks": [asdict(check) for check in checks],
        }
        print_json(description)
    else:
        width = max(len(check.subject) for check in checks)
        for check in checks:
            mark = "-" if check.outcome == NOT_CHECKED else check.outcome
            typer.echo(f"{mark:<8} {check.subject:<{width}}  {check.found}")
            if check.remedy:
                typer.echo(f"{'':<8}   {check.remedy}")
        typer.echo(f"{outcomes.count(REFUSED)} refused, {outcomes.count(WARNING)} warnings")
    return 2 if REFUSED in outcomes else 0
