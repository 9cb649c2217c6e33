"""``tuneloop watch``: follow a run, with a live table on a terminal, and elsewhere a line for each commit."""

import math
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from statistics import mean
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuneloop.cli.arguments import CONTEXT, KFP, RUN, STORE
from tuneloop.core.errors import EXIT_USER, Retryable, print_diagnostic

if TYPE_CHECKING:
    from rich.table import Table

    from tuneloop.runs.run_record import Run

LOOK_S = 1.0
"""Seconds between two reads of a run; at least ten times the duration of a read."""
CODES = {"succeeded": 0, "failed": 1, "error": 1, "interrupted": 75, "elsewhere": 75}
"""Phase of a run that has ended, or has committed nothing for a day → exit code."""
BARS = "▁▂▃▄▅▆▇█"


def watch_run(
    name: RUN,
    store: STORE = "runs",
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="Of runs on a cluster.")
    ] = None,
    context: CONTEXT = None,
    kfp: KFP = None,
) -> int:
    """Watch a run until it ends. Stages, iterations, reward, time left; exit code 0: it succeeded, 1: it failed, 75:
    it was interrupted, or has committed nothing for a day; 2: there is no such run."""
    from rich.live import Live

    from tuneloop.cli.kfp import connect_to_executor
    from tuneloop.runs.run_record import Run
    from tuneloop.runs.tracking import find_phase
    from tuneloop.ui.describe import describe_state

    cluster, ask = connect_to_executor(namespace, context, kfp)
    run = (
        Run(name, store) if cluster or ask else Run.open(name, store)
    )  # elsewhere it may have committed nothing yet
    shown, phase, told = set[str](), "", ""
    with Live(auto_refresh=False) if sys.stdout.isatty() else nullcontext() as live:
        while True:
            over, began = (
                phase in CODES,
                time.monotonic(),
            )  # once a run has ended, all its commits are visible
            try:
                run.refresh(all_iterations=False)
                stands = describe_state(run, cluster, ask)
                phase, message = stands["phase"], stands["message"]
                if phase == "elsewhere" and message and not run.entries:
                    return print_diagnostic(
                        f"error: {message}; {store} has no artifact of it, either", EXIT_USER
                    )
                if phase == "elsewhere" and (phase := find_phase(run)) == "elsewhere":
                    message = "nothing was committed for a day, and it is unknown how it ended"
                if live:
                    live.update(draw_state({**stands, "phase": phase}), refresh=True)
                else:
                    _print_commits(run, shown, stands)
            except Retryable as error:  # store or cluster are unavailable, but the run may continue
                phase, message = "", f"not up to date: {error}"
            if over and phase in CODES:
                break
            if message not in ("", told) and phase not in CODES:
                typer.echo(message, err=True)
            told = message
            if phase not in CODES:
                time.sleep(max(LOOK_S, 10 * (time.monotonic() - began)))
    typer.echo(f"{name}: {phase}{f': {message}' if message else ''}")
    return CODES[phase]


def draw_state(stands: Mapping[str, Any]) -> "Table":
    """Draw the state of a run, from `tuneloop.ui.describe.describe_state`: a row for each stage, its loop below."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    caption = [f"iteration {stands['iterations']}"] if stands["iterations"] else []
    rewards = [value for value in stands["rewards"] if math.isfinite(value)]
    if rewards:
        caption.append(f"reward {rewards[-1]:.3f} {draw_sparkline(rewards)}")
    caption += [f"{text} to go" for text in [_format_left(stands)] if text]
    title = f"{stands['name']}  {stands['phase']}"
    table = Table(
        title=Text(title, "bold"),
        caption=Text("   ".join(caption)),
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    table.title_justify = table.caption_justify = "left"
    for heading in ("stage", "state", "done", "seconds", "retries", "newest"):
        table.add_column(heading, no_wrap=heading != "newest")  # it is wrapped to make room
        table.columns[-1].justify = "right" if heading in ("done", "seconds", "retries") else "left"
    for stage in stands["stages"]:
        table.add_row(*(Text(text, no_wrap=True, overflow="ellipsis") for text in stage.row(1)))
    return table


def draw_sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values as bars between their minimum and maximum; more than `width` values are averaged in `width` parts."""
    count = min(len(values), width)
    parts = [
        mean(values[i * len(values) // count : (i + 1) * len(values) // count])
        for i in range(count)
    ]
    least, most = min(parts), max(parts)
    return "".join(BARS[round(7 * (part - least) / (most - least or 1))] for part in parts)


def _print_commits(run: "Run", shown: set[str], stands: Mapping[str, Any]) -> None:
    """Print a line for each artifact that is not among those `shown`, with the time of its commit."""
    from tuneloop.runs.summary import format_duration, format_results

    for entry in run.entries:
        ref = f"{entry.key}@{entry.manifest.digest}"
        if ref not in shown:
            shown.add(ref)
            at = time.strftime("%H:%M:%S", time.localtime(entry.finished))
            results = format_results(None, entry.manifest.results)
            text = f"{at}  {entry.key}  {format_duration(entry.seconds)}  {results}"
            left = _format_left(stands) if entry is run.entries[-1] else ""
            typer.echo(text.rstrip() + (f"  ({left} to go)" if left else ""))


def _format_left(stands: Mapping[str, Any]) -> str:
    """Estimate the maximum time that the remaining iterations take, from the measured ones."""
    from tuneloop.runs.summary import format_duration

    end = stands["loop_end"]
    return f"at most {format_duration(end - time.time())}" if end else ""
