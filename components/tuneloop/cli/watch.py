"""``tuneloop watch``: follow a run, with a live table on a terminal, and elsewhere a line for each
commit.
"""

import math
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import mean
from typing import TYPE_CHECKING

import typer

from tuneloop.cli.arguments import CLUSTER_NAMESPACE, CONTEXT, KFP, RUN, STORE
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.store import local_path

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

    from tuneloop.kube.connection import Connection
    from tuneloop.runs.run_record import Run
    from tuneloop.ui.describe import Ask, RunState

LOOK_S = 1.0
"""The minimum seconds between two reads of a run, here and in `live.py`. Where a read takes long,
ten times as long passes between two."""
CODES = {
    "succeeded": 0,
    # KFP has skipped the whole run, as all of it was in its cache.
    "skipped": 0,
    "failed": 1,
    "error": 1,
    "interrupted": 75,
    "elsewhere": 75,
}
"""Phase of a run that has ended, or has committed nothing for a day → exit code.

A phase that is not listed counts as going on, so that `watch` would never end. Phases are those of
`runs/run_record.py: Run.phase`, of Argo, and of `kfp/progress.py: PHASES`, in lower case.
"""
BARS = "▁▂▃▄▅▆▇█"
"""The bars of `draw_sparkline`, the lowest first."""


@dataclass
class Watch:
    """A run that is watched, look by look.

    Attributes:
        run: what it has committed.
        cluster: where it is executed, if on Argo.
        ask: asks another executor for its state.
        live: the table on a terminal; None: lines are printed.
        printed: the references of artifacts whose lines were printed.
        phase: the run's as of the last look; empty if that failed.
        message: why it is in this phase, or why the last look failed.
        note: the message that was last printed while the run went on.
    """

    run: "Run"
    cluster: "Connection | None"
    ask: "Ask | None"
    live: "Live | None"
    printed: set[str] = field(default_factory=set)
    phase: str = ""
    message: str = ""
    note: str = ""

    def look(self) -> None:
        """Read the run and show what is new.

        Raises:
            UserError: neither the executor nor the store knows the run.
        """
        from tuneloop.runs.tracking import find_phase
        from tuneloop.ui.describe import describe_state

        try:
            self.run.refresh(all_iterations=False)
            state = describe_state(self.run, self.cluster, self.ask)
        except Retryable as error:
            # The store or the cluster is unavailable, but the run may continue.
            self.phase = ""
            self.message = f"not up to date: {error}"
            return
        self.phase = state["phase"]
        self.message = state["message"]
        if self.phase == "elsewhere" and self.message and not self.run.entries:
            # The executor's own error names the run, too.
            reason = self.message.removeprefix(f"run: {self.run.name!r}: ")
            store = local_path(self.run.store_url) or self.run.store_url
            remedy = f"{reason}; {store} has no artifact of it, either"
            raise UserError("run", self.run.name, remedy)
        if self.phase == "elsewhere":
            self.phase = find_phase(self.run)
            if self.phase == "elsewhere":
                self.message = "nothing was committed for a day, and it is unknown how it ended"
        if self.live:
            state["phase"] = self.phase
            self.live.update(draw_state(state), refresh=True)
        else:
            self._print_commits(state)

    def follow(self) -> int:
        """Look until the run has ended, and return the exit code of its phase."""
        has_ended = False
        while True:
            start = time.monotonic()
            self.look()
            if has_ended and self.phase in CODES:
                return CODES[self.phase]
            # One more look after the end: by then all commits of the run are visible.
            has_ended = self.phase in CODES
            if has_ended:
                continue
            if self.message not in ("", self.note):
                typer.echo(self.message, err=True)
            self.note = self.message
            # A store that answers slowly is not asked all the time.
            time.sleep(max(LOOK_S, 10 * (time.monotonic() - start)))

    def _print_commits(self, state: "RunState") -> None:
        """Print a line for each artifact that has none yet, with the time of its commit."""
        from tuneloop.runs.summary import format_duration, format_results

        entries = self.run.entries
        for entry in entries:
            reference = f"{entry.key}@{entry.manifest.digest}"
            if reference in self.printed:
                continue
            self.printed.add(reference)
            clock = time.strftime("%H:%M:%S", time.localtime(entry.finished))
            results = format_results(None, entry.manifest.results)
            line = f"{clock}  {entry.key}  {format_duration(entry.seconds)}  {results}".rstrip()
            remaining = _format_remaining(state) if entry is entries[-1] else ""
            typer.echo(f"{line}  ({remaining} to go)" if remaining else line)


def watch_run(
    name: RUN,
    store: STORE = "runs",
    namespace: CLUSTER_NAMESPACE = None,
    context: CONTEXT = None,
    kfp: KFP = None,
) -> int:
    """Watch a run until it ends. Stages, iterations, reward, time left.

    For a run that is executed elsewhere, --namespace or --kfp says where; without them the run's
    state is inferred from what it has committed.

    Exit code 0: it succeeded, or KFP skipped it; 1: it failed; 75: it was interrupted, or has committed nothing for a
    day; 2: there is no such run.
    """
    from rich.live import Live

    from tuneloop.cli.kfp import connect_to_executor
    from tuneloop.runs.run_record import Run

    cluster, ask = connect_to_executor(namespace, context, kfp)
    # A run that is executed elsewhere may have committed nothing yet.
    run = Run(name, store) if cluster or ask else Run.open(name, store)
    with Live(auto_refresh=False) if sys.stdout.isatty() else nullcontext() as live:
        watch = Watch(run, cluster, ask, live)
        code = watch.follow()
    suffix = f": {watch.message}" if watch.message else ""
    typer.echo(f"{name}: {watch.phase}{suffix}")
    return code


def draw_state(state: "RunState") -> "Table":
    """Draw the state of a run: a row for each stage, its loop below."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    caption = []
    if state["iterations"]:
        caption.append(f"iteration {state['iterations']}")
    rewards = [value for value in state["rewards"] if math.isfinite(value)]
    if rewards:
        caption.append(f"reward {rewards[-1]:.3f} {draw_sparkline(rewards)}")
    remaining = _format_remaining(state)
    if remaining:
        caption.append(f"{remaining} to go")
    table = Table(
        title=Text(f"{state['name']}  {state['phase']}", "bold"),
        title_justify="left",
        caption=Text("   ".join(caption)),
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
    )
    for heading in ("stage", "state", "done", "seconds", "retries", "newest"):
        is_number = heading in ("done", "seconds", "retries")
        # The newest result is wrapped to make room for the others.
        table.add_column(
            heading,
            justify="right" if is_number else "left",
            no_wrap=heading != "newest",
        )
    for stage in state["stages"]:
        table.add_row(*[Text(text, no_wrap=True, overflow="ellipsis") for text in stage.row(1)])
    return table


def draw_sparkline(values: Sequence[float], width: int = 24) -> str:
    """Draw values as bars between their minimum and maximum.

    More than `width` values are averaged in `width` parts.
    """
    count = min(len(values), width)
    heights: list[float] = []
    for index in range(count):
        begin = index * len(values) // count
        end = (index + 1) * len(values) // count
        heights.append(mean(values[begin:end]))
    lowest = min(heights)
    # Equal values are drawn as the lowest bar.
    extent = max(heights) - lowest or 1.0
    top = len(BARS) - 1
    return "".join(BARS[round(top * (height - lowest) / extent)] for height in heights)


def _format_remaining(state: "RunState") -> str:
    """Estimate the maximum time that the remaining iterations take, from the measured ones."""
    from tuneloop.runs.summary import format_duration

    end = state["loop_end"]
    return f"at most {format_duration(end - time.time())}" if end else ""
