"""The command that checks a cluster before anything is submitted: for Argo, and for Kubeflow Pipelines."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tuneloop.cli import kfp
from tuneloop.cli.arguments import CONFIG, CONTEXT, JSON, NAMESPACE, PRIORITY, SETS
from tuneloop.cli.inspect import print_json
from tuneloop.core.errors import UserError
from tuneloop.kfp.client import check_kfp_is_installed
from tuneloop.kube.connection import Connection, connect_to_cluster

if TYPE_CHECKING:
    from tuneloop.cluster.doctor import Check

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
    """Say what a cluster lacks for a pipeline, each with the command that fixes it. Changes nothing there.

    Exits with 0: nothing is refused; 2: something is.
    """
    from tuneloop.cluster.doctor import check_argo, describe_queued_stage
    from tuneloop.cluster.run_workflows import prepare_workflow
    from tuneloop.config.loading import find_pipeline

    _check_settings(pipeline, config, sets)
    found = find_pipeline(pipeline) if pipeline else None
    workflow = (
        found.build(found.configure(config, sets or ())) if found else describe_queued_stage()
    )
    there = connect_to_cluster(namespace, context)
    url = store or "s3://bucket/runs"
    made = prepare_workflow(
        workflow, run="doctor", store=url, namespace=namespace, priority=priority
    )
    return _show("argo", there, check_argo(there, made, store), as_json)


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
    """Say what a backend lacks for a pipeline, each with the command that fixes it. Changes nothing there.

    Asks the Kubernetes API of the kubeconfig. Exits with 0: nothing is refused; 2: something is.
    """
    check_kfp_is_installed()
    from tuneloop.kfp.doctor import check_kfp

    _check_settings(pipeline, config, sets)
    built, settings = kfp.build_kfp_pipeline(pipeline, config, sets) if pipeline else (None, None)
    there = connect_to_cluster(namespace, context)
    return _show("kfp", there, check_kfp(there, built, settings, endpoint=endpoint), as_json)


def _check_settings(pipeline: str | None, config: Path | None, sets: list[str] | None) -> None:
    if pipeline is None and (config or sets):
        raise UserError(
            "--set" if sets else "--config", sets or str(config), "needs a pipeline: name one"
        )


def _show(target: str, there: Connection, checks: "list[Check]", as_json: bool) -> int:
    """Print the checks, a line each, with the remedy on the next; return the exit code."""
    from tuneloop.cluster.doctor import NOT_CHECKED, REFUSED, WARNING

    outcomes = [check.outcome for check in checks]
    if as_json:
        place = {"target": target, "context": there.context, "namespace": there.namespace}
        print_json({**place, "checks": [asdict(check) for check in checks]})
    else:
        width = max(len(check.subject) for check in checks)
        for check in checks:
            mark = "-" if check.outcome == NOT_CHECKED else check.outcome
            typer.echo(f"{mark:<8} {check.subject:<{width}}  {check.found}")
            if check.remedy:
                typer.echo(f"{'':<8}   {check.remedy}")
        typer.echo(f"{outcomes.count(REFUSED)} refused, {outcomes.count(WARNING)} warnings")
    return 2 if REFUSED in outcomes else 0
