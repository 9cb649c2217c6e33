"""List the runs of a namespace by their workflows."""

from dataclasses import dataclass

from tuneloop.cluster.run_workflows import get_workflow_age, get_workflow_phase
from tuneloop.cluster.watch import parse_time
from tuneloop.core.json_types import JsonMapping
from tuneloop.kube.connection import WORKFLOWS, Connection
from tuneloop.workflow.manifest import effective_spec, read_parameters
from tuneloop.workflow.settings import RUN_LABEL


@dataclass(frozen=True)
class ListedRun:
    """A run in the list of those of a namespace.

    Its fields are the keys of ``cluster list --json`` (docs/commands.md); the columns of the table
    are in `cli/cluster.py: list_runs`. Tests: `tests/unit/cluster/test_following.py`.

    Attributes:
        run: its name.
        pipeline: the pipeline's name; empty for a workflow that was drawn by hand.
        phase: of the newest workflow: ``Pending Running Succeeded Failed Error``.
        message: the controller's, about the newest workflow.
        workflows: their names, oldest first.
        created: when the oldest was created, in Unix seconds.
        store: where it commits.
    """

    run: str
    pipeline: str
    phase: str
    message: str
    workflows: list[str]
    created: float
    store: str


def list_runs(cluster: Connection) -> list[ListedRun]:
    """List the runs that have a workflow in the namespace, the newest first."""
    workflows_by_run: dict[str, list[JsonMapping]] = {}
    for workflow in cluster.list(*WORKFLOWS, selector=RUN_LABEL):
        run = str(workflow["metadata"]["labels"][RUN_LABEL])
        workflows_by_run.setdefault(run, []).append(workflow)
    for run, workflows in workflows_by_run.items():
        workflows.sort(key=lambda workflow: get_workflow_age(workflow, run))
    runs = [_describe_run(run, workflows) for run, workflows in workflows_by_run.items()]
    runs.sort(key=lambda listed: listed.created, reverse=True)
    return runs


def _describe_run(run: str, workflows: list[JsonMapping]) -> ListedRun:
    """Describe a run by its workflows, oldest first."""
    newest = workflows[-1]
    spec = effective_spec(newest)
    pod_labels = spec.get("podMetadata", {}).get("labels", {})
    return ListedRun(
        run=run,
        pipeline=str(pod_labels.get("app.kubernetes.io/name", "")),
        phase=get_workflow_phase(newest),
        message=str(newest.get("status", {}).get("message", "")),
        workflows=[str(workflow["metadata"]["name"]) for workflow in workflows],
        created=parse_time(workflows[0]["metadata"]["creationTimestamp"]),
        store=read_parameters(spec).get("store", ""),
    )
