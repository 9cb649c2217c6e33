"""Print tables of a run and why it failed, and write its page."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tuneloop.cli.tables import print_table
from tuneloop.core.errors import EXIT_USER, NAMED, UserError, find_disk_error
from tuneloop.core.store import normalize_url
from tuneloop.local.journal import BROKEN, Node
from tuneloop.runs.run_record import Run
from tuneloop.runs.stages import StageStatus, get_stage_name
from tuneloop.runs.summary import format_duration, format_size

if TYPE_CHECKING:
    from tuneloop.local.executor import Outcome


def show_stages(stages: Iterable[StageStatus], places: int = 1) -> None:
    """Print a line for each stage: phase, number of successes, seconds, retries, its newest result; then, for stages
    with failed attempts, why the newest of these failed."""
    columns, shown = ("stage", "phase", "done", "seconds", "retries", "newest"), list(stages)
    print_table(columns, (stage.row(places) for stage in shown), right=columns[2:5], cut="newest")
    for stage in shown:
        if stage.cause:
            typer.echo(f"{stage.stage}: {stage.cause}")


def describe_failure(run: Run, outcome: "Outcome") -> str:
    """Describe in one line which stage ended the run, with its last line."""
    if (node := find_failed_pod(outcome.nodes.values())) is None:
        return f"error: {outcome.message}"
    path = run.directory / node.log
    lines = path.read_text(errors="replace").split("\n") if node.log and path.is_file() else []
    said = next((line.strip() for line in reversed(lines) if line.strip()), node.message)
    at = format_store_option(run.store_url)
    then = f"`tuneloop resume {run.name}{at}`"
    if outcome.exit_code == EXIT_USER:
        run.refresh()
        then += (
            ", or another run with other settings"
            if run.iteration
            else ", or run it again with other settings"
        )
    return format_stage_error(
        node, said, f"tuneloop logs {run.name} {get_stage_name(node)}{at}", then
    )


def find_failed_pod(nodes: Iterable[Node]) -> Node | None:
    """Return the pod that failed last, or None."""
    broken = [node for node in nodes if node.type == "Pod" and node.phase in BROKEN]
    return max(broken, key=lambda n: n.finished, default=None)


def format_stage_error(node: Node, said: str, look: str, then: str) -> str:
    """Format a stage's last line as an error, with the command that shows its log and the way to continue."""
    kind = "" if said.startswith(NAMED) else "error: "
    return f"{kind}{said} (in {get_stage_name(node)}; see `{look}`, then {then})"


def format_store_option(store: str) -> str:
    """Format the option that names a store; empty for the default store."""
    return (
        ""
        if normalize_url(store) == normalize_url("runs")
        else f" --store {store.removeprefix('file://')}"
    )


def show_weights(run: Run) -> None:
    """Print the checkpoints of a run: version, maker, digest, bytes, age, users, and which is the newest."""
    rows, held, users = [], run.checkpoints, dict[str, list[str]]()
    for entry in run.with_role("sampler", "evaluator"):
        if policy := run.find_policy(entry):
            users.setdefault(policy.key, []).append(entry.key)
    for entry in held:
        files = entry.manifest.files
        mark = " latest" if entry is held[-1] else ""
        rows.append(
            (
                f"{entry.version}{mark}",
                entry.key,
                entry.manifest.digest.removeprefix("sha256:")[:12],
                format_size(sum(f.size for n, f in files.items() if n.startswith("model/"))),
                format_size(sum(f.size for f in files.values())),
                format_duration(time.time() - entry.finished) if entry.started else "",
                ", ".join(users.get(entry.key, ())),
            )
        )
    columns = ("version", "made by", "digest", "model", "whole", "age", "sampled by")
    print_table(columns, rows, right=("version", "model", "whole", "age"), cut="sampled by")


def write_report(run: Run, output: Path | None = None) -> Path:
    """Write the run's page, by default beside its local state."""
    from tuneloop.ui.report import render_page

    path = output or run.directory / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_page(run), encoding="utf-8")
    except OSError as error:
        mistake = UserError("--output", str(path), f"cannot be written ({error.strerror})")
        disk = find_disk_error(error, [path])
        if disk and not disk.is_read_only:
            raise disk from error
        raise mistake from error
    return path
