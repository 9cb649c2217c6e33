"""References to values of a running Workflow.

A tag (``{{tasks.train.outputs.parameters.mean}}``) is replaced by Argo in any text of the manifest.
A term (``tasks.train.outputs.parameters.mean``) stands in an expression: a task's condition, or the
value of an output parameter. On one machine `workflow/expressions.py` evaluates both.
"""

from typing import Any

from hera.expr import g
from hera.workflows import Parameter, Task
from hera.workflows.models import ValueFrom

from tuneloop.argo.pod_fields import OUTPUTS

RUN = "{{workflow.parameters.store}}/{{workflow.parameters.run}}"
"""URL of the run, as a tag. An artifact lies at ``RUN/NAME`` for a task of `main` or `part`, and at
``ITERATION/STAGE`` for a step of the loop, where `runs/committed.py` looks for it."""
ITERATION = f"{RUN}/iterations/{{{{inputs.parameters.iteration}}}}"
"""URL of an iteration, in the template that has its number."""
CONTINUED = "continued"
"""The template at which another workflow continues a loop. `cluster/continue_run.py` makes it the
entrypoint of that workflow, and so does a fork, which begins in the middle of another run's loop.
"""


class Output(str):
    """The tag of a task's output parameter.

    `argo/pipeline.py` draws an edge of the graph from `task` to each task that uses the tag.
    """

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
    """Return the member `name` of a term, such as a parameter of ``….parameters`` or a task of
    ``tasks``, as a term of an expression."""
    # `a-b` would be read as a difference: such a name is written `parameters["a-b"]`.
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


def tag_parameter(name: str, tag: str) -> Parameter:
    """Return an output parameter of a graph that has the value of a tag (`task_tag`)."""
    return Parameter(name=name, value_from=ValueFrom(parameter=tag))


def expression_parameter(name: str, expression: Any) -> Parameter:
    """Return an output parameter of a graph that has the value of an expression (`hera.expr`)."""
    return Parameter(name=name, value_from=ValueFrom(expression=str(expression)))
