"""Steps that reserve or release shared devices: they run `tuneloop.cluster.reservations`.

`pod.py` adds them when a workflow is rendered. The flags are parsed in `cluster/reservations.py`,
by the program of the workflow's images, which may be older: a new flag makes them refuse the step.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tuneloop.argo.pod_fields import step_fields
from tuneloop.argo.tasks import pod_output
from tuneloop.extensions.sharing.claims import ROLE_BY_IMAGE, TRAINER, claim_output, share_of
from tuneloop.extensions.sharing.settings import find_share
from tuneloop.sharing.claim_request import GIVE, TAKE
from tuneloop.workflow.settings import Cluster

if TYPE_CHECKING:
    from hera.workflows import Container, Workflow


def build_reservation_steps(cluster: Cluster) -> list["Container"]:
    """Build the steps that reserve the claims of a workflow, and release them.

    There are none if the workflow claims no devices.
    """
    from hera.workflows import Container

    share = find_share(cluster)
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


def reserve_claims(workflow: "Workflow") -> None:
    """Complete the step that reserves the claims of a drawn workflow.

    It runs before anything else, wherever the workflow may start: each graph at which it may gets a
    task ``claim``, on which its first tasks depend. Nothing is done if the pods claim no devices.
    """
    from hera.workflows import Task

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
    for graph in list_entry_graphs(templates.values(), workflow.on_exit):
        for task in graph.tasks:
            if not task.depends and not task.dependencies:
                task.depends = "claim"
        graph.tasks.insert(0, Task(name="claim", template=TAKE))


def list_entry_graphs(templates: Iterable[Any], exit_handler: Any) -> list[Any]:
    """List the graphs at which a workflow, or one that continues it, may start: those that no other
    graph calls, but for the one that runs at its end.
    """
    from hera.workflows import DAG

    graphs = [template for template in templates if isinstance(template, DAG)]
    called = {str(exit_handler)}
    for graph in graphs:
        for task in graph.tasks:
            target: Any = task.template
            # A task that was created by a name has only the name.
            called.add(target if isinstance(target, str) else target.name)
    return [graph for graph in graphs if graph.name not in called]
