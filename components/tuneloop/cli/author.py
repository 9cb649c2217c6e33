"""Commands that look at a pipeline and run nothing."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.cli.arguments import CONFIG, IGNORE_LIMITS, OUTPUT, PIPELINE, SETS
from tuneloop.cli.inspect import open_run
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import UserError
from tuneloop.training.devices import DEVICES


def plan_pipeline(
    pipeline: PIPELINE,
    config: CONFIG = None,
    sets: SETS = None,
    measured: Annotated[
        str | None, typer.Option(metavar="RUN", help="Use the times of this run's stages.")
    ] = None,
    store: Annotated[str, typer.Option(help="Store of that run.")] = "runs",
    price: Annotated[
        float | None,
        typer.Option(
            min=0, help="Of an accelerator hour: with --measured or --device, show the cost."
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help=f"Estimate hours by arithmetic for it: {', '.join(DEVICES)}."
        ),
    ] = None,
    ignore_limits: IGNORE_LIMITS = False,
) -> None:
    """Show what a run will do and need. Graph, pods, accelerators, steps, tokens; memory with the arithmetic."""
    from rich.console import Console

    from tuneloop.cli.checks import check_limits, print_followed
    from tuneloop.config.loading import find_pipeline
    from tuneloop.config.rules import choose_machine
    from tuneloop.planning.disk import describe_footprint, estimate_footprint
    from tuneloop.planning.limits import find_limits
    from tuneloop.planning.plan import render_plan

    found = find_pipeline(pipeline)
    machine = choose_machine(found.read_values(config, sets or ()))
    draft = found.configure_for(machine, config, sets or ())
    configured = draft.settings
    built = found.build(configured)
    if price is not None and measured is None and device is None:
        raise UserError("--price", price, "needs seconds: give --measured RUN or --device NAME")
    if device is not None and measured is not None:
        raise UserError(
            "--device", device, "estimates without a measured run: leave out --measured"
        )
    if device is not None:
        from tuneloop.planning.arithmetic import estimate_seconds

        seconds, lines = estimate_seconds(built, device)
    run = open_run(measured, store) if measured is not None else None
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 200)
    console.print(render_plan(found.name, built))
    footprint = estimate_footprint(built)
    if footprint:
        typer.echo("\n".join(describe_footprint(footprint)))
    print_followed(draft)
    if run or device is not None:
        from tuneloop.planning.cost import estimate_cost, read_seconds

        if run:
            seconds = read_seconds(run)
            lines = []
        how = (
            ("at most", f"as {run.name} took")
            if run
            else ("about", f"by arithmetic for {device}, not measured")
        )
        typer.echo("\n".join([*estimate_cost(built, seconds, *how, price), *lines]))
    check_limits(find_limits(configured, built, machine), ignore=ignore_limits)


def lint_pipeline(pipeline: PIPELINE, config: CONFIG = None, sets: SETS = None) -> int:
    """Check the rendered workflow by tuneloop's rules. For Argo's: `render -o FILE`, `argo lint --offline FILE`."""
    from tuneloop.argo.lint import lint_workflow
    from tuneloop.config.loading import find_pipeline
    from tuneloop.planning.limits import find_limits, read_pods

    found = find_pipeline(pipeline)
    settings = found.configure(config, sets or ())
    workflow = found.build(settings)
    limits = find_limits(settings, workflow, read_pods(settings))
    problems = [*lint_workflow(workflow), *(limit.error for limit in limits)]
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    typer.echo(f"{found.name}: {len(problems)} problems")
    return 2 if problems else 0


def render_pipeline(
    pipeline: PIPELINE,
    config: CONFIG = None,
    sets: SETS = None,
    output: OUTPUT = None,
    template: Annotated[
        bool,
        typer.Option(
            "--template", help="A WorkflowTemplate, named by pipeline and version, for GitOps."
        ),
    ] = False,
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Print only its rollout servers: a Deployment, and a Service."
        ),
    ] = None,
) -> None:
    """Print the Argo Workflow as YAML. It is what `run` executes and a cluster takes; equal settings, equal bytes."""
    from tuneloop.argo.jobset import dump_manifest
    from tuneloop.cluster.run_workflows import as_template, template_name
    from tuneloop.cluster.serving import render_servers
    from tuneloop.config.loading import dump_workflow, find_pipeline

    found = find_pipeline(pipeline)
    workflow = found.build(configured := found.configure(config, sets or ()))
    if servers is not None and template:
        raise UserError("--template", "true", "cannot be combined with --servers: leave one out")
    if servers is not None:
        text = "---\n".join(map(dump_manifest, render_servers(workflow, servers, configured)))
    else:
        text = dump_workflow(
            as_template(workflow, template_name(found.name)) if template else workflow
        )
    print_or_write_text(text, output)


def print_or_write_text(text: str, output: Path | None) -> None:
    """Print `text`, or write it to the file `output`. Raises UserError where it cannot be written."""
    if output is None:
        return typer.echo(text, nl=False)
    try:
        output.write_text(text)
    except OSError as error:
        raise UserError("--output", str(output), f"cannot be written ({error.strerror})") from error


def print_schema(
    pipeline: PIPELINE,
    section: Annotated[
        str, typer.Argument(help="Only settings below this key, as in rollout or cluster.trainer.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="For programs: JSON Schema, with types and limits.")
    ] = False,
) -> None:
    """Print the settings of a pipeline. A line each: key, default and meaning."""
    from tuneloop.config.listing import list_settings
    from tuneloop.config.loading import find_pipeline

    config = find_pipeline(pipeline).Config
    if as_json:
        typer.echo(json.dumps(config.model_json_schema(), indent=2))
        return
    settings = [
        setting
        for setting in list_settings(config)
        if setting.key == section or setting.key.startswith(f"{section}." if section else "")
    ]
    if not settings:
        known = ", ".join(
            dict.fromkeys(item.key.partition(".")[0] for item in list_settings(config))
        )
        raise UserError("SECTION", section, f"no setting is below it; there are {known}")
    rows = [(setting.key, setting.default, setting.meaning) for setting in settings]
    print_table(("setting", "default", "meaning"), rows, cut="meaning")
