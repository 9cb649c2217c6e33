"""Steps that reserve or release shared devices, or end a Dynamo graph: they run
`tuneloop.cluster.reservations`.
"""

from collections.abc import Iterable
from typing import Any

from hera.workflows import DAG, Container, Task, Workflow

from tuneloop.argo.claims import END, GIVE, ROLE_BY_IMAGE, TAKE, TRAINER, claim_output, share_of
from tuneloop.argo.pod_fields import step_fields
from tuneloop.argo.tasks import pod_output
from tuneloop.core.json_types import JsonObject
from tuneloop.core.program import encode_flags
from tuneloop.workflow.settings import Cluster


def build_reservation_steps(cluster: Cluster) -> list[Container]:
    """Build the steps that reserve the claims of a workflow, and release them.

    There are none if the workflow claims no devices.
    """
    share = cluster.share
    if not (share and share.device_class):
        return []
    roles = [TRAINER]
    roles += ROLE_BY_IMAGE.values()
    # With one claim for all roles they have one output, which is a parameter once.
    names = dict.fromkeys(claim_output(share, role) for role in roles)
    reservations = [pod_output(name, global_name=name) for name in names]
    steps: list[Container] = []
    for name, outputs in ((TAKE, reservations), (GIVE, [])):
        step = Container(
            name=name,
            outputs=outputs,
            command=["python", "-m", "tuneloop.cluster.reservations", name],
            args=["--workflow", "{{workflow.name}}", "--namespace", "{{workflow.namespace}}"],
            **step_fields("tuneloop-claims", cluster),
        )
        steps.append(step)
    return steps


def reserve_claims(workflow: Workflow) -> None:
    """Complete the step that reserves the claims of a drawn workflow.

    It runs before anything else, wherever the workflow may start. Nothing is done if the pods claim
    no devices.
    """
    templates: dict[str, Any] = {str(template.name): template for template in workflow.templates}
    share = share_of({"metadata": {"annotations": workflow.annotations}})
    if not share or TAKE not in templates:
        return
    take = templates[TAKE]
    # Templates of any kind may name a claim, also inside of the text of a JobSet.
    rendered = workflow.build().model_dump_json()
    # A claim that no stage of this workflow uses is not reserved.
    take.outputs = [
        output
        for output in take.outputs
        if f"{{{{workflow.outputs.parameters.{output.name}}}}}" in rendered
    ]
    names = [output.name for output in take.outputs]
    take.args += ["--share", share.model_dump_json(), "--claims"]
    take.args += names
    for graph in list_entry_graphs(templates.values()):
        for task in graph.tasks:
            if not task.depends and not task.dependencies:
                task.depends = "claim"
        graph.tasks.insert(0, Task(name="claim", template=TAKE))


def list_entry_graphs(templates: Iterable[Any]) -> list[Any]:
    """List the graphs at which a workflow, or one that continues it, may start: those that no other
    graph calls.
    """
    graphs = [template for template in templates if isinstance(template, DAG)]
    called: set[str] = set()
    for graph in graphs:
        for task in graph.tasks:
            target: Any = task.template
            # A task that was created by a name has only the name.
            called.add(target if isinstance(target, str) else target.name)
    return [graph for graph in graphs if graph.name not in called]


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
