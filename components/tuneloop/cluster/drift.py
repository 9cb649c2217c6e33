"""Compare the objects on a cluster with what would be rendered now.

`tuneloop diff` (`cli/cluster.py: diff_pipeline`) prints the difference. What `submit` or `schedule`
adds to the rendered workflow has to be added here, too, else it is a difference of every object.
`_prepare_like` repeats the run, the store and the namespace, and the priority class and the servers
of ``--fleet`` as the user gives them again. The parameter of a line is seen in the live template.

Tests: `tests/unit/cluster/test_lines.py`, and on a cluster `tests/cluster/test_continue.py`.
"""

import difflib
from collections.abc import Mapping
from typing import Any

from tuneloop.cluster import run_workflows
from tuneloop.cluster.schedule import BASE, LABEL, TEMPLATES, take_base_model, template_spec
from tuneloop.config.loading import dump_workflow
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kube.connection import Connection
from tuneloop.workflow.manifest import read_parameters
from tuneloop.workflow.plan import PLAN


def template_drift(
    cluster: Connection,
    workflow: JsonMapping,
    name: str,
    priority: str | None = None,
) -> str:
    """Compare the WorkflowTemplate `name` with `workflow`.

    The template was applied from manifests, or made by a schedule.

    Args:
        cluster: with the namespace of the template.
        workflow: as it is rendered.
        name: of the template.
        priority: the priority class that the schedule was given; None: as rendered.

    Returns:
        A unified diff from the template to `workflow`; empty if they are equal.

    Raises:
        UserError: there is no such template.
    """
    live = cluster.find(*TEMPLATES, name)
    if live is None:
        raise UserError(
            "template",
            name,
            f"is not a WorkflowTemplate of namespace {cluster.namespace};"
            " apply manifests/components/pipelines",
        )
    if LABEL in live["metadata"].get("labels", {}):
        # A schedule prepares its template for one store and namespace.
        prepared = _prepare_like(live, workflow, name, priority)
        rendered = template_spec(prepared, name)
        if BASE in read_parameters(live["spec"]):
            take_base_model(rendered, name)
    else:
        rendered = run_workflows.as_template(workflow, name)["spec"]
    return _compare_specs(live["spec"], rendered, name)


def run_drift(
    cluster: Connection,
    workflow: JsonMapping,
    run: str,
    priority: str | None = None,
) -> str:
    """Compare the newest workflow of a run with `workflow`, as submitted to that run.

    Returns and raises as `template_drift`, whose other arguments it has.
    """
    live = run_workflows.find_workflows(cluster, run)[-1]
    prepared = _prepare_like(live, workflow, run, priority)
    rendered = run_workflows.copy_entrypoint(prepared, live)
    # It is set when the run is stopped, and never rendered.
    spec = {key: value for key, value in live["spec"].items() if key != "shutdown"}
    return _compare_specs(
        spec,
        rendered["spec"],
        live["metadata"]["name"],
    )


def find_store(cluster: Connection, run: str | None, template: str) -> str | None:
    """Return the store of the newest workflow of a run, or without a run that of a template which a
    schedule made; None where there is none.

    Raises:
        UserError: there is no such run.
    """
    if run:
        return read_store(run_workflows.find_workflows(cluster, run)[-1])
    live = cluster.find(*TEMPLATES, template)
    is_scheduled = live is not None and LABEL in live["metadata"].get("labels", {})
    return read_store(live) if live and is_scheduled else None


def read_store(live: JsonMapping) -> str:
    """Return the store of a workflow, or of a schedule's template: each has this parameter."""
    return read_parameters(live["spec"])["store"]


def _prepare_like(
    live: JsonMapping,
    workflow: JsonMapping,
    run: str,
    priority: str | None,
) -> JsonObject:
    """Prepare `workflow` for the store and the namespace of the one that is live."""
    return run_workflows.prepare_workflow(
        workflow,
        run=run,
        store=read_store(live),
        namespace=live["metadata"]["namespace"],
        priority=priority,
    )


def _compare_specs(live: JsonMapping, rendered: JsonMapping, name: str) -> str:
    """Return the unified diff of two specs, as YAML."""
    return "".join(
        difflib.unified_diff(
            _dump_lines(live),
            _dump_lines(rendered),
            f"live/{name}",
            f"rendered/{name}",
        )
    )


def _dump_lines(spec: JsonMapping) -> list[str]:
    """Return the lines of a spec in one normal form, without the plan that it is rendered from."""
    labelled = _label_templates(spec)
    metadata = dict(labelled.get("workflowMetadata") or {})
    annotations = metadata.get("annotations") or {}
    metadata["annotations"] = {name: annotations[name] for name in annotations.keys() - {PLAN}}
    normalized = _normalize({**labelled, "workflowMetadata": metadata})
    return dump_workflow(normalized).splitlines(keepends=True)


def _label_templates(spec: JsonMapping) -> JsonObject:
    """Return `spec` with its pods' labels in each template, as the controller writes them."""
    common_labels = spec.get("podMetadata", {}).get("labels", {})
    templates: list[JsonMapping] = []
    for template in spec.get("templates", ()):
        # A graph has no pod.
        if "dag" in template or "steps" in template:
            templates.append(template)
            continue
        metadata = dict(template.get("metadata") or {})
        metadata["labels"] = common_labels | (metadata.get("labels") or {})
        labelled = dict(template)
        labelled["metadata"] = metadata
        templates.append(labelled)
    labelled_spec = dict(spec)
    labelled_spec["templates"] = templates
    return labelled_spec


def _normalize(value: Any) -> Any:
    """Return `value` with its keys in order and without empty fields.

    Servers and controllers add empty fields to what was sent.
    """
    if isinstance(value, list):
        return [_normalize(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    normalized: JsonObject = {}
    for key in sorted(value):
        item = _normalize(value[key])
        is_empty_name = key == "name" and item == ""
        if item != {} and not is_empty_name:
            normalized[key] = item
    return normalized
