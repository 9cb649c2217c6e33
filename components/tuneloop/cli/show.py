"""Tables of a run, why it failed, and its page written."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tuneloop.cli.live import get_stage_name, iteration_of
from tuneloop.cli.tables import print_table
from tuneloop.core.errors import EXIT_USER, FAILED_FOR_NOW, INTERRUPTED, UNAVAILABLE, UserError
from tuneloop.core.store import normalize_url
from tuneloop.local.journal import BROKEN, Node
from tuneloop.runs.run_record import Entry, Run
from tuneloop.runs.summary import format_duration, format_size, result_line

if TYPE_CHECKING:
    from tuneloop.local.executor import Outcome

NAMED = tuple(f"{name}:" for name in ("error", "gave up", INTERRUPTED, UNAVAILABLE, FAILED_FOR_NOW))
"""How a last line begins that names the class of its end."""


@dataclass(frozen=True)
class Stage:
    """How a stage stands: a row of `status`.

    Attributes:
        stage: its name in the graph.
        phase: of its newest pod; ``Committed`` where only its artifacts are known.
        progress: ``N/M`` of a stage that runs, as it said.
        done: how often it ended well.
        seconds: that it took, all together.
        retries: how often a pod of it was started again; None where only its artifacts are known.
        iteration: of its newest result; None outside the loop.
        results: of its newest artifact, or of its newest pod.
        message: what its newest pod has to say.
    """

    stage: str
    phase: str
    progress: str = ""
    done: int = 0
    seconds: float = 0.0
    retries: int | None = None
    iteration: int | None = None
    results: Mapping[str, float | str] = field(default_factory=dict)
    message: str = ""

    def row(self, places: int) -> tuple[str, ...]:
        """Return its texts in the table, seconds with `places` decimal places."""
        phase = self.phase + (f" ({self.progress})" if self.progress else "")
        seconds = f"{self.seconds:.{places}f}" if self.done or self.seconds else ""
        retries = "" if self.retries is None else str(self.retries)
        told = result_line(self.iteration, self.results) or self.message
        return self.stage, phase, str(self.done or ""), seconds, retries, told


def show_stages(stages: Iterable[Stage], places: int = 1) -> None:
    """Print a line for each stage: phase, how often it ended well, seconds, retries, its newest result."""
    columns = ("stage", "phase", "done", "seconds", "retries", "newest")
    print_table(columns, (stage.row(places) for stage in stages), right=columns[2:5], cut="newest")


def list_stages(run: Run) -> list[Stage]:
    """List the stages of a run, in the order in which they first had a pod or an artifact."""
    state, stages = run.state, dict[str, tuple[list[Entry], list[Node]]]()
    for entry in run.entries:
        stages.setdefault(entry.stage, ([], []))[0].append(entry)
    for node in state.nodes.values() if state else ():
        if node.type == "Pod":
            stages.setdefault(get_stage_name(node), ([], []))[1].append(node)
    return [_stage(run, name, *of_it) for name, of_it in stages.items()]


def _stage(run: Run, name: str, entries: list[Entry], pods: list[Node]) -> Stage:
    newest, pod = entries[-1] if entries else None, pods[-1] if pods else None
    phase, under_way = pod.phase if pod else "Committed", bool(pod and pod.phase in ("Running", "Pending"))
    if pod and under_way:
        phase = "Interrupted" if run.phase == "interrupted" else "Ready" if pod.daemoned else phase
    calls = {(iteration_of(node), node.parent if node.display_name.endswith(")") else node.id) for node in pods}
    return Stage(
        name,
        phase,
        progress=pod.progress if pod and under_way else "",
        done=len(entries),
        seconds=sum(e.seconds for e in entries),
        retries=len(pods) - len(calls) if pods else None,
        iteration=newest.iteration if newest else None,
        results=newest.manifest.results if newest else {},
        message=pod.message if pod else "",
    )


def describe_failure(run: Run, outcome: "Outcome") -> str:
    """Describe in one line which stage ended the run, and its last words."""
    node = find_failed_pod(outcome.nodes.values())
    if node is None:
        return f"error: {outcome.message}"
    path = run.directory / node.log
    lines = path.read_text(errors="replace").split("\n") if node.log and path.is_file() else []
    said = next((line.strip() for line in reversed(lines) if line.strip()), node.message)
    at = format_store_option(run.store_url)
    then = f"`tuneloop resume {run.name}{at}`"
    if outcome.exit_code == EXIT_USER:
        run.refresh()
        then += ", or another run with other settings" if run.iteration else ", or run it again with other settings"
    return format_stage_error(node, said, f"tuneloop logs {run.name} {get_stage_name(node)}{at}", then)


def find_failed_pod(nodes: Iterable[Node]) -> Node | None:
    """Return the pod that failed last, or None."""
    broken = [node for node in nodes if node.type == "Pod" and node.phase in BROKEN]
    return max(broken, key=lambda n: n.finished, default=None)


def format_stage_error(node: Node, said: str, look: str, then: str) -> str:
    """Format a stage's last words as an error, with the command that shows its log and the way to continue."""
    kind = "" if said.startswith(NAMED) else "error: "
    return f"{kind}{said} (in {get_stage_name(node)}; see `{look}`, then {then})"


def format_store_option(store: str) -> str:
    """Format the option that names a store; empty for the default store."""
    return "" if normalize_url(store) == normalize_url("runs") else f" --store {store.removeprefix('file://')}"


def show_weights(run: Run) -> None:
    """Print the checkpoints of a run: version, maker, digest, bytes, age, who used it, which is newest."""
    rows, held, users = [], run.checkpoints, dict[str, list[str]]()
    for entry in run.with_role("sampler", "evaluator"):
        if policy := run.policy_of(entry):
            users.setdefault(policy.key, []).append(entry.key)
    for entry in held:
        files = entry.manifest.files
        mark = " latest" if entry is held[-1] else ""
        rows.append(
            (
                f"{entry.manifest.facts['version']}{mark}",
                entry.key,
                entry.manifest.digest.removeprefix("xxh3-128:")[:12],
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
    from tuneloop.runs.report import render_page

    path = output or run.directory / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_page(run))
    except OSError as error:
        raise UserError("--output", str(path), f"cannot be written ({error.strerror})") from error
    return path
