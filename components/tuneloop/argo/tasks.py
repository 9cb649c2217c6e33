"""References to values of a running Workflow: tags of inputs and of tasks' outputs, and terms of
conditions.
"""

from typing import Any

from hera.expr import g
from hera.workflows import Parameter, Task
from hera.workflows.models import ValueFrom

from tuneloop.argo.pod_fields import OUTPUTS

RUN = "{{workflow.parameters.store}}/{{workflow.parameters.run}}"
"""URL of the run."""
ITERATION = f"{RUN}/iterations/{{{{inputs.parameters.iteration}}}}"
"""URL of an iteration, in the template that has its number."""
CONTINUED = "continued"
"""The template at which another workflow continues a loop; a fork begins there, too."""


class Output(str):
    """The tag of an output parameter; it knows the task that has it."""

    task: Task

    def __new__(cls, task: Task, name: str) -> "Output":
        output = super().__new__(cls, task_tag(str(task.name), name))
        output.task = task
        return output


def task_tag(task: str, name: str) -> str:
    """Return the tag of an output parameter of a task."""
    return f"{{{{tasks.{task}.outputs.parameters.{name}}}}}"


def input_tag(name: str) -> str:
    """Return the tag of an input parameter of the enclosing template."""
    return f"{{{{inputs.parameters.{name}}}}}"


def build_term(parameters: Any, name: str) -> Any:
    """Return the parameter `name` of ``….parameters`` as a term of an expression, as Argo writes
    it.
    """
    # A name with a dash would be read as a difference.
    return getattr(parameters, name) if name.isidentifier() else parameters[name]


def output_term(task: str, name: str) -> Any:
    """Return an output parameter of a task as a term of an expression."""
    outputs = build_term(g.tasks, task).outputs
    return build_term(outputs.parameters, name)


def pod_output(name: str, global_name: str | None = None) -> Parameter:
    """Return an output parameter of a pod: the text of the file that it writes for it.

    Args:
        name: of the parameter and of the file.
        global_name: under which the whole workflow sees it; None: only the graph around the pod.
    """
    path = ValueFrom(path=f"{OUTPUTS}/{name}")
    return Parameter(name=name, global_name=global_name, value_from=path)


def output_parameter(name: str, *, value: str | None = None, expression: Any = None) -> Parameter:
    """Return an output parameter of a graph: the value of a tag, or of an expression."""
    source = ValueFrom(expression=str(expression))
    if value:
        source = ValueFrom(parameter=value)
    return Parameter(name=name, value_from=source)
