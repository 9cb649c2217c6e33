"""Steps that reserve or release shared devices, or end a Dynamo graph: they run `tuneloop.cluster.reservations`."""

import json

from hera.workflows import Container, Parameter, Workflow
from hera.workflows.models import ValueFrom

from tuneloop.argo.claims import END, GIVE, ROLES, TAKE, TRAINER, claim_output, share_of
from tuneloop.argo.pod_fields import OUTPUTS, step_fields
from tuneloop.core.json_types import JsonMapping, JsonObject
from tuneloop.core.program import encode_flags
from tuneloop.workflow.settings import Cluster


def build_reservation_steps(cluster: Cluster) -> list[Container]:
    """Build the steps that reserve the claims of a workflow, and release them; none if it claims no devices."""
    share = cluster.share
    if not (share and share.device_class):
        return []
    seats = dict.fromkeys(claim_output(share, role) for role in (TRAINER, *ROLES.values()))
    made = [
        Parameter(name=each, global_name=each, value_from=ValueFrom(path=f"{OUTPUTS}/{each}"))
        for each in seats
    ]
    return [
        Container(
            name=name,
            outputs=outputs,
            command=["python", "-m", "tuneloop.cluster.reservations", name],
            args=["--workflow", "{{workflow.name}}", "--namespace", "{{workflow.namespace}}"],
            **step_fields("tuneloop-claims", cluster),
        )
        for name, outputs in ((TAKE, made), (GIVE, []))
    ]


def insert_reservation_steps(workflow: JsonObject) -> None:
    """Insert these steps: the first one runs before anything else, wherever the workflow may start."""
    templates = {template["name"]: template for template in workflow["spec"].get("templates", ())}
    share = share_of(workflow)
    if not share or TAKE not in templates:
        return
    take = templates[TAKE]
    rendered = json.dumps([each for name, each in templates.items() if name != TAKE])
    seats = [
        p
        for p in take["outputs"]["parameters"]
        if f"{{{{workflow.outputs.parameters.{p['name']}}}}}" in rendered
    ]
    take["outputs"]["parameters"] = seats
    take["container"]["args"] += [
        "--share",
        share.model_dump_json(),
        "--claims",
        *(p["name"] for p in seats),
    ]
    for name in list_entry_templates(workflow):
        tasks = templates[name]["dag"]["tasks"]
        for task in tasks:
            if not task.get("depends") and not task.get("dependencies"):
                task["depends"] = "claim"
        tasks.insert(0, {"name": "claim", "template": TAKE})


def add_graph_end(workflow: JsonObject, cluster: Cluster) -> None:
    """Add an exit handler that ends the run's Dynamo graph, beside the handler that a rendered workflow has."""
    place = {
        "workflow": "{{workflow.name}}",
        "namespace": "{{workflow.namespace}}",
        "run": "{{workflow.parameters.run}}",
    }
    command = ["python", "-m", "tuneloop.cluster.reservations", END]
    with Workflow() as built:
        Container(
            name=END,
            command=command,
            args=encode_flags(place),
            **step_fields("tuneloop-graphs", cluster),
        )
    spec = workflow["spec"]
    spec["templates"] += built.to_dict()["spec"]["templates"]
    if before := spec.get("onExit"):
        both = [{"name": name, "template": name} for name in (before, END)]
        spec["templates"].append({"name": "end-run", "dag": {"tasks": both}})
    spec["onExit"] = "end-run" if before else END


def list_entry_templates(workflow: JsonMapping) -> list[str]:
    """List the templates at which the workflow, or one that continues it, may start."""
    found = [workflow["spec"]["entrypoint"]]
    for template in workflow["spec"]["templates"]:
        container = template.get("container") or {}
        if "tuneloop.cluster.continue_run" in container.get("command", ()):
            found.append(container["args"][container["args"].index("--entrypoint") + 1])
    return list(dict.fromkeys(found))
