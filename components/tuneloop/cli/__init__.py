"""The command line: ``tuneloop COMMAND``. Each command imports what it needs when it runs.

Exit codes: 0; 2 the user's mistake (one line on standard error); 75 try again; 130 interrupted; 1 a bug or a
stage that failed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

import typer

import tuneloop
from tuneloop.cli import author, cluster, endpoint, execute, fleet, gateway, gc, inspect, kfp, turns, weights
from tuneloop.core.errors import EXIT_USER, NoKeys, Retryable, UserError, failed, say

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich triples the time to help
    context_settings={"help_option_names": ["-h", "--help"]},
)


def print_version(asked: bool = True) -> None:
    """Print the version."""
    if asked:
        typer.echo(f"tuneloop {tuneloop.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", is_eager=True, callback=print_version, help="Print the version."),
) -> None:
    """Post-train language models in loops of resumable stages: on this machine, on Argo, on Kubeflow Pipelines."""


@app.command("version")
def version() -> None:
    """Print the version."""
    print_version()


COMMANDS: dict[str, Callable[..., int | None]] = {
    "plan": author.plan,
    "lint": author.lint,
    "render": author.render,
    "schema": author.schema,
    "demo": execute.demo,
    "run": execute.run,
    "resume": execute.resume,
    "stop": execute.stop,
    "submit": cluster.submit,
    "schedule": cluster.schedule,
    "diff": cluster.diff,
    "status": inspect.status,
    "logs": inspect.logs,
    "report": inspect.report,
    "track": inspect.track,
    "gc": gc.gc,
    "turns": turns.turns,
    "gateway": gateway.gateway,
}
for name, command in COMMANDS.items():
    about = f"With --to kfp: `tuneloop kfp {name} --help`." if name in kfp.verbs() else None
    app.command(name, epilog=about)(command)
app.add_typer(weights.app, name="weights")
app.add_typer(endpoint.app, name="endpoint")
app.add_typer(fleet.app, name="fleet")
app.add_typer(cluster.app, name="cluster")
app.add_typer(kfp.app, name="kfp")


def main() -> None:
    """Run the command line; errors are one line, and the exit code says whose they are."""
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        return app(kfp.route(arguments), prog_name="tuneloop", standalone_mode=False) or 0
    except NoKeys as error:
        return failed(error.mistake)
    except (UserError, Retryable) as error:
        return failed(error)
    except (KeyboardInterrupt, typer.Abort):
        return say("interrupted", 130)
    except BrokenPipeError:  # `tuneloop … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.TyperException as error:
        return say(f"error: {error.format_message()} (see --help)", EXIT_USER)
