"""The exit handler that deletes the DynamoGraphDeployment (servers of Dynamo's operator) which was
created for one run alone.

`cluster/submission.py: Submission.plan` adds it. Its pod runs `cluster/reservations.py: main`,
which parses these flags, with the account ``tuneloop-graphs`` of
``manifests/admin/namespace/rights.yaml``. A workflow that was stopped runs no exit handler: there
`cluster/submit.py: stop_run` does the same. Tests: `tests/unit/cluster/test_reservations.py`,
`tests/cluster/test_fleet.py`.
"""

from tuneloop.argo.pod_fields import step_fields
from tuneloop.cluster.reservations import END
from tuneloop.core.json_types import JsonObject
from tuneloop.core.program import encode_flags
from tuneloop.workflow.settings import Cluster


def add_graph_end(workflow: JsonObject, cluster: Cluster) -> None:
    """Add an exit handler that ends the run's Dynamo graph, beside the handler that a rendered
    workflow has.
    """
    from hera.workflows import Container, Workflow

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
