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
    """Build the steps that reserve the claims of a workflow, and release them.

    There are none if the workflow claims no devices.
    """
    share = cluster.share
    if not (share and share.device_class):
        return []
    reservations: list[Parameter] = []
    # With one claim for all roles they have one output: each is a parameter once.
    for name in dict.fromkeys(claim_output(share, role) for role in (TRAINER, *ROLES.values())):
        path = ValueFrom(path=f"{OUTPUTS}/{name}")
        reservations.append(Parameter(name=name, global_name=name, value_from=path))
    return [
        Container(
            name=name,
            outputs=outputs,
            command=["python", "-m", "tuneloop.cluster.reservations", name],
            args=["--workflow", "{{workflow.name}}", "--namespace", "{{workflow.namespace}}"],
            **step_fields("tuneloop-claims", cluster),
        )
        for name, outputs in ((TAKE, reservations), (GIVE, []))
    ]


def insert_reservation_steps(workflow: JsonObject) -> None:
    """Insert these steps: the first one runs before anything else, wherever the workflow may start."""
    templates = {template["name"]: template for template in workflow["spec"].get("templates", ())}
    share = share_of(workflow)
    if not share or TAKE not in templates:
        return
    take = templates[TAKE]
    rendered = json.dumps([item for name, item in templates.items() if name != TAKE])
    # A claim that no stage of this workflow uses is not reserved.
    reservations = [
        parameter
        for parameter in take["outputs"]["parameters"]
        if f"{{{{workflow.outputs.parameters.{parameter['name']}}}}}" in rendered
    ]
    take["outputs"]["parameters"] = reservations
    take["container"]["args"] += ["--share", share.model_dump_json(), "--claims"]
    take["container"]["args"] += [parameter["name"] for parameter in reservations]
    for name in list_entry_templates(workflow):
        tasks = templates[name]["dag"]["tasks"]
        for task in tasks:
            if not task.get("depends") and not task.get("dependencies"):
                task["depends"] = "claim"
        tasks.insert(0, {"name": "claim", "template": TAKE})


def add_graph_end(workflow: JsonObject, cluster: Cluster) -> None:
    """Add an exit handler that ends the run's Dynamo graph, beside the handler that a rendered
    workflow has.
    """
    arguments = {
        "workflow": "{{workflow.name}}",
        "namespace": "{{workflow.namespace}}",
        "run": "{{workflow.parameters.run}}",
    }
    with Workflow() as built:
        Container(
            name=END,
            command=["python", "-m", "tuneloop.cluster.reservations", END],
            args=encode_flags(arguments),
            **step_fields("tuneloop-graphs", cluster),
        )
    spec = workflow["spec"]
    spec["templates"] += built.to_dict()["spec"]["templates"]
    previous = spec.get("onExit")
    spec["onExit"] = END
    if previous:
        # A workflow has one handler: both are tasks of it, which run at the same time.
        tasks = [{"name": name, "template": name} for name in (previous, END)]
        spec["templates"].append({"name": "end-run", "dag": {"tasks": tasks}})
        spec["onExit"] = "end-run"


def list_entry_templates(workflow: JsonMapping) -> list[str]:
    """List the templates at which the workflow, or one that continues it, may start."""
    names = [workflow["spec"]["entrypoint"]]
    for template in workflow["spec"]["templates"]:
        container = template.get("container") or {}
        if "tuneloop.cluster.continue_run" in container.get("command", ()):
            arguments = container["args"]
            names.append(arguments[arguments.index("--entrypoint") + 1])
    return list(dict.fromkeys(names))
