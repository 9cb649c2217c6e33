"""Tables of a run, why it failed, and its page written."""

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tuneloop.cli.live import format_number, get_stage_name, iteration_of
from tuneloop.cli.tables import print_table
from tuneloop.core.ends import NO_EXIT_CODE, classify_end, strip_exit
from tuneloop.core.errors import EXIT_USER, FAILED_FOR_NOW, INTERRUPTED, UNAVAILABLE, UserError
from tuneloop.core.store import normalize_url
from tuneloop.local.journal import BROKEN, Node
from tuneloop.runs.run_record import Entry, Run
from tuneloop.runs.summary import format_duration, format_size, result_line

if TYPE_CHECKING:
    from tuneloop.cluster.watch import Status
    from tuneloop.local.executor import Outcome

ATTEMPT = re.compile(r"\((\d+)\)$")
"""At the end of a pod's name in the graph: which attempt of its stage it is, from 0."""

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
        seconds: that it took, all together, without attempts that died.
        retries: how often a pod of it was started again; None where only its artifacts are known.
        lost_seconds: that attempts took that died.
        cause: how the newest of these ended.
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
    lost_seconds: float = 0.0
    cause: str = ""
    iteration: int | None = None
    results: Mapping[str, float | str] = field(default_factory=dict)
    message: str = ""

    def row(self, places: int) -> tuple[str, ...]:
        """Return its texts in the table, seconds with `places` decimal places."""
        phase = self.phase + (f" ({self.progress})" if self.progress else "")
        seconds = f"{self.seconds:.{places}f}" if self.done or self.seconds else ""
        retries = "" if self.retries is None else str(self.retries)
        retries += f" ({self.lost_seconds:.{places}f} s lost)" if self.lost_seconds else ""
        told = (self.phase in BROKEN and self.message) or result_line(self.iteration, self.results) or self.message
        return self.stage, phase, str(self.done or ""), seconds, retries, told


def show_stages(stages: Iterable[Stage], places: int = 1) -> None:
    """Print a line for each stage: phase, how often it ended well, seconds, retries, its newest result; then why the
    newest attempt died of those that have one that did."""
    columns, shown = ("stage", "phase", "done", "seconds", "retries", "newest"), list(stages)
    print_table(columns, (stage.row(places) for stage in shown), right=columns[2:5], cut="newest")
    for stage in shown:
        if stage.cause:
            typer.echo(f"{stage.stage}: {stage.cause}")


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
    return Stage(
        name,
        phase,
        progress=pod.progress if pod and under_way else "",
        done=len(entries),
        seconds=sum(e.seconds for e in entries),
        iteration=newest.iteration if newest else None,
        results=newest.manifest.results if newest else {},
        message=pod.message if pod else "",
        **(_describe_attempts(pods) if pods else {}),
    )


def list_cluster_stages(seen: "Status") -> list[Stage]:
    """List the stages of a run on a cluster by their pods, in the order in which they first had one.

    A stage of several pods is one, though Argo has two for it: one that starts its job, one that reads its output.
    """
    from tuneloop.cluster.watch import find_job_stage

    stages: dict[str, list[Node]] = {}
    for pod in (node for node in seen.nodes.values() if node.type == "Pod"):
        job = find_job_stage(pod, seen.nodes)
        stages.setdefault(job.display_name if job else get_stage_name(pod), []).append(pod)
    return [_cluster_stage(seen, name, pods) for name, pods in stages.items()]


def _cluster_stage(seen: "Status", name: str, pods: Sequence[Node]) -> Stage:
    from tuneloop.cluster.watch import find_job_stage

    newest, ended = pods[-1], [pod for pod in pods if pod.phase == "Succeeded"]
    phase, message, told = newest.phase, newest.message, ended[-1] if ended else newest
    if (job := find_job_stage(newest, seen.nodes)) and newest.template == f"{job.template}-job" and phase not in BROKEN:
        message = seen.waiting.get(job.template, "")
        phase = "Pending" if message else "Running"  # until its output is read
    return Stage(
        name,
        phase,
        done=sum(not (find_job_stage(pod, seen.nodes) and pod.template.endswith("-job")) for pod in ended),
        seconds=sum(pod.finished - pod.started for pod in ended),
        iteration=iteration_of(told) or None,
        results={name: float(value) for name, value in told.outputs.items() if format_number(value)},
        message=message,
        **_describe_attempts(pods),
    )


def _describe_attempts(pods: Sequence[Node]) -> dict[str, Any]:
    """Describe the attempts of a stage, and those of them that died, as fields of a `Stage`."""
    attempts = [(int(match[1]), pod) for pod in pods if (match := ATTEMPT.search(pod.display_name))]
    dead = [(number, pod) for number, pod in attempts if pod.phase in BROKEN and pod.finished]
    cause = ""
    for number, pod in dead[-1:]:
        at = f" of iteration {iteration}" if (iteration := iteration_of(pod)) else ""
        cause = f"attempt {number + 1}{at} ended after {pod.finished - pod.started:.0f} s: {describe_end(pod)}"
    lost = sum(pod.finished - pod.started for _, pod in dead)
    return {"retries": sum(number > 0 for number, _ in attempts), "lost_seconds": lost, "cause": cause}


def describe_end(pod: Node) -> str:
    """Describe how a pod ended that did not succeed: the class of its end, and its last words."""
    said = strip_exit(pod.message)
    if pod.phase == "Failed" and pod.exit_code is None:  # it was stopped
        return said
    name = classify_end(pod.phase, NO_EXIT_CODE if pod.exit_code is None else pod.exit_code, pod.message).name
    return said if said.startswith(name) else f"{name}: {said}"


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
    from tuneloop.runs.report import render_page

    path = output or run.directory / "report.html"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render_page(run))
    except OSError as error:
        raise UserError("--output", str(path), f"cannot be written ({error.strerror})") from error
    return path
