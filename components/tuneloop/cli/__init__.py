"""The command line: ``tuneloop COMMAND``. Each command imports what it needs when it runs.

This package defines flags and output; what a command does is in the packages below it, which do not
import this one. Exit codes: 0; 2 the user's mistake (one line on standard error); 3 a model that
its gate refuses; 75 try again; 130 interrupted; 1 a bug or a stage that failed. `exits.py` makes
exit codes of errors, whose numbers are in `core/errors.py`.

The docstring of a command's function is its help. Its first sentence is the line in
`tuneloop --help`.
"""

import sys
from collections.abc import Callable, Sequence
from gc import set_threshold
from typing import TYPE_CHECKING

import typer
from typer.core import TyperGroup

import tuneloop
from tuneloop.cli import (
    author,
    cluster,
    doctor,
    execute,
    gc,
    generate,
    inspect,
    kfp,
    prove,
    store,
    ui,
    watch,
    weights,
)
from tuneloop.cli.exits import run_command
from tuneloop.core.errors import UserError
from tuneloop.core.hooks import Extension, list_installed_extensions, list_shipped_extensions
from tuneloop.core.threads import end_process

if TYPE_CHECKING:
    from typer._click import Context, HelpFormatter


def print_version(is_requested: bool) -> None:
    """Print the version and end, where the user asks for it."""
    if is_requested:
        typer.echo(f"tuneloop {tuneloop.__version__}")
        raise typer.Exit


def handle_global_options(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=print_version, help="Print the version."
    ),
) -> None:
    """Post-train language models in loops of resumable stages: on this machine, on Argo, on
    Kubeflow Pipelines.
    """


# In the order in which `tuneloop --help` lists them.
COMMANDS: dict[str, dict[str, Callable[..., int | None] | typer.Typer]] = {
    "Run": {
        "demo": execute.run_demo,
        "plan": author.plan_pipeline,
        "schema": author.print_schema,
        "run": execute.run_pipeline,
        "resume": execute.resume_run,
        "stop": execute.stop_run,
        "fork": execute.fork_run,
        "gc": gc.collect_garbage,
    },
    "Look": {
        "status": inspect.show_status,
        "watch": watch.watch_run,
        "logs": inspect.show_logs,
        "ui": ui.serve_ui,
        "report": inspect.report_run,
        "track": inspect.track_run,
        "generate": generate.generate_text,
    },
    "Prove": {
        "audit": prove.audit_run,
        "replay": prove.replay_run,
        "bisect": prove.bisect_runs,
        "probe": prove.probe_rewards,
        "weights": weights.app,
    },
    "Cluster": {
        "lint": author.lint_pipeline,
        "render": author.render_pipeline,
        "doctor": doctor.diagnose_argo,
        "submit": cluster.submit_run,
        "schedule": cluster.schedule_pipeline,
        "diff": cluster.diff_pipeline,
        "store": store.app,
        "cluster": cluster.app,
        "kfp": kfp.app,
    },
}
"""Heading → name → the function of a command, or the app of a group of commands.

Each call of `tuneloop` imports all of these modules, so that imports which are slow belong inside
of functions (`tests/unit/cli/test_cli.py: test_help_imports_little`). A command that is added has a
row in docs/commands.md. An extension whose command has the same name is refused from then on.
"""
EXTENSIONS = "Extensions"
"""The heading of the commands of all extensions."""


class HeadedGroup(TyperGroup):
    """The commands of `tuneloop`, listed below headings."""

    def format_commands(self, ctx: "Context", formatter: "HelpFormatter") -> None:
        """Write a section for each heading. A command has it as `rich_help_panel`."""
        rows_by_heading: dict[str, list[tuple[str, str]]] = {}
        limit = formatter.width - 6 - max(map(len, self.commands))
        for name, command in self.commands.items():
            heading = getattr(command, "rich_help_panel", None) or EXTENSIONS
            row = (name, command.get_short_help_str(limit))
            rows_by_heading.setdefault(heading, []).append(row)
        for heading, rows in rows_by_heading.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


def build_app(arguments: Sequence[str] = ()) -> typer.Typer:
    """Build the command line: the core's commands and those of extensions.

    Extensions of other packages are searched only where `arguments` begin with none of the commands that ship with
    tuneloop, as it takes as long as half of what a command needs to start. Raises UserError: a faulty extension.
    """
    app = typer.Typer(
        cls=HeadedGroup,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # rich triples the time to help
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(handle_global_options)
    names: set[str] = set()
    for heading, commands in COMMANDS.items():
        names.update(commands)
        for name, command in commands.items():
            if isinstance(command, typer.Typer):
                app.add_typer(command, name=name, rich_help_panel=heading)
            else:
                app.command(name, rich_help_panel=heading)(command)
    for extension in list_shipped_extensions():
        add_extension(app, extension, names)
    if not arguments or arguments[0] not in names:
        for extension in list_installed_extensions():
            add_extension(app, extension, names)
    return app


def add_extension(app: typer.Typer, extension: Extension, names: set[str]) -> None:
    """Add the commands of `extension` to `app` and to `names`. Raises UserError: a name that is taken."""
    for name in (*extension.commands, *extension.command_groups):
        if name in names:
            remedy = f"its command {name} is there already: rename it, or uninstall the extension"
            raise UserError("extension", extension.name, remedy)
        names.add(name)
    for name, path in extension.commands.items():
        app.command(name, rich_help_panel=EXTENSIONS)(extension.load(path))
    for name, path in extension.command_groups.items():
        app.add_typer(extension.load(path), name=name, rich_help_panel=EXTENSIONS)


def main() -> None:
    """Run the command line; errors are one line, and the exit code says whether they are the
    user's.
    """
    # Most objects of a command live until it ends, so frequent collection frees little.
    set_threshold(100_000, 50, 50)
    end_process(run_cli(sys.argv[1:]))


def run_cli(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    return run_command(
        lambda: build_app(arguments)(arguments, prog_name="tuneloop", standalone_mode=False)
    )
