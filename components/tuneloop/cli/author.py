"""Commands that look at a pipeline and run nothing: `plan`, `lint`, `render` and `schema`.

What they print is made below: `planning/`, `argo/lint.py`, `config/commented_yaml.py`. The
counterpart of `render` for Kubeflow Pipelines is in `kfp.py`. `cli/__init__.py: COMMANDS` names the
commands.

`plan` alone takes a store, and resolves a base model `run://…` by it. The others leave such a
reference to what starts the run: `run`, and for pods `cli/checks.py: configure_remote`.
"""

import json
import sys
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from tuneloop.cli.arguments import CONFIG, IGNORE_LIMITS, OUTPUT, PIPELINE, SETS
from tuneloop.cli.inspect import open_run
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.core.wording import format_count
from tuneloop.training.devices import DEVICES


def plan_pipeline(
    pipeline: PIPELINE,
    config: CONFIG = None,
    sets: SETS = None,
    measured: Annotated[
        str | None, typer.Option(metavar="RUN", help="Use the times of this run's stages.")
    ] = None,
    store: Annotated[
        str, typer.Option(help="Store of that run, and of a base model run://RUN.")
    ] = "runs",
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
    """Show what a run will do and need. Graph, pods, accelerators, steps, tokens; memory with the
    arithmetic.

    Nothing is run and nothing is written. The settings that follow the base model are shown with
    the reason for each. Exit code 2: the run would not fit the machine or the pods.
    """
    from rich.console import Console

    from tuneloop.cli.checks import check_limits, print_followed
    from tuneloop.config.loading import find_pipeline
    from tuneloop.config.rules import choose_machine
    from tuneloop.planning.disk import describe_footprint, estimate_footprint
    from tuneloop.planning.limits import find_limits
    from tuneloop.planning.plan import render_plan

    definition = find_pipeline(pipeline)
    machine = choose_machine(definition.read_values(config, sets or ()))
    configured = definition.configure_for(machine, config, sets or (), store)
    workflow = definition.build(configured.settings)
    # A price is that of an hour: without hours there is no cost.
    if price is not None and measured is None and device is None:
        raise UserError("--price", price, "needs seconds: give --measured RUN or --device NAME")
    if device is not None and measured is not None:
        raise UserError(
            "--device", device, "estimates without a measured run: leave out --measured"
        )
    # The cost is computed before anything is printed: a mistake in its options is all one sees.
    cost: list[str] = []
    if device is not None:
        cost = _describe_estimated_cost(workflow, device, price)
    elif measured is not None:
        cost = _describe_measured_cost(workflow, measured, store, price)
    # A pipe has no width: a table that is cut to 80 columns would be useless in a file.
    width = None if sys.stdout.isatty() else 200
    console = Console(highlight=False, soft_wrap=True, width=width)
    console.print(render_plan(definition.name, workflow))
    footprint = estimate_footprint(workflow)
    if footprint:
        typer.echo("\n".join(describe_footprint(footprint)))
    print_followed(configured)
    if cost:
        typer.echo("\n".join(cost))
    limits = find_limits(configured.settings, workflow, machine)
    check_limits(limits, ignore=ignore_limits)


def _describe_estimated_cost(
    workflow: JsonMapping,
    device: str,
    price: float | None,
) -> list[str]:
    """Describe the accelerator hours of a workflow on a device, by arithmetic, in lines.

    Raises:
        UserError: the device is unknown, or the arithmetic lacks a size of the model.
    """
    from tuneloop.planning.arithmetic import estimate_seconds
    from tuneloop.planning.cost import estimate_cost

    seconds, assumptions = estimate_seconds(workflow, device)
    source = f"by arithmetic for {device}, not measured"
    return [*estimate_cost(workflow, seconds, "about", source, price), *assumptions]


def _describe_measured_cost(
    workflow: JsonMapping,
    run_name: str,
    store: str,
    price: float | None,
) -> list[str]:
    """Describe the accelerator hours of a workflow whose stages take as long as those of a run."""
    from tuneloop.planning.cost import estimate_cost, read_seconds

    run = open_run(run_name, store)
    seconds: Mapping[str, float] = read_seconds(run)
    return list(estimate_cost(workflow, seconds, "at most", f"as {run.name} took", price))


def lint_pipeline(pipeline: PIPELINE, config: CONFIG = None, sets: SETS = None) -> int:
    """Check the rendered workflow by tuneloop's rules. For Argo's: `render -o FILE`, `argo lint
    --offline FILE`.

    A line on standard error for each problem. Exit code 0: there is none; 2: there are some.
    """
    from tuneloop.argo.lint import lint_workflow
    from tuneloop.config.loading import find_pipeline
    from tuneloop.planning.limits import find_limits, read_pods

    definition = find_pipeline(pipeline)
    settings = definition.configure(config, sets or ())
    workflow = definition.build(settings)
    problems: list[object] = list(lint_workflow(workflow))
    # `submit` refuses these, too: without them a pipeline would pass that cannot start.
    for limit in find_limits(settings, workflow, read_pods(settings)):
        if limit.is_note:
            typer.echo(f"note: {limit.error}", err=True)
        else:
            problems.append(limit.error)
    for problem in problems:
        typer.echo(f"error: {problem}", err=True)
    count = format_count(len(problems), "problem")
    typer.echo(f"{definition.name}: {count}")
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
    """Print the Argo Workflow as YAML. It is what `run` executes and a cluster takes; equal
    settings, equal bytes.

    With --template it is a WorkflowTemplate, from which a run starts when a workflow refers to it.
    With --servers it is only the rollout servers, which then outlive the runs that use them.
    """
    from tuneloop.argo.jobset import dump_manifest
    from tuneloop.cluster.run_workflows import as_template, template_name
    from tuneloop.cluster.serving import render_servers
    from tuneloop.config.loading import dump_workflow, find_pipeline

    definition = find_pipeline(pipeline)
    settings = definition.configure(config, sets or ())
    workflow = definition.build(settings)
    if servers is not None:
        if template:
            raise UserError(
                "--template", "true", "cannot be combined with --servers: leave one out"
            )
        manifests = render_servers(workflow, servers, settings)
        text = "---\n".join(dump_manifest(manifest) for manifest in manifests)
    else:
        if template:
            workflow = as_template(workflow, template_name(definition.name))
        text = dump_workflow(workflow)
    print_or_write_text(text, output)


def print_or_write_text(text: str, output: Path | None) -> None:
    """Print `text`, or write it to the file `output`.

    Raises:
        UserError: the file cannot be written.
    """
    if output is None:
        # The text ends with a line break: -o and a redirection give equal bytes.
        typer.echo(text, nl=False)
        return
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
    """Print the settings of a pipeline as YAML with comments. It is a file for --config.

    Each setting is commented out, with its default. --set takes the same keys, with dots.
    """
    from tuneloop.config.commented_yaml import format_settings
    from tuneloop.config.listing import describe_settings
    from tuneloop.config.loading import find_pipeline

    config = find_pipeline(pipeline).Config
    if as_json:
        typer.echo(json.dumps(config.model_json_schema(), indent=2))
        return
    described = describe_settings(config)
    text = format_settings(pipeline, described, section)
    if text is None:
        keys = [setting.key for setting in described.list_settings()]
        keys += [item.key for item in described.sections]
        nearest = get_close_matches(section, keys, n=1)
        names = ", ".join(item.name for item in described.items)
        hint = f"did you mean {nearest[0]}?" if nearest else f"known: {names}"
        raise UserError("SECTION", section, f"is no setting and no section of {pipeline}; {hint}")
    typer.echo(text, nl=False)
