"""Small workflows of shell containers, and their execution."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuneloop.local.executor import Outcome, execute_workflow
from tuneloop.local.journal import Node

Template = dict[str, Any]


def shell(
    name: str,
    script: str,
    *,
    inputs: tuple[str, ...] = (),
    outputs: tuple[str, ...] = (),
    **more: Any,
) -> Template:
    """A container that runs `script`; an output ``x`` is what it writes to ``/tmp/out/x``."""
    return {
        "name": name,
        "inputs": {"parameters": [{"name": each} for each in inputs]},
        "outputs": {
            "parameters": [
                {"name": each, "valueFrom": {"path": f"/tmp/out/{each}"}} for each in outputs
            ]
        },
        "container": {"image": "none", "command": ["sh", "-c", script]},
        **more,
    }


def given(**values: Any) -> dict[str, Any]:
    """Arguments by name; underscores stand for hyphens."""
    return {"parameters": [{"name": k.replace("_", "-"), "value": v} for k, v in values.items()]}


def task(name: str, template: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "template": template, **more}


def dag(*tasks: dict[str, Any], name: str = "main", **more: Any) -> Template:
    return {"name": name, "dag": {"tasks": list(tasks)}, **more}


def workflow(
    *templates: Template, parameters: Mapping[str, str] | None = None, **spec: Any
) -> dict[str, Any]:
    declared = [{"name": k, "value": v} for k, v in (parameters or {}).items()]
    return {
        "metadata": {"name": "w"},
        "spec": {
            "entrypoint": "main",
            "arguments": {"parameters": declared},
            "templates": list(templates),
            **spec,
        },
    }


def run(
    workdir: Path, *templates: Template, options: Mapping[str, Any] | None = None, **spec: Any
) -> Outcome:
    """Execute a workflow of `templates`, without a warm process."""
    return execute_workflow(
        workflow(*templates, **spec), workdir=workdir, warm=False, **(options or {})
    )


def named(outcome: Outcome) -> dict[str, Node]:
    """The nodes by path, without the workflow's name."""
    return {node.name.removeprefix("w").removeprefix("."): node for node in outcome.nodes.values()}
