"""Print tables of a run and why it failed, and write its page.

Several commands share it: `execute.py`, `inspect.py`, `cluster.py`, `weights.py`, and `verdict.py`
for runs on a cluster.
"""

import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from tuneloop.cli.tables import print_table
from tuneloop.core.ends import cut_error
from tuneloop.core.errors import EXIT_RETRY, EXIT_USER, NAMED, UserError, find_disk_error
from tuneloop.core.store import normalize_url
from tuneloop.local.journal import BROKEN, Node
from tuneloop.runs.records import REPORT_FILE
from tuneloop.runs.run_record import Run
from tuneloop.runs.stages import StageStatus, get_stage_name
from tuneloop.runs.stored_checkpoints import measure_checkpoints
from tuneloop.runs.summary import format_duration, format_size

if TYPE_CHECKING:
    from tuneloop.local.executor import Outcome


def show_stages(stages: Iterable[StageStatus], places: int = 1) -> None:
    """Print a line for each stage: phase, number of successes, seconds, retries, newest result.

    The cells are made by `runs/stages.py: StageStatus.row`, in the order of these columns. The live
    table has the same columns (`watch.py: draw_state`): a column is added in all three.

    Then, for stages with failed attempts, why the newest of these failed.

    Args:
        stages: in the order of the graph.
        places: digits of the seconds after the point; on a cluster times are whole seconds.
    """
    statuses = list(stages)
    numbers = ("done", "seconds", "retries")
    print_table(
        ("stage", "phase", *numbers, "newest"),
        [_cut_cause(status).row(places) for status in statuses],
        right=numbers,
        cut="newest",
    )
    # Below the table: a cause is too long for a column.
    for status in statuses:
        if status.cause:
            typer.echo(f"{status.stage}: {status.cause}")


def _cut_cause(status: StageStatus) -> StageStatus:
    """Return a stage without the last line of its log in its message, if `show_stages` prints that
    line below the table.
    """
    return replace(status, message=cut_error(status.message)) if status.cause else status


def describe_failure(run: Run, outcome: "Outcome") -> str:
    """Describe in one line which stage ended the run, with its last line; stages beside it that
    failed, too, have a line each before it. For a run on a cluster, `verdict._describe_failure` says
    the same."""
    node = find_failed_pod(outcome.nodes.values())
    if node is None:
        return f"error: {outcome.message}"
    last_line = _read_last_line(run.directory / node.log) if node.log else ""
    option = format_store_option(run.store_url)
    remedy = f"`tuneloop resume {run.name}{option}`"
    if outcome.exit_code == EXIT_USER:
        run.refresh()
        # Once the loop has committed a version, `runs.resumption.find_changed_settings` refuses other
        # settings, so that all versions of a run come from the same ones.
        remedy += (
            ", or another run with other settings"
            if run.iteration
            else ", or run it again with other settings"
        )
    command = f"tuneloop logs {run.name} {get_stage_name(node)}{option}"
    error = format_stage_error(node, last_line or node.message, command, remedy)
    others = [
        f"{get_stage_name(other)}: {other.message}"
        for other in list_failed_stages(outcome.nodes.values())
        if get_stage_name(other) != get_stage_name(node)
    ]
    return "\n".join([*others, error])


def _read_last_line(path: Path) -> str:
    """Read the last line of a log that is not empty; empty if there is none."""
    if not path.is_file():
        return ""
    for line in reversed(path.read_text(errors="replace").split("\n")):
        if line.strip():
            return line.strip()
    return ""


def find_failed_pod(nodes: Iterable[Node]) -> Node | None:
    """Return the node that failed last, or None. The local executor's processes are nodes of type
    Pod, too.
    """
    broken = [node for node in nodes if node.type == "Pod" and node.phase in BROKEN]
    return max(broken, key=lambda node: node.finished, default=None)


def list_failed_stages(nodes: Iterable[Node]) -> list[Node]:
    """List the newest pod of each stage that failed by itself, and was not only interrupted.

    Args:
        nodes: from the oldest on, as the journal has them.
    """
    newest_by_stage: dict[str, Node] = {}
    for node in nodes:
        if node.type == "Pod":
            newest_by_stage[get_stage_name(node)] = node
    return [
        node
        for node in newest_by_stage.values()
        # From `EXIT_RETRY` on the code says that another attempt may succeed, or names a signal.
        if node.phase in BROKEN and node.exit_code is not None and 0 < node.exit_code < EXIT_RETRY
    ]


def format_stage_error(node: Node, last_line: str, command: str, remedy: str) -> str:
    """Format a stage's last line as an error, with the `command` that shows its log, and the way to
    continue.
    """
    # A stage's own error line says already that it is one.
    prefix = "" if last_line.startswith(NAMED) else "error: "
    return f"{prefix}{last_line} (in {get_stage_name(node)}; see `{command}`, then {remedy})"


def format_store_option(store: str) -> str:
    """Format the option that names a store; empty for the default store."""
    if normalize_url(store) == normalize_url("runs"):
        return ""
    return f" --store {store.removeprefix('file://')}"


def show_weights(run: Run) -> None:
    """Print the checkpoints of a run: version, maker, digest, what is stored of it, age, users, and
    which is the newest.
    """
    sizes = measure_checkpoints(run)
    users_by_policy: dict[str, list[str]] = defaultdict(list)
    for entry in run.with_role("sampler", "evaluator"):
        policy = run.find_policy(entry)
        if policy:
            users_by_policy[policy.key].append(entry.key)
    rows = []
    checkpoints = run.checkpoints
    for entry in checkpoints:
        size = sizes[entry.key]
        mark = " latest" if entry is checkpoints[-1] else ""
        row = (
            f"{entry.version}{mark}",
            entry.key,
            entry.manifest.digest.removeprefix("sha256:")[:12],
            "deleted" if size.is_pruned else _format_stored(size.model),
            _format_stored(size.trainer_state),
            format_duration(time.time() - entry.finished) if entry.started else "",
            ", ".join(users_by_policy[entry.key]),
        )
        rows.append(row)
    columns = ("version", "made by", "digest", "model", "trainer state", "age", "sampled by")
    numbers = ("version", "model", "trainer state", "age")
    print_table(columns, rows, right=numbers, cut="sampled by")
    model_bytes = sum(size.model for size in sizes.values())
    state_bytes = sum(size.trainer_state for size in sizes.values())
    typer.echo(
        f"models {format_size(model_bytes)} in all; trainer state {format_size(state_bytes)}, "
        "which only going on with training needs"
    )


def _format_stored(size: int) -> str:
    return format_size(size) if size else "none"


def write_report(run: Run, output: Path | None = None) -> Path:
    """Write the run's page, by default beside its local state, and return its path.

    Raises:
        UserError: the file cannot be written, or the disk is full.
    """
    from tuneloop.ui.report import render_page

    path = output or run.directory / REPORT_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_page(run), encoding="utf-8")
    except OSError as error:
        # A full disk has a remedy of its own.
        disk = find_disk_error(error, [path])
        if disk and not disk.is_read_only:
            raise disk from error
        remedy = f"cannot be written ({error.strerror})"
        raise UserError("--output", str(path), remedy) from error
    return path
