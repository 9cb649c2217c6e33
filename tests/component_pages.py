"""The page of each stage, from its docstring and signature; `make golden` writes them to ``docs/components/``."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
from collections.abc import Iterator
from typing import Any

import tuneloop.stages
from tuneloop.argo.pod_fields import find_role
from tuneloop.core.component import Component
from tuneloop.core.hooks import list_shipped_extensions
from tuneloop.core.program import to_kebab_case
from tuneloop.kfp.previews import render_markdown_table


def load_stages() -> Iterator[Component]:
    """Yield every stage that ships with tuneloop, by name."""
    for module in sorted(
        pkgutil.iter_modules(tuneloop.stages.__path__), key=lambda each: each.name
    ):
        made = getattr(importlib.import_module(f"tuneloop.stages.{module.name}"), module.name)
        assert isinstance(made, Component), (
            f"tuneloop.stages.{module.name} defines another stage than {module.name}"
        )
        yield made
    for extension in list_shipped_extensions():
        for path in extension.stages.values():
            yield extension.load(path)


def render_stage_page(stage: Component) -> str:
    """Render the Markdown page of a stage: what it does, its inputs, outputs and parameters."""
    from tuneloop.kfp.template import stage_component

    spec = stage_component(stage, "none", parameter_names=stage.Params.model_fields).component_spec
    kinds = {name: _kind(each.type) for name, each in [*spec.inputs.items(), *spec.outputs.items()]}
    role = find_role(stage, {})
    where = "a CPU" if role == "cpu" else f"what `cluster.{role}` asks for"
    where += (
        ", or `cluster.cpu` where it calls a server"
        if "engine" in stage.Params.model_fields
        else ""
    )
    inputs = [
        (f"`--{to_kebab_case(name)}`", kinds[name], "required" if needed else "optional")
        for name, needed in stage.inputs.items()
    ]
    outputs = [
        (f"`--{to_kebab_case(stage.output)}`", kinds[stage.output], "the URL where it is committed")
    ]
    shown = [
        (f"`{name}`", kind, "shown by Kubeflow Pipelines")
        for name, kind in _shown(stage, spec, kinds)
    ]
    results = [
        (f"`{name}`", kind.__name__, "result, for the workflow")
        for name, kind in stage.results.items()
    ]
    parameters = [
        (f"`--{to_kebab_case(name)}`", kinds[name], _default(field), field.description or "")
        for name, field in stage.Params.model_fields.items()
    ]
    parts = [
        f"# {stage.name}",
        inspect.getdoc(stage) or "",
        f"Image `{stage.image}`, on {where}: `python -m {stage.module}`.",
        "## Inputs",
        render_markdown_table(("flag", "artifact", ""), inputs) if inputs else "None.",
        "## Outputs",
        render_markdown_table(("name", "kind", ""), [*outputs, *results, *shown]),
        "## Parameters",
        render_markdown_table(("flag", "type", "default", "meaning"), parameters)
        if parameters
        else "None.",
    ]
    return "\n\n".join(parts) + "\n"


def _shown(stage: Component, spec: Any, kinds: dict[str, str]) -> Iterator[tuple[str, str]]:
    for name, each in spec.outputs.items():
        if each.type.startswith("system.") and name != stage.output:
            yield name, kinds[name]


def _kind(name: str) -> str:
    return name.removeprefix("system.").partition("@")[0]


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    return "" if field.default is None else f"`{json.dumps(field.default)}`"
