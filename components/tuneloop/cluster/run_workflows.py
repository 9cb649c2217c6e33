"""The workflows of a run: prepare, name, find and read them."""

import copy

import tuneloop
from tuneloop.argo.jobset import check_names, dump_manifest
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.store import normalize_url
from tuneloop.kube.connection import NAMESPACE, WORKFLOWS, Connection
from tuneloop.runs.records import check_name
from tuneloop.workflow.manifest import begin_at_template, parse_applied_object, read_parameters
from tuneloop.workflow.plan import PLAN
from tuneloop.workflow.settings import PRIORITY_LABEL, QUEUE_LABEL, RUN_LABEL

DONE = ("Succeeded", "Failed", "Error")
"""Phases of a workflow that has ended. A node may also end as Skipped or Omitted:
`local/journal.py: DONE`."""
CONTINUES = "tuneloop.dev/continues"
"""Annotation: the previous workflow of the same run. `cluster/continue_run.py` writes it, and
`cluster/submit.py: create_numbered` reads it."""

ACTIVE = f"{RUN_LABEL},workflows.argoproj.io/completed!=true"
"""Selects the workflows that are under way, exit handler included."""


def prepare_workflow(
    workflow: JsonMapping,
    *,
    run: str,
    store: str,
    namespace: str = NAMESPACE,
    priority: str | None = None,
) -> JsonObject:
    """Prepare `workflow` as `submit.create_workflow` sends it: named and, with the pods of its
    templates, labelled by its run. Pods of jobs get their labels in `argo/jobset.py` and
    `extensions/trainers/trainjob.py`.

    `submit`, `schedule`, `doctor`, sweeps and `diff` call it. A parameter that is added has to be
    given by `cluster/drift.py: _prepare_like`, too, else `diff` shows what it changes.

    Args:
        workflow: as it is rendered; it is not changed.
        run: the name of the run.
        store: the URL below which the run commits.
        namespace: where the workflow will be created.
        priority: the priority class of everything that waits in a queue; None: as rendered.

    Raises:
        UserError: the workflow lacks the parameter ``run`` or ``store``, `run` is no name or too
            long, or `store` names no bucket.
    """
    check_name(run)
    normalize_url(store)
    prepared = copy.deepcopy(dict(workflow))
    metadata = prepared.setdefault("metadata", {})
    metadata.pop("generateName", None)
    metadata.update(name=run, namespace=namespace)
    metadata.setdefault("labels", {})[RUN_LABEL] = run
    spec = prepared["spec"]
    pod_labels = spec.setdefault("podMetadata", {}).setdefault("labels", {})
    pod_labels[RUN_LABEL] = run
    declared = spec.get("arguments", {}).get("parameters", ())
    parameters = {item["name"]: item for item in declared}
    values = {
        "run": run,
        "store": store,
    }
    for name, value in values.items():
        if name not in parameters:
            raise UserError(
                f"spec.arguments.parameters.{name}",
                None,
                "is missing; tuneloop's pipelines have it",
            )
        parameters[name]["value"] = value
    for mutex in spec.get("synchronization", {}).get("mutexes", ()):
        # Argo would put the name in when the workflow starts. Done here, so that a workflow that is
        # read before that (or by `--dry-run`) has the same text.
        mutex["name"] = mutex["name"].replace("{{workflow.parameters.run}}", run)
    if priority:
        for template in spec.get("templates", ()):
            _set_priority(template, priority)
    check_names(prepared, run)
    return prepared


def _set_priority(template: JsonObject, priority: str) -> None:
    """Set the priority class of the pod, or the job, of a template that waits in a queue."""
    job = parse_applied_object(template)
    metadata = (job or template).get("metadata", {})
    labels = metadata.get("labels", {})
    if QUEUE_LABEL not in labels:
        return
    labels[PRIORITY_LABEL] = priority
    if job:
        # A job is a text in the template that applies it.
        template["resource"]["manifest"] = dump_manifest(job)


def as_template(workflow: JsonMapping, name: str) -> JsonObject:
    """Return `workflow` as the WorkflowTemplate `name`.

    Workflows that are submitted from it label themselves. The namespace is that of
    ``manifests/components/pipelines``, whose files are written by it (`make golden`); a schedule
    takes only the spec (`cluster/schedule.py: template_spec`).
    """
    labels = dict(workflow["metadata"].get("labels", {}))
    # The run is known only when a workflow is submitted from the template.
    labels.pop(RUN_LABEL, None)
    spec = copy.deepcopy(workflow["spec"])
    pod_labels = spec.setdefault("podMetadata", {}).setdefault("labels", {})
    pod_labels[RUN_LABEL] = "{{workflow.parameters.run}}"
    run_expression = {"expression": "workflow.parameters.run"}
    workflow_metadata: JsonObject = {"labelsFrom": {RUN_LABEL: run_expression}}
    annotations = dict(workflow["metadata"].get("annotations") or {})
    if PLAN in annotations:
        # The controller writes `workflowMetadata` into each workflow that is made from the template.
        # Only the plan is read from a workflow later; other annotations describe the template.
        workflow_metadata["annotations"] = {PLAN: annotations.pop(PLAN)}
    spec["workflowMetadata"] = workflow_metadata
    metadata = {
        "name": name,
        "namespace": NAMESPACE,
        "labels": labels,
    }
    if annotations:
        metadata["annotations"] = annotations
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "WorkflowTemplate",
        "metadata": metadata,
        "spec": spec,
    }


def template_name(pipeline: str) -> str:
    """Return the name of a pipeline's WorkflowTemplate.

    There is one for each version, so that a run under way keeps its own.
    """
    version = tuneloop.__version__.replace(".", "-")
    return f"{pipeline.replace('_', '-')}-v{version}"


def find_queued_templates(workflow: JsonMapping) -> dict[str, dict[str, str]]:
    """Return template → labels, for templates whose pod or job waits in a queue."""
    labels_by_template: dict[str, dict[str, str]] = {}
    for template in workflow["spec"].get("templates", ()):
        # A job is queued as a whole: its pods are made when it is admitted.
        queued = parse_applied_object(template) or template
        metadata = queued.get("metadata", {})
        labels = metadata.get("labels", {})
        if QUEUE_LABEL in labels:
            labels_by_template[template["name"]] = labels
    return labels_by_template


def list_queues(workflow: JsonMapping) -> list[str]:
    """List the LocalQueues that templates of a workflow wait in."""
    labels_by_template = find_queued_templates(workflow)
    return sorted({labels[QUEUE_LABEL] for labels in labels_by_template.values()})


def find_workflows(cluster: Connection, run: str) -> list[JsonObject]:
    """Return the workflows of a run, oldest first. Raises UserError where there is none."""
    workflows = list_workflows(cluster, run)
    if not workflows:
        raise UserError(
            "run",
            run,
            f"no workflow in namespace {cluster.namespace} of {cluster.context} has the label"
            f" {RUN_LABEL}={run}",
        )
    return workflows


def list_workflows(cluster: Connection, run: str) -> list[JsonObject]:
    """List the workflows of a run, oldest first; none where the run does not exist."""
    workflows = cluster.list(*WORKFLOWS, selector=f"{RUN_LABEL}={run}")
    return sorted(workflows, key=lambda workflow: get_workflow_age(workflow, run))


def get_workflow_age(workflow: JsonMapping, run: str) -> tuple[str, int]:
    """Return what workflows of a run are sorted by, oldest first."""
    # Kubernetes' times are whole seconds: workflows of one second are ordered by numbers.
    metadata = workflow["metadata"]
    return metadata["creationTimestamp"], get_workflow_number(run, metadata["name"])


def list_cluster_runs(cluster: Connection, store: str, selector: str) -> set[str]:
    """List the runs below `store` that have workflows which a label selector selects.

    `store` is a normalized URL.
    """
    runs: set[str] = set()
    for workflow in cluster.list(*WORKFLOWS, selector=selector):
        if read_parameters(workflow["spec"]).get("store") == store:
            runs.add(workflow["metadata"]["labels"][RUN_LABEL])
    return runs


def get_workflow_phase(workflow: JsonMapping) -> str:
    """Return the phase of a workflow; ``Pending`` before the controller has seen it."""
    return str(workflow.get("status", {}).get("phase") or "Pending")


def find_executor_phase(cluster: Connection, run: str) -> str:
    """Return the phase of a run by its newest workflow, in the words of `Run.phase`.

    It is empty if the run has no workflow on the cluster. `ui/describe.py: describe_state` has a
    rule of its own: it only lowers the controller's word, and may say ``pending`` or ``error``.
    """
    workflows = list_workflows(cluster, run)
    if not workflows:
        return ""
    phase = get_workflow_phase(workflows[-1])
    # `Run.phase` has no word for a workflow that has not started: it counts as running.
    return {"Pending": "running", "Error": "failed"}.get(phase, phase.lower())


def copy_entrypoint(workflow: JsonMapping, newest: JsonMapping) -> JsonMapping:
    """Return `workflow` with the entrypoint of `newest`, a later workflow of the same run."""
    spec = newest["spec"]
    names = {item["name"] for item in workflow["spec"]["arguments"]["parameters"]}
    # What the workflow before has handed on, such as the number of the next iteration.
    carried: dict[str, str] = {}
    for name, value in read_parameters(spec).items():
        if name not in names:
            carried[name] = value
    if not carried:
        return workflow
    return begin_at_template(workflow, spec["entrypoint"], carried)


def get_workflow_number(run: str, name: str) -> int:
    """Return which workflow of the run `name` is: ``demo`` is 1, ``demo-2`` 2."""
    suffix = name.removeprefix(f"{run}-")
    return int(suffix) if suffix.isdigit() else 1
