"""The step that starts the next workflow of a long run; `tuneloop.cluster.continue_run` is what it runs."""

from collections.abc import Sequence

from hera.workflows import Container, Parameter
from hera.workflows.models import ValueFrom

from tuneloop.argo.pod_fields import OUTPUTS, step_fields
from tuneloop.workflow.settings import NEXT, Cluster


def proceed_template(entrypoint: str, arguments: Sequence[str], cluster: Cluster) -> Container:
    """Build a step ``continue`` that starts the run's next workflow at the template `entrypoint`.

    Args:
        arguments: the inputs of that template, and of this one.
        cluster: whose base image it uses.
    """
    passed = [f"{name}={{{{inputs.parameters.{name}}}}}" for name in arguments]
    own = ["--workflow", "{{workflow.name}}", "--namespace", "{{workflow.namespace}}", "--entrypoint", entrypoint]
    return Container(
        name="continue",
        inputs=[Parameter(name=name) for name in arguments],
        outputs=[Parameter(name=NEXT, global_name=NEXT, value_from=ValueFrom(path=f"{OUTPUTS}/{NEXT}"))],
        command=["python", "-m", "tuneloop.cluster.continue_run"],
        args=[*own, *passed],
        **step_fields("tuneloop-continue", cluster),
    )
