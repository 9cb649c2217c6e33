"""How the stages of a run stand: by its artifacts and its executor here, or by the pods of its
workflows elsewhere.

`status`, the page and `watch` show it as a table. What a cluster says is read by `cluster/watch.py`
into the same `Node`, and what Kubeflow Pipelines says by `kfp/progress.py` into the same
`StageStatus`. Tests: `tests/unit/cli/test_tables.py`, `tests/unit/local/test_journal.py`,
`tests/unit/cluster/test_cluster.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tuneloop.core.ends import NO_EXIT_CODE, classify_end, strip_exit
from tuneloop.local.journal import BROKEN, Node
from tuneloop.runs.committed import Entry
from tuneloop.runs.prepared_data import read_prepared_data
from tuneloop.runs.run_record import Run
from tuneloop.runs.summary import format_number, format_results

ATTEMPT = re.compile(r"\((\d+)\)$")
"""At the end of a pod's name in the graph: which attempt of its stage it is, from 0. Argo and
`local/retries.py` write it; `cluster/watch.py: get_pod_stage`, `cluster/waiting.py` and
`local/execution.py: Execution.get_address` take it off by themselves."""
COMMITTED_BELOW = re.compile(r"/iterations/(\d+)/[^/@]+$")
"""The end of the URL where a stage of the loop commits its artifact (`runs/committed.py` has the
layout)."""


@dataclass(frozen=True)
class StageStatus:
    """State of a stage, as `status` shows it. `phase`, `progress` and `message` are those of its
    newest pod.

    Its fields are keys of ``status --json`` (docs/commands.md), and `ui/static` reads them. The
    words of `phase` are known to `ui/static/run.js`. `_describe_stage`, `_describe_cluster_stage`
    and `kfp/progress.py` each make one: a field that is added has its default where they do not set
    it.

    Attributes:
        stage: its task's name in the graph.
        phase: ``Committed`` if only artifacts of the stage are known.
        progress: ``N/M``; empty unless the pod is running.
        done: how often the stage succeeded.
        seconds: total time of its successes; `lost_seconds` is that of its failed attempts.
        retries: how often a pod of the stage was started again; None if only artifacts are known.
        cause: how the newest failed attempt ended.
        iteration: the iteration of its newest result; None outside the loop.
        results: the results of its newest artifact, or of the newest pod that succeeded.
        message: the pod's, or why it does not run.
        summary: its newest artifact in words, where results alone would not say it.
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
    summary: str = ""

    def row(
        self,
        places: int,
    ) -> tuple[str, ...]:
        """Return the cells of its row in the table, with seconds to `places` decimal places. The
        heads of the columns are in `cli/show.py: show_stages` and `cli/watch.py: draw_state`.
        """
        phase = f"{self.phase} ({self.progress})" if self.progress else self.phase
        seconds = f"{self.seconds:.{places}f}" if self.done or self.seconds else ""
        retries = "" if self.retries is None else str(self.retries)
        if self.lost_seconds:
            retries += f" ({self.lost_seconds:.{places}f} s lost)"
        # Why a stage has failed matters more than its last results.
        results = self.summary or format_results(self.iteration, self.results)
        if self.phase in BROKEN and self.message:
            results = self.message
        return (
            self.stage,
            phase,
            str(self.done or ""),
            seconds,
            retries,
            results or self.message,
        )


def parse_stage_name(node_name: str) -> str:
    """Return the name of a stage in the graph by the whole name of its node, such as
    ``demo.loop.sft(0)``.
    """
    return node_name.rpartition(".")[2].partition("(")[0]


def get_stage_name(node: Node) -> str:
    """Return the name of a node's stage in the graph, without the number of the attempt."""
    return ATTEMPT.sub("", node.display_name)


def find_iteration(node: Node) -> int:
    """Return the iteration in which a pod writes ``iterations/<i>/<stage>``, 0 outside the loop.

    What it reads does not count: its address ends with a digest, and it may be of an earlier
    iteration.
    """
    for value in node.inputs.values():
        match = COMMITTED_BELOW.search(value)
        if match:
            return int(match[1])
    return 0


def find_job_stage(
    pod: Node,
    nodes: Mapping[str, Node],
) -> Node | None:
    """Find the stage whose job of several pods `pod` starts, or whose output it reads
    (`tuneloop.argo.jobset`).

    Args:
        pod: the pod.
        nodes: the nodes of its workflow, by id.
    """
    # Argo has both pods below the node of the stage.
    parent = nodes.get(pod.parent)
    if parent and pod.template in (
        f"{parent.template}-job",
        f"{parent.template}-result",
    ):
        return parent
    return None


def list_stages(run: Run) -> list[StageStatus]:
    """List the stages of a run, in the order in which they first had an artifact or a pod."""
    state = run.state
    entries: dict[str, list[Entry]] = {}
    pods: dict[str, list[Node]] = {}
    for entry in run.entries:
        entries.setdefault(entry.stage, []).append(entry)
    for node in state.nodes.values() if state else ():
        if node.type == "Pod":
            pods.setdefault(get_stage_name(node), []).append(node)
    # A dict for the order: a set has none.
    names = dict.fromkeys(entries) | dict.fromkeys(pods)
    return [
        _describe_stage(
            run,
            name,
            entries.get(name, []),
            pods.get(name, []),
        )
        for name in names
    ]


def _describe_stage(
    run: Run,
    name: str,
    entries: Sequence[Entry],
    pods: Sequence[Node],
) -> StageStatus:
    """Describe a stage of a run by its artifacts, and by its pods if it was executed here; both
    are oldest first.
    """
    status = StageStatus(
        name,
        "Committed",
        done=len(entries),
        seconds=sum(entry.seconds for entry in entries),
        iteration=entries[-1].iteration if entries else None,
        results=entries[-1].manifest.results if entries else {},
        summary=_summarize_rows(entries[-1]) if entries else "",
    )
    if not pods:
        return status
    pod = pods[-1]
    status = replace(status, phase=pod.phase, message=pod.message)
    if pod.phase in ("Running", "Pending"):
        status = replace(status, progress=pod.progress)
        # Nothing runs any more once the executor is gone.
        if run.phase == "interrupted":
            status = replace(status, phase="Interrupted")
        elif pod.daemoned:
            status = replace(status, phase="Ready")
    return _add_attempts(status, pods)


def _summarize_rows(entry: Entry) -> str:
    """Describe the rows of prepared data; empty for other artifacts."""
    data = read_prepared_data(entry)
    return data.describe_rows() if data else ""


def list_cluster_stages(
    nodes: Mapping[str, Node],
    waiting: Mapping[str, str],
) -> list[StageStatus]:
    """List the stages of a run on a cluster by their pods, in the order in which they first had
    one.

    A stage of several pods is listed once, though Argo has two for it: one starts its job, one
    reads its output.

    Args:
        nodes: the nodes of its workflows, by id.
        waiting: a node, or a stage of several pods → why it does not run.
    """
    pods: dict[str, list[Node]] = {}
    for node in nodes.values():
        if node.type == "Pod":
            job = find_job_stage(node, nodes)
            name = job.display_name if job else get_stage_name(node)
            pods.setdefault(name, []).append(node)
    return [
        _describe_cluster_stage(name, stage_pods, nodes, waiting)
        for name, stage_pods in pods.items()
    ]


def _describe_cluster_stage(
    name: str,
    pods: Sequence[Node],
    nodes: Mapping[str, Node],
    waiting: Mapping[str, str],
) -> StageStatus:
    """Describe a stage by its pods, oldest first; `nodes` and `waiting` are
    `list_cluster_stages`'s.
    """
    newest = pods[-1]
    succeeded = [pod for pod in pods if pod.phase == "Succeeded"]
    # The pod that only starts a job has done nothing yet.
    done = [pod for pod in succeeded if not _starts_job(pod, nodes)]
    newest_result = succeeded[-1] if succeeded else newest
    phase = newest.phase
    message = newest.message
    job = find_job_stage(newest, nodes)
    if job and _starts_job(newest, nodes) and phase not in BROKEN:
        # The job runs until its output is read.
        message = waiting.get(job.template, "")
        phase = "Pending" if message else "Running"
    elif phase == "Pending":
        message = waiting.get(newest.name, message)
    elif newest.daemoned and phase == "Succeeded":
        # Argo says so as soon as a server is ready, and takes the mark off when it ends.
        phase = "Ready"
        done = []
    status = StageStatus(
        name,
        phase,
        done=len(done),
        seconds=sum(pod.finished - pod.started for pod in succeeded),
        iteration=find_iteration(newest_result) or None,
        results=_read_results(newest_result),
        message=message,
    )
    return _add_attempts(status, pods)


def _starts_job(
    pod: Node,
    nodes: Mapping[str, Node],
) -> bool:
    """Return whether a pod only starts the job of a stage of several pods."""
    return find_job_stage(pod, nodes) is not None and pod.template.endswith("-job")


def _read_results(pod: Node) -> dict[str, float | str]:
    """Return the outputs of a pod that are numbers."""
    return {name: float(value) for name, value in pod.outputs.items() if format_number(value)}


def _add_attempts(status: StageStatus, pods: Sequence[Node]) -> StageStatus:
    """Add to a stage how often its pods were started again, and how the attempts that failed
    ended.
    """
    retries = 0
    lost_seconds = 0.0
    cause = ""
    for pod in pods:
        match = ATTEMPT.search(pod.display_name)
        # A stage that is not retried has pods without a number.
        if match is None:
            continue
        number = int(match[1])
        if number > 0:
            retries += 1
        if pod.phase in BROKEN and pod.finished:
            seconds = pod.finished - pod.started
            lost_seconds += seconds
            iteration = find_iteration(pod)
            subject = f"attempt {number + 1}"
            if iteration:
                subject += f" of iteration {iteration}"
            cause = f"{subject} ended after {seconds:.0f} s: {describe_end(pod)}"
    return replace(status, retries=retries, lost_seconds=lost_seconds, cause=cause)


def describe_end(pod: Node) -> str:
    """Describe how a failed pod ended: the class of its end, and its last line."""
    message = strip_exit(pod.message)
    # A pod that failed without an exit code was stopped: its message says by whom.
    if pod.phase == "Failed" and pod.exit_code is None:
        return message
    exit_code = NO_EXIT_CODE if pod.exit_code is None else pod.exit_code
    end = classify_end(pod.phase, exit_code, pod.message)
    return message if message.startswith(end.name) else f"{end.name}: {message}"
