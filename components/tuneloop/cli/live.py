"""Show a running run: a live table on a terminal, and one line for each stage or iteration that ends."""

import re
import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tuneloop.cli.watch import LOOK_S, draw_state
from tuneloop.core.errors import Retryable, UserError
from tuneloop.local.journal import BROKEN, DONE, Node
from tuneloop.runs.run_record import Run
from tuneloop.runs.stages import find_iteration, get_stage_name
from tuneloop.runs.summary import format_duration, format_number
from tuneloop.workflow.rendered_stages import read_loop

if TYPE_CHECKING:
    from rich.console import RenderableType

PROGRESS = re.compile(r"^\w+: (?P<done>\d+)/(?P<total>\d+) \S")
"""A line of `tuneloop.core.progress`."""
ITERATION = re.compile(r"^iteration \d+/\d+  reward ")
"""A line of `tuneloop.local.iterations`, one for each iteration of a pod that runs several."""


class Display:
    """Shows the nodes of a run; give `node` and `log` to the executor.

    Args:
        run: the run that is executed.
        workflow: its workflow, whose parameter ``iterations`` bounds the loop.
    """

    def __init__(self, run: Run, workflow: Mapping[str, Any]) -> None:
        parameters = workflow["spec"].get("arguments", {}).get("parameters", ())
        self.run = run
        self.total = next(
            (int(p["value"]) for p in parameters if p["name"] == "iterations" and "value" in p),
            None,
        )
        self.scorers = {name for name, role in read_loop(workflow).items() if role == "scorer"}
        self.servers = {
            each["name"] for each in workflow["spec"].get("templates", ()) if each.get("daemon")
        }
        self.begun = time.time()
        self.running: dict[str, Node] = {}
        self.told: dict[str, str] = {}
        self.phases: dict[str, str] = {}
        self.retries: dict[str, Node] = {}
        self.waiting: dict[str, Node] = {}
        self.iteration = 0
        self.first: tuple[int, float] | None = None
        self.parts: list[str] = []
        self.reward = ""
        self.live: Any = None
        self.table: RenderableType = run.name
        self.due = 0.0

    def __enter__(self) -> "Display":
        if sys.stdout.isatty():
            from rich.live import Live

            self.live = Live(get_renderable=self._draw, refresh_per_second=4, transient=True)
            self.live.start()
        return self

    def __exit__(self, *ended: object) -> None:
        self._end_iteration()
        if self.live:
            self.live.stop()

    def node(self, node: Node) -> None:
        """Show a node that changed."""
        if node.type == "Retry":
            self._retried(node)
        if node.type != "Pod":
            return
        before, self.phases[node.id] = self.phases.get(node.id), node.phase
        if node.phase == "Running" and not node.daemoned:
            self.running[node.id] = node
            self.waiting.pop(node.parent, None)
            iteration = find_iteration(node)
            # An update may begin after the next batch's rollout, and a server be started anew within an iteration.
            if iteration > self.iteration or not (iteration or node.template in self.servers):
                self._end_iteration()
                self.iteration = max(self.iteration, iteration)
                if iteration and self.first is None:
                    self.first = (iteration, time.time())
        else:
            self.running.pop(node.id, None)
        if node.phase in DONE and before not in DONE:
            if (
                node.phase not in BROKEN or node.parent not in self.retries
            ):  # else the retry reports it
                self._ended(node)
        elif node.daemoned and before != "ready":
            self.phases[node.id] = "ready"
            self.waiting.pop(node.parent, None)
            self._print(
                f"{get_stage_name(node)}: ready in {format_duration(time.time() - node.started)}"
            )

    def _retried(self, node: Node) -> None:
        """Show how an attempt ended, and when the next one begins, or that it was the last."""
        before, self.retries[node.id] = self.retries.get(node.id), node
        if node.phase in DONE:
            self.waiting.pop(node.id, None)
            if node.phase in BROKEN and (before is None or before.phase not in DONE):
                self._ended(node)
        elif node.message and (before is None or before.message != node.message):
            self.waiting[node.id] = node
            self._print(f"{get_stage_name(node)}: {node.message}")

    def log(self, node: Node, line: str) -> None:
        """Show a line that a pod wrote."""
        match = PROGRESS.match(line)
        if match:
            self.told[node.id] = line
            if not self.live and int(match["done"]) < int(match["total"]):
                self._print(line)
        elif ITERATION.match(line):
            self._print(line)

    def _ended(self, node: Node) -> None:
        seconds = format_duration(node.finished - node.started)
        if node.template in self.scorers and "mean-reward" in node.outputs:
            self.reward = f"{float(node.outputs['mean-reward']):.3f}"
        if node.phase in BROKEN:
            self._print(
                f"{get_stage_name(node)}: {node.phase.lower()} after {seconds}: {node.message}"
            )
        elif node.phase == "Omitted":
            self._print(f"{get_stage_name(node)}: ended after {seconds}: {node.message}")
        elif find_iteration(node):
            self.parts.append(f"{get_stage_name(node)} {seconds}")
        else:
            results = "  ".join(
                f"{k} {format_number(v)}" for k, v in node.outputs.items() if format_number(v)
            )
            how = "stopped after " if node.daemoned else ""
            self._print(f"{get_stage_name(node)}: {how}{seconds}  {results}".rstrip())

    def _end_iteration(self) -> None:
        """Say which iteration ended, with its reward, the rate so far and the time left."""
        if self.parts and self.first:
            text = f"iteration {self.iteration}" + (f"/{self.total}" if self.total else "")
            text += f"  reward {self.reward}" if self.reward else ""
            each = (time.time() - self.first[1]) / (self.iteration - self.first[0] + 1)
            left = each * (self.total - self.iteration) if self.total else 0
            text += f"  {format_duration(each)}/iteration"
            text += f"  at most {format_duration(left)} left" if left else ""
            self._print(f"{text}  ({', '.join(self.parts)})")
        self.parts = []

    def _print(self, line: str) -> None:
        if self.live:
            self.live.console.print(line, highlight=False, markup=False)
        else:
            print(f"{format_duration(time.time() - self.begun):>8}  {line}", flush=True)

    def _draw(self) -> "RenderableType":
        from rich.console import Group
        from rich.text import Text

        from tuneloop.ui.describe import describe_state

        began = time.monotonic()
        if began >= self.due:
            try:
                self.run.refresh(all_iterations=False)
                self.table = draw_state(describe_state(self.run, None))
            except (UserError, Retryable) as error:  # the run's executor reports what ends the run
                self.table = Text(str(error))
            self.due = time.monotonic() + max(LOOK_S, 10 * (time.monotonic() - began))
        lines = []
        for node in list(self.running.values()):
            since = format_duration(time.time() - node.started)
            lines.append(
                f"  {get_stage_name(node)}  {since}  {self.told.get(node.id, '')}".rstrip()
            )
        lines += [
            f"  {get_stage_name(node)}: {node.message}" for node in list(self.waiting.values())
        ]
        return Group(self.table, Text("\n".join(lines)))
