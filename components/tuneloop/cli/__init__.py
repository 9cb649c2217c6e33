"""The command line: ``tuneloop COMMAND``. Each command imports what it needs when it runs.

This package defines flags and output; what a command does is in the packages below it, which do not
import this one. Exit codes: 0; 2 the user's mistake (one line on standard error); 3 a model that
its gate refuses; 75 try again; 130 interrupted; 1 a bug or a stage that failed.
"""

import sys
from collections.abc import Callable
from gc import set_threshold

import typer

import tuneloop
from tuneloop.cli import (
    author,
    cluster,
    doctor,
    endpoint,
    execute,
    fleet,
    gateway,
    gc,
    inspect,
    kfp,
    leases,
    prove,
    sweep,
    ui,
    watch,
    weights,
)
from tuneloop.cli.exits import run_command
from tuneloop.core.threads import end_process

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # rich triples the time to help.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(is_requested: bool) -> None:
    """Print the version and end, where the user asks for it."""
    if is_requested:
        typer.echo(f"tuneloop {tuneloop.__version__}")
        raise typer.Exit


@app.callback()
def handle_global_options(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=print_version, help="Print the version."
    ),
) -> None:
    """Post-train language models in loops of resumable stages: on this machine, on Argo, on
    Kubeflow Pipelines.
    """


# In the order in which `tuneloop --help` lists them: before a run, runs, and what came of them.
COMMANDS: dict[str, Callable[..., int | None]] = {
    "plan": author.plan_pipeline,
    "lint": author.lint_pipeline,
    "render": author.render_pipeline,
    "schema": author.print_schema,
    "demo": execute.run_demo,
    "run": execute.run_pipeline,
    "resume": execute.resume_run,
    "fork": execute.fork_run,
    "stop": execute.stop_run,
    "sweep": sweep.run_sweep,
    "doctor": doctor.diagnose_argo,
    "submit": cluster.submit_run,
    "schedule": cluster.schedule_pipeline,
    "diff": cluster.diff_pipeline,
    "status": inspect.show_status,
    "watch": watch.watch_run,
    "logs": inspect.show_logs,
    "report": inspect.report_run,
    "track": inspect.track_run,
    "audit": prove.audit_run,
    "replay": prove.replay_run,
    "bisect": prove.bisect_runs,
    "probe": prove.probe_rewards,
    "why": prove.explain_version,
    "rescore": prove.rescore_run,
    "promote": prove.promote_version,
    "promoted": prove.list_promotions,
    "attest": prove.attest_version,
    "push": prove.push_version,
    "verify-model": prove.verify_model,
    "gc": gc.collect_garbage,
    "leases": leases.show_device_leases,
    "gateway": gateway.serve_gateway,
    "ui": ui.serve_ui,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.add_typer(weights.app, name="weights")
app.add_typer(endpoint.app, name="endpoint")
app.add_typer(fleet.app, name="fleet")
app.add_typer(cluster.app, name="cluster")
app.add_typer(kfp.app, name="kfp")


def main() -> None:
    """Run the command line; errors are one line, and the exit code says whether they are the
    user's.
    """
    # Most objects of a command live until it ends, so frequent collection frees little.
    set_threshold(100_000, 50, 50)
    end_process(run_cli(sys.argv[1:]))


def run_cli(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    return run_command(lambda: app(arguments, prog_name="tuneloop", standalone_mode=False))
