"""How the stages of a run stand: by its artifacts and its executor here, or by the pods of its workflows elsewhere."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuneloop.core.ends import NO_EXIT_CODE, classify_end, strip_exit
from tuneloop.local.journal import BROKEN, Node
from tuneloop.runs.run_record import Entry, Run
from tuneloop.runs.summary import format_number, result_line

ATTEMPT = re.compile(r"\((\d+)\)$")
"""At the end of a pod's name in the graph: which attempt of its stage it is, from 0."""


@dataclass(frozen=True)
class Stage:
    """State of a stage, as `status` shows it. `phase`, `progress` (``N/M``) and `message` are those of its newest pod.

    Attributes:
        phase: ``Committed`` where only artifacts of the stage are known.
        done: how often the stage succeeded.
        seconds: total time of its successes; `lost_seconds` is that of its failed attempts.
        retries: how often a pod of the stage was started again; None where only artifacts are known.
        cause: how the newest failed attempt ended.
        iteration: the iteration of its newest result; None outside the loop.
        results: the results of its newest artifact, or of the newest pod that succeeded.
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
        """Return the cells of its row in the table, with seconds to `places` decimal places."""
        phase = self.phase + (f" ({self.progress})" if self.progress else "")
        seconds = f"{self.seconds:.{places}f}" if self.done or self.seconds else ""
        retries = "" if self.retries is None else str(self.retries)
        retries += f" ({self.lost_seconds:.{places}f} s lost)" if self.lost_seconds else ""
        told = (
            (self.phase in BROKEN and self.message)
            or result_line(self.iteration, self.results)
            or self.message
        )
        return self.stage, phase, str(self.done or ""), seconds, retries, told


def get_stage_name(node: Node) -> str:
    """Return the name of a node's stage in the graph, without the number of the attempt."""
    return re.sub(r"\(\d+\)$", "", node.display_name)


def iteration_of(node: Node) -> int:
    """Return the iteration in which a pod writes ``iterations/<i>/<stage>``, 0 outside the loop. What it reads does not
    count: its address ends with a digest, and it may be of an earlier iteration."""
    found = (re.search(r"/iterations/(\d+)/[^/@]+$", value) for value in node.inputs.values())
    return next((int(match[1]) for match in found if match), 0)


def find_job_stage(pod: Node, nodes: Mapping[str, Node]) -> Node | None:
    """Find the stage whose job of several pods `pod` starts, or whose output it reads (`tuneloop.argo.jobset`)."""
    above = nodes.get(pod.parent)
    return (
        above
        if above and pod.template in (f"{above.template}-job", f"{above.template}-result")
        else None
    )


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
    phase, under_way = (
        pod.phase if pod else "Committed",
        bool(pod and pod.phase in ("Running", "Pending")),
    )
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


def list_cluster_stages(nodes: Mapping[str, Node], waiting: Mapping[str, str]) -> list[Stage]:
    """List the stages of a run on a cluster by their pods, in the order in which they first had one. A stage of several
    pods is listed once, though Argo has two for it: one starts its job, one reads its output. `nodes` are those of its
    workflows, by id; `waiting` maps a node, or a stage of several pods, to why it does not run."""
    stages: dict[str, list[Node]] = {}
    for pod in (node for node in nodes.values() if node.type == "Pod"):
        job = find_job_stage(pod, nodes)
        stages.setdefault(job.display_name if job else get_stage_name(pod), []).append(pod)
    return [_cluster_stage(nodes, waiting, name, pods) for name, pods in stages.items()]


def _cluster_stage(
    nodes: Mapping[str, Node], waiting: Mapping[str, str], name: str, pods: Sequence[Node]
) -> Stage:
    newest, ended = pods[-1], [pod for pod in pods if pod.phase == "Succeeded"]
    phase, message, told = newest.phase, newest.message, ended[-1] if ended else newest
    if (
        (job := find_job_stage(newest, nodes))
        and newest.template == f"{job.template}-job"
        and phase not in BROKEN
    ):
        message = waiting.get(job.template, "")
        phase = "Pending" if message else "Running"  # until its output is read
    elif phase == "Pending":
        message = waiting.get(newest.name, message)
    return Stage(
        name,
        phase,
        done=sum(
            not (find_job_stage(pod, nodes) and pod.template.endswith("-job")) for pod in ended
        ),
        seconds=sum(pod.finished - pod.started for pod in ended),
        iteration=iteration_of(told) or None,
        results={
            name: float(value) for name, value in told.outputs.items() if format_number(value)
        },
        message=message,
        **_describe_attempts(pods),
    )


def _describe_attempts(pods: Sequence[Node]) -> dict[str, Any]:
    """Describe the attempts of a stage, and which of them failed, as fields of a `Stage`."""
    attempts = [(int(match[1]), pod) for pod in pods if (match := ATTEMPT.search(pod.display_name))]
    dead = [(number, pod) for number, pod in attempts if pod.phase in BROKEN and pod.finished]
    cause = ""
    for number, pod in dead[-1:]:
        at = f" of iteration {iteration}" if (iteration := iteration_of(pod)) else ""
        cause = f"attempt {number + 1}{at} ended after {pod.finished - pod.started:.0f} s: {describe_end(pod)}"
    lost = sum(pod.finished - pod.started for _, pod in dead)
    return {
        "retries": sum(number > 0 for number, _ in attempts),
        "lost_seconds": lost,
        "cause": cause,
    }


def describe_end(pod: Node) -> str:
    """Describe how a failed pod ended: the class of its end, and its last line."""
    said = strip_exit(pod.message)
    if pod.phase == "Failed" and pod.exit_code is None:  # it was stopped
        return said
    name = classify_end(
        pod.phase, NO_EXIT_CODE if pod.exit_code is None else pod.exit_code, pod.message
    ).name
    return said if said.startswith(name) else f"{name}: {said}"
