"""The workflows of a run: prepare, name, find and read them."""

import copy

import tuneloop
from tuneloop.argo.jobset import check_names, dump_manifest
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.store import normalize_url
from tuneloop.kube.connection import NAMESPACE, WORKFLOWS, Connection
from tuneloop.runs.records import check_name
from tuneloop.workflow.manifest import begin_at_template, parse_applied_object
from tuneloop.workflow.settings import PRIORITY_LABEL, QUEUE_LABEL, RUN_LABEL

DONE = ("Succeeded", "Failed", "Error")
CONTINUES = "tuneloop.dev/continues"
"""Annotation: the previous workflow of the same run."""

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
    """Prepare `workflow` as `create_workflow` sends it: named and, with its pods, labelled by its run. Raises UserError
    where it lacks the parameter ``run`` or ``store``, `run` is no name or too long, or `store` names no bucket."""
    check_name(run)
    normalize_url(store)
    made = copy.deepcopy(dict(workflow))
    metadata = made.setdefault("metadata", {})
    metadata.pop("generateName", None)
    metadata.update(name=run, namespace=namespace)
    metadata.setdefault("labels", {})[RUN_LABEL] = run
    spec = made["spec"]
    spec.setdefault("podMetadata", {}).setdefault("labels", {})[RUN_LABEL] = run
    parameters = {item["name"]: item for item in spec.get("arguments", {}).get("parameters", ())}
    for name, value in (("run", run), ("store", store)):
        if name not in parameters:
            raise UserError(
                f"spec.arguments.parameters.{name}",
                None,
                "is missing; tuneloop's pipelines have it",
            )
        parameters[name]["value"] = value
    for mutex in spec.get("synchronization", {}).get(
        "mutexes", ()
    ):  # the controller would write the same
        mutex["name"] = mutex["name"].replace("{{workflow.parameters.run}}", run)
    for template in spec.get("templates", ()) if priority else ():
        job = parse_applied_object(template)
        labels = (job or template).get("metadata", {}).get("labels", {})
        if QUEUE_LABEL in labels:
            labels[PRIORITY_LABEL] = priority
            if job:
                template["resource"]["manifest"] = dump_manifest(job)
    check_names(made, run)
    return made


def as_template(workflow: JsonMapping, name: str) -> JsonObject:
    """Return `workflow` as the WorkflowTemplate `name`; workflows that are submitted from it label themselves."""
    labels = workflow["metadata"].get("labels", {})
    spec = copy.deepcopy(workflow["spec"])
    spec.setdefault("podMetadata", {}).setdefault("labels", {})[RUN_LABEL] = (
        "{{workflow.parameters.run}}"
    )
    spec["workflowMetadata"] = {
        "labelsFrom": {RUN_LABEL: {"expression": "workflow.parameters.run"}}
    }
    metadata = {
        "name": name,
        "namespace": NAMESPACE,
        "labels": {k: v for k, v in labels.items() if k != RUN_LABEL},
    }
    if annotations := workflow["metadata"].get("annotations"):
        metadata["annotations"] = annotations
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "WorkflowTemplate",
        "metadata": metadata,
        "spec": spec,
    }


def template_name(pipeline: str) -> str:
    """Return the name of a pipeline's WorkflowTemplate: one for each version, so that a run under way keeps its own."""
    return f"{pipeline.replace('_', '-')}-v{tuneloop.__version__.replace('.', '-')}"


def find_queued_templates(workflow: JsonMapping) -> dict[str, dict[str, str]]:
    """Return template → labels, for templates whose pod or job waits in a queue."""
    templates = workflow["spec"].get("templates", ())
    labels = {
        t["name"]: (parse_applied_object(t) or t).get("metadata", {}).get("labels", {})
        for t in templates
    }
    return {name: each for name, each in labels.items() if QUEUE_LABEL in each}


def list_queues(workflow: JsonMapping) -> list[str]:
    """List the LocalQueues that templates of a workflow wait in."""
    return sorted({labels[QUEUE_LABEL] for labels in find_queued_templates(workflow).values()})


def find_workflows(cluster: Connection, run: str) -> list[JsonObject]:
    """Return the workflows of a run, oldest first. Raises UserError where there is none."""
    if not (found := list_workflows(cluster, run)):
        remedy = f"no workflow in namespace {cluster.namespace} of {cluster.context} has the label {RUN_LABEL}={run}"
        raise UserError("run", run, remedy)
    # Kubernetes' times are whole seconds; workflows of the same second are ordered by their numbers.
    return sorted(
        found,
        key=lambda w: (
            w["metadata"]["creationTimestamp"],
            get_workflow_number(run, w["metadata"]["name"]),
        ),
    )


def list_workflows(cluster: Connection, run: str) -> list[JsonObject]:
    """List the workflows of a run as the API server does; none where the run does not exist."""
    return cluster.list(*WORKFLOWS, selector=f"{RUN_LABEL}={run}")


def list_cluster_runs(cluster: Connection, store: str, selector: str) -> set[str]:
    """List the runs below `store`, a normalized URL, that have workflows which a label selector selects."""
    found = cluster.list(*WORKFLOWS, selector=selector)
    given = (
        (w["metadata"]["labels"][RUN_LABEL], w["spec"].get("arguments", {}).get("parameters", ()))
        for w in found
    )
    return {run for run, parameters in given if {"name": "store", "value": store} in parameters}


def get_workflow_phase(workflow: JsonMapping) -> str:
    """Return the phase of a workflow; ``Pending`` before the controller has seen it."""
    return str(workflow.get("status", {}).get("phase") or "Pending")


def copy_entrypoint(made: JsonMapping, newest: JsonMapping) -> JsonMapping:
    """Return `made` with the entrypoint of `newest`, a later workflow of the same run."""
    spec = newest["spec"]
    known = {p["name"] for p in made["spec"]["arguments"]["parameters"]}
    given = spec.get("arguments", {}).get("parameters", ())
    carried = {p["name"]: p["value"] for p in given if p["name"] not in known}
    return begin_at_template(made, spec["entrypoint"], carried) if carried else made


def get_workflow_number(run: str, name: str) -> int:
    """Return which workflow of the run `name` is: ``demo`` is 1, ``demo-2`` 2."""
    rest = name.removeprefix(f"{run}-")
    return int(rest) if rest.isdigit() else 1
