"""Show a running run: a live table on a terminal, and one line for each stage or iteration that
ends.

It learns of progress from the lines that stages print, by the patterns below: whoever changes such
a line changes the pattern, or the line is not shown any more. The table is that of `watch.py`.
"""

import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuneloop.cli.watch import LOOK_S, draw_state
from tuneloop.core.component import COMMITTED
from tuneloop.core.ends import cut_error
from tuneloop.core.errors import Retryable, UserError
from tuneloop.core.json_types import JsonMapping
from tuneloop.local.journal import BROKEN, DONE, Node
from tuneloop.runs.run_record import Run
from tuneloop.runs.stages import find_iteration, get_stage_name
from tuneloop.runs.summary import format_duration, format_number
from tuneloop.workflow.manifest import read_parameters
from tuneloop.workflow.plan import ServerPlan, find_plan

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

PROGRESS = re.compile(r"^\w+: (?P<done>\d+)/(?P<total>\d+) \S")
"""A line of `tuneloop.core.progress`."""
FACT = re.compile(r"  [A-Za-z]\w* \S+$")
"""The end of such a line with a fact, such as the loss of a step."""
NOTE = re.compile(r"^data_prep: (?P<note>.+)")
"""A line of the stage `data_prep`, which begins with its name (`Stage.log`): what was recognised,
left out, and how many rows there are, or `COMMITTED`. Notes of other stages are not shown."""
ITERATION = re.compile(r"^iteration \d+/\d+  reward ")
"""A line of `local/iterations.py`, one for each iteration of a pod that runs several
(`tests/unit/local/test_iterations.py` compares both)."""


@dataclass
class LoopProgress:
    """Where the loop of a run stands, by the nodes of its stages.

    In a pod that runs several iterations its stages are no nodes, so that nothing of them is known
    here: their lines are shown as they are (`ITERATION`).

    Attributes:
        limit: the maximum number of iterations; None: unknown.
        iteration: the newest that has begun.
        first_iteration: the one that began first in this process.
        first_start: when that began, Unix seconds.
        stages: the stages that ended in the newest iteration, each with its duration.
        reward: the newest mean reward of a batch.
    """

    limit: int | None
    iteration: int = 0
    first_iteration: int = 0
    first_start: float = 0.0
    stages: list[str] = field(default_factory=list)
    reward: str = ""

    def begin(self, iteration: int) -> None:
        """Note that a stage of an iteration has begun."""
        self.iteration = max(self.iteration, iteration)
        if iteration and not self.first_iteration:
            self.first_iteration = iteration
            self.first_start = time.time()

    def end_iteration(self) -> str:
        """Describe the iteration that has ended, with the rate so far; empty if there is none."""
        stages = ", ".join(self.stages)
        self.stages = []
        if not (stages and self.first_iteration):
            return ""
        count = self.iteration - self.first_iteration + 1
        seconds = (time.time() - self.first_start) / count
        remaining = seconds * (self.limit - self.iteration) if self.limit else 0.0
        limit = f"/{self.limit}" if self.limit else ""
        parts = [f"iteration {self.iteration}{limit}"]
        if self.reward:
            parts.append(f"reward {self.reward}")
        parts.append(f"{format_duration(seconds)}/iteration")
        if remaining:
            parts.append(f"at most {format_duration(remaining)} left")
        parts.append(f"({stages})")
        return "  ".join(parts)


def _format_outputs(outputs: Mapping[str, str]) -> str:
    """Format the outputs of a pod that are numbers: others are references, too long for a line."""
    numbers = {name: format_number(value) for name, value in outputs.items()}
    return "  ".join(f"{name} {number}" for name, number in numbers.items() if number)


class Display:
    """Shows the nodes of a run. The local executor calls `node` when a node changes, and `log` with
    each line that a pod writes, from several threads.

    Args:
        run: the run that is executed.
        workflow: its workflow, whose parameter ``iterations`` bounds the loop.
    """

    def __init__(self, run: Run, workflow: JsonMapping) -> None:
        iterations = read_parameters(workflow["spec"]).get("iterations")
        self.run = run
        self.loop = LoopProgress(int(iterations) if iterations else None)
        self.scorers: set[str] = set()
        self.servers: dict[str, ServerPlan] = {}
        plan = find_plan(workflow)
        if plan:
            self.scorers = {name for name, stage in plan.stages.items() if stage.role == "scorer"}
            self.servers = plan.servers
        self.start = time.time()
        # All by the id of a node. The threads of the executor change them while the table is drawn.
        self.running: dict[str, Node] = {}
        self.waiting: dict[str, Node] = {}
        self.retries: dict[str, Node] = {}
        self.phases: dict[str, str] = {}
        self.progress: dict[str, str] = {}
        # Nodes whose log lines (`NOTE`) already had the numbers of their outputs.
        self.described: set[str] = set()
        self.live: Live | None = None
        self.table: RenderableType = run.name
        # By the monotonic clock.
        self.next_look = 0.0

    def __enter__(self) -> "Display":
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(get_renderable=self._draw, refresh_per_second=4, transient=True)
            self.live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end_iteration()
        if self.live:
            self.live.stop()

    def node(self, node: Node) -> None:
        """Show a node that changed."""
        if node.type == "Retry":
            self._show_retry(node)
        if node.type != "Pod":
            return
        previous_phase = self.phases.get(node.id)
        self.phases[node.id] = node.phase
        if node.phase == "Running" and not node.daemoned:
            self._begin(node)
        else:
            self.running.pop(node.id, None)
        if node.phase in DONE:
            # `_show_retry` shows a failed attempt: its node knows whether it was the last.
            has_retry = node.phase in BROKEN and node.parent in self.retries
            if previous_phase not in DONE and not has_retry:
                self._show_end(node)
        elif node.daemoned and previous_phase != "ready":
            self.phases[node.id] = "ready"
            self.waiting.pop(node.parent, None)
            seconds = format_duration(time.time() - node.started)
            self._print(f"{get_stage_name(node)}: ready in {seconds}")

    def _begin(self, node: Node) -> None:
        """Note that a pod runs, and end the iteration before it."""
        self.running[node.id] = node
        self.waiting.pop(node.parent, None)
        iteration = find_iteration(node)
        is_outside = iteration == 0 and node.template not in self.servers
        # A stage outside the loop, or of a later iteration, ends the iteration. A server does not
        # (it may be started anew within one), nor an update that begins after the rollout of the
        # next iteration (`loop.asynchronous`).
        if iteration > self.loop.iteration or is_outside:
            self._end_iteration()
            self.loop.begin(iteration)

    def _show_retry(self, node: Node) -> None:
        """Show how an attempt ended, and when the next one begins, or that it was the last."""
        previous = self.retries.get(node.id)
        self.retries[node.id] = node
        if node.phase in DONE:
            self.waiting.pop(node.id, None)
            was_done = previous is not None and previous.phase in DONE
            if node.phase in BROKEN and not was_done:
                self._show_end(node)
        elif node.message and (previous is None or previous.message != node.message):
            self.waiting[node.id] = node
            self._print(f"{get_stage_name(node)}: {node.message}")

    def log(self, node: Node, line: str) -> None:
        """Show a line that a pod wrote, if it is about progress or about the data."""
        match = PROGRESS.match(line)
        if match:
            # The last line of a stage (10/10) repeats what its end says. It is shown if it has a
            # fact besides the count, or if lines of earlier steps were shown.
            is_last = int(match["done"]) >= int(match["total"])
            has_fact = FACT.search(line) is not None
            is_shown = not is_last or has_fact or node.id in self.progress
            self.progress[node.id] = line
            if not self.live and is_shown:
                self._print(line)
        elif ITERATION.match(line):
            self._print(line)
        else:
            note = NOTE.match(line)
            if note:
                # Of an output of an earlier attempt the lines above say nothing: its numbers do.
                if note["note"] != COMMITTED:
                    self.described.add(node.id)
                self._print(f"{get_stage_name(node)}: {note['note']}")

    def _show_end(self, node: Node) -> None:
        """Show that a node has ended; of a stage in the loop, when its iteration ends."""
        name = get_stage_name(node)
        seconds = format_duration(node.finished - node.started)
        # The output is the result `mean_reward` of every scorer.
        if node.template in self.scorers and "mean-reward" in node.outputs:
            self.loop.reward = f"{float(node.outputs['mean-reward']):.3f}"
        if node.phase in BROKEN:
            reason = cut_error(node.message)
            self._print(f"{name}: {node.phase.lower()} after {seconds}: {reason}")
        elif node.phase == "Omitted":
            self._print(f"{name}: ended after {seconds}: {node.message}")
        elif find_iteration(node):
            self.loop.stages.append(f"{name} {seconds}")
        else:
            # What data_prep has counted stands in the lines above.
            results = "" if node.id in self.described else _format_outputs(node.outputs)
            prefix = "stopped after " if node.daemoned else ""
            self._print(f"{name}: {prefix}{seconds}  {results}".rstrip())

    def _end_iteration(self) -> None:
        """Print the line of the iteration that has ended, if one has."""
        line = self.loop.end_iteration()
        if line:
            self._print(line)

    def _print(self, line: str) -> None:
        """Print a line above the table, or without one, with the time since the start."""
        if self.live:
            self.live.console.print(line, highlight=False, markup=False)
        else:
            print(f"{format_duration(time.time() - self.start):>8}  {line}", flush=True)

    def _draw(self) -> "RenderableType":
        """Draw the table; the run is read again where that is due, at most a tenth of the time."""
        from rich.console import Group
        from rich.text import Text

        from tuneloop.ui.describe import describe_state

        start = time.monotonic()
        if start >= self.next_look:
            try:
                self.run.refresh(all_iterations=False)
                self.table = draw_state(describe_state(self.run, None))
            except (UserError, Retryable) as error:
                # The run's executor reports what ends the run.
                self.table = Text(str(error))
            end = time.monotonic()
            self.next_look = end + max(LOOK_S, 10 * (end - start))
        lines = []
        for node in list(self.running.values()):
            duration = format_duration(time.time() - node.started)
            progress = self.progress.get(node.id, "")
            lines.append(f"  {get_stage_name(node)}  {duration}  {progress}".rstrip())
        for node in list(self.waiting.values()):
            lines.append(f"  {get_stage_name(node)}: {node.message}")
        return Group(self.table, Text("\n".join(lines)))
