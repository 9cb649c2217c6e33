"""Compare the objects on a cluster with what would be rendered now."""

import difflib
from collections.abc import Mapping
from typing import Any

from tuneloop.cluster import run_workflows
from tuneloop.cluster.schedule import LABEL, TEMPLATES, template_spec
from tuneloop.config.loading import dump_workflow
from tuneloop.core.errors import UserError
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.kube.connection import Connection


def template_drift(cluster: Connection, workflow: JsonMapping, name: str) -> str:
    """Return a unified diff from the WorkflowTemplate `name`, which was applied from manifests or made by a schedule,
    to `workflow`; empty if they are equal. Raises UserError if there is no such template."""
    if (live := cluster.find(*TEMPLATES, name)) is None:
        remedy = f"is not a WorkflowTemplate of namespace {cluster.namespace}; apply manifests/components/pipelines"
        raise UserError("template", name, remedy)
    if LABEL not in live["metadata"].get("labels", {}):
        return _difference(live["spec"], run_workflows.as_template(workflow, name)["spec"], name)
    return _difference(live["spec"], template_spec(_prepare_as(live, workflow, name), name), name)


def run_drift(cluster: Connection, workflow: JsonMapping, run: str) -> str:
    """Compare the newest workflow of a run with `workflow`, as submitted to that run; see `template_drift`."""
    live = run_workflows.find_workflows(cluster, run)[-1]
    made = run_workflows.copy_entrypoint(_prepare_as(live, workflow, run), live)
    spec = {k: v for k, v in live["spec"].items() if k != "shutdown"}
    return _difference(spec, made["spec"], live["metadata"]["name"])


def _prepare_as(live: JsonMapping, workflow: JsonMapping, run: str) -> JsonObject:
    """Prepare `workflow` for the store and the namespace of the one that is live."""
    store = next(
        str(p["value"]) for p in live["spec"]["arguments"]["parameters"] if p["name"] == "store"
    )
    return run_workflows.prepare_workflow(
        workflow, run=run, store=store, namespace=live["metadata"]["namespace"]
    )


def _difference(live: JsonMapping, rendered: JsonMapping, name: str) -> str:
    there, here = (
        dump_workflow(_normal(_labelled(side))).splitlines(keepends=True)
        for side in (live, rendered)
    )
    return "".join(difflib.unified_diff(there, here, f"live/{name}", f"rendered/{name}"))


def _labelled(spec: JsonMapping) -> JsonObject:
    """Return `spec` with its pods' labels written into each template, as the controller does when it runs."""
    common = spec.get("podMetadata", {}).get("labels", {})
    templates = []
    for template in spec.get("templates", ()):
        own = template.get("metadata") or {}
        labels = {**common, **(own.get("labels") or {})}
        graph = "dag" in template or "steps" in template
        templates.append(template if graph else {**template, "metadata": {**own, "labels": labels}})
    return {**spec, "templates": templates}


def _normal(value: Any) -> Any:
    """Return `value` with its keys in order and without empty fields, which servers and controllers add."""
    if isinstance(value, Mapping):
        made = {key: _normal(value[key]) for key in sorted(value)}
        return {
            key: item for key, item in made.items() if item != {} and (key, item) != ("name", "")
        }
    return [_normal(item) for item in value] if isinstance(value, list) else value
